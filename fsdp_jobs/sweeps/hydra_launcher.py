"""Hydra's --multirun: a sweeper that makes a grid's jobs, and a launcher that submits all of them at once. No torch.

Hydra's own sweeper composes each job to look at it, one after the other; the launcher does so for all, faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict, read_write
from rich.console import Console

from fsdp_jobs.config.errors import BadInput, JobFailed, Problem
from fsdp_jobs.config.hydra import PLUGINS, check_sweep, hydra_here
from fsdp_jobs.config.validate import value_problem
from fsdp_jobs.run.directory import find_run
from fsdp_jobs.sweeps import jobs
from fsdp_jobs.sweeps.identity import canonical, is_of_the_command, key_of, name_for
from fsdp_jobs.sweeps.show import show_dry_run, show_submitted, told
from fsdp_jobs.sweeps.table import Row, Sweep, locked, read_sweep

console = Console(highlight=False, markup=False)


def multirun(overrides: Sequence[str], config_dir: str | None) -> int:
    """Run `--multirun` with these overrides. Returns how many of the jobs that were waited for have failed.

    Raises:
        BadInput: whatever is wrong with any job; nothing is submitted then.
        JobFailed: Hydra's sweeper could not go on after a job failed.
    """
    searched = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"] if config_dir else []
    for override in overrides:
        if key_of(override) == "hydra/launcher" and override != "hydra/launcher=fsdp_jobs":
            raise BadInput([Problem(override, "does not submit jobs of several nodes", "leave it out")])
    check_sweep([*searched, *overrides])
    failed: list[Row] = []

    def tell(row: Row) -> None:
        console.print(told(row), style="red" if row.state != "done" else None, soft_wrap=True)
        if row.state != "done":
            failed.append(row)

    plugins = Plugins.instance()
    plugins.class_name_to_class |= {PLUGINS["launcher"]: SweepLauncher, PLUGINS["sweeper"]: GridSweeper}
    with hydra_here():
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        try:
            hydra.multirun("config", tell, [*searched, *overrides], with_log_configuration=False)
        except HydraException as e:
            raise BadInput([Problem("--multirun", str(e))]) from e
    return len(failed)


class GridSweeper(Sweeper):
    """All combinations of the values that are named, as one batch or several."""

    def __init__(self, max_batch_size: int | None, params: dict[str, str] | None):
        self.max_batch_size, self.params = max_batch_size, params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> list[Sequence[JobReturn]]:
        assert self.launcher is not None
        given = [*(f"{key}={value}" for key, value in self.params.items()), *arguments]
        parsed = OverridesParser.create().parse_overrides(given)
        returns: list[Sequence[JobReturn]] = []
        for batch in BasicSweeper.split_arguments(parsed, self.max_batch_size):
            if not batch:
                raise BadInput([Problem("--multirun", "a key has no value at all, so there is no job")])
            returns.append(self.launcher.launch(batch, sum(map(len, returns))))
        return returns


class SweepLauncher(Launcher):
    """Submits a batch of jobs together, those left out that are done or active; waits for them if it is asked to."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """`task_function` is called with each Row that has ended while it was waited for."""
        self.config, self.tell = config, task_function
        self.waits = bool(config.sweep.wait)
        sweeper = config.hydra.sweeper
        given = [str(o) for o in config.hydra.overrides.task]
        parser = OverridesParser.create()
        several = [o for o in given if parser.parse_override(o).is_sweep_override()]
        searched = [o for o in map(str, config.hydra.overrides.hydra) if o.startswith("hydra.searchpath=")]
        self.fixed = searched + [o for o in given if o not in several and not is_of_the_command(o)]
        swept = [key_of(o) for o in several] + [str(k) for k in sweeper.get("params") or ()]
        problems = [Problem(k, "is of the whole sweep, and cannot be swept") for k in swept if is_of_the_command(k)]
        for key in ("direction", "parallelism"):
            problems += value_problem(f"sweep.{key}", config.sweep[key])
        wanted = sweeper.get("direction")
        if (wanted := getattr(wanted, "name", wanted)) in ("minimize", "maximize") and wanted != config.sweep.direction:
            what = f"hydra.sweeper.direction={wanted} wants the opposite"
            problems.append(Problem(f"sweep.direction={config.sweep.direction}", what, "the same for both"))
        if config.sweep.name and config.name and config.sweep.name != config.name:
            what = f"name={config.name} names the sweep, too: its runs are {config.name}-000, {config.name}-001 ..."
            problems.append(Problem(f"sweep.name={config.sweep.name}", what, "one of the two"))
        if not self.waits and sweeper._target_ not in (PLUGINS["sweeper"], BasicSweeperConf._target_):
            what = f"{sweeper._target_.rpartition('.')[2]} chooses the next jobs by what the last ones have reached"
            problems.append(Problem("sweep.wait=false", what, "sweep.wait=true"))
        elif self.waits and config.dry_run:
            problems.append(Problem("dry_run=true", "has no results to wait for", "sweep.wait=false, to see the jobs"))
        if problems:
            raise BadInput(problems)
        name = config.sweep.name or config.name or name_for(swept, self.fixed)
        self.folder = find_run(config.sweep.dir, name).path
        with read_write(config), open_dict(config):  # where sweepers put what they have to say
            config.hydra.sweep.dir = str(self.folder)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        shared = set(map(canonical, self.fixed))
        own = [[o for o in job if not is_of_the_command(o) and canonical(o) not in shared] for job in job_overrides]
        if self.config.dry_run:
            sweep = self._read()
            rows, undone = jobs.to_do(sweep, own)
            show_dry_run(console, sweep, rows, jobs.prepare(sweep, list(undone.values())))
            return [self._returned(sweep, row, list(job)) for row, job in zip(rows, job_overrides, strict=True)]
        with locked(self.folder, console.print):
            sweep = self._read()
            rows, undone = jobs.to_do(sweep, own)
            jobs.submit(sweep, undone)
        show_submitted(console, sweep, rows, set(undone), initial_job_idx == 0 or not self.waits)
        if self.waits:
            different = list({row.run: row for row in rows}.values())
            jobs.wait(sweep, different, self.tell)
            self._write_down(different)
        return [self._returned(sweep, row, list(job)) for row, job in zip(rows, job_overrides, strict=True)]

    def _read(self) -> Sweep:
        """The sweep, with what this command says of all of it."""
        sweep, config = read_sweep(self.folder), self.config
        if sweep.jobs and sweep.runs_dir != config.runs_dir:
            what = f"sweep {sweep.name} has its runs in {sweep.runs_dir}/"
            raise BadInput([Problem(f"runs_dir={config.runs_dir}", what, "another sweep.name")])
        sweep.runs_dir, sweep.fixed = config.runs_dir, self.fixed
        sweep.objective, sweep.direction = config.sweep.objective, config.sweep.direction
        sweep.parallelism = config.sweep.parallelism
        return sweep

    def _write_down(self, ended: Sequence[Row]) -> None:
        """What was seen of rows, into a list that other commands may have written since."""
        with locked(self.folder, console.print):
            sweep = read_sweep(self.folder)
            seen = {row.run: row for row in ended}
            sweep.jobs = [seen.get(row.run, row) for row in sweep.jobs]
            sweep.write()

    def _returned(self, sweep: Sweep, row: Row, overrides: list[str]) -> JobReturn:
        """What Hydra's sweepers learn of a job: its objective, or why it has none."""
        result = JobReturn(overrides=overrides, status=JobStatus.COMPLETED)
        result.return_value = row.objective
        if self.waits and (row.state != "done" or row.objective is None):
            known = f"its metrics.jsonl has no {sweep.objective}" if row.state == "done" else row.reason
            result.return_value = JobFailed(f"{row.run} {row.state}: {known}")
            result.status = JobStatus.FAILED
        return result
