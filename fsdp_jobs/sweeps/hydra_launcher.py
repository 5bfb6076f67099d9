"""Implement Hydra's --multirun: a sweeper for grids, and a launcher that submits jobs together. No torch.

Hydra's own grid sweeper composes the jobs one after the other, which takes minutes for hundreds of jobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from fsdp_jobs.config.errors import BadInput, JobFailed, Problem
from fsdp_jobs.config.hydra import PLUGINS, check_sweep, ctrl_c, for_sweep, hydra_here, key_of, parsed, quoted_values
from fsdp_jobs.config.keys import value_problems
from fsdp_jobs.config.terminal import say
from fsdp_jobs.run.directory import find_run
from fsdp_jobs.submit.submit import prepare
from fsdp_jobs.sweeps import jobs
from fsdp_jobs.sweeps.identity import canonical, is_of_the_command, name_for
from fsdp_jobs.sweeps.show import ended_line, show_dry_run, show_submitted
from fsdp_jobs.sweeps.table import Row, Sweep, locked, sweeps_in


def multirun(overrides: Sequence[str]) -> int:
    """Run `--multirun` with these overrides. Return the number of awaited jobs that have failed.

    Raises:
        BadInput: all problems of all jobs; nothing is submitted then.
        JobFailed: Hydra's sweeper could not continue after a job failed.
    """
    for override in overrides:
        if key_of(override) == "hydra/launcher" and override != "hydra/launcher=fsdp_jobs":
            raise BadInput.at(override, "does not submit jobs of several nodes", "leave it out")
    check_sweep(overrides)
    failed: list[Row] = []

    def show_ended(row: Row) -> None:
        say(ended_line(row), "red" if row.state != "done" else None)
        if row.state != "done":
            failed.append(row)

    plugins = Plugins.instance()
    plugins.class_name_to_class |= {PLUGINS["launcher"]: SweepLauncher, PLUGINS["sweeper"]: GridSweeper}
    with hydra_here(), ctrl_c(waits=True):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        try:
            given = [for_sweep(override) for override in quoted_values(overrides)]
            hydra.multirun("config", show_ended, given, with_log_configuration=False)
        except HydraException as e:
            raise BadInput.at("--multirun", str(e)) from e
    return len(failed)


class GridSweeper(Sweeper):
    """Launch all combinations of the given values, in one batch or several.

    Not a subclass of `BasicSweeper`: Hydra's search for plugins reloads that module, and then its `super()` fails.
    """

    def __init__(self, max_batch_size: int | None, params: dict[str, str] | None):
        self.max_batch_size, self.params = max_batch_size, params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> list[Sequence[JobReturn]]:
        assert self.launcher is not None
        size = self.max_batch_size
        given = [*map(parsed, [*(f"{key}={value}" for key, value in self.params.items()), *arguments])]
        for o in given:
            if o.is_sweep_override() and not (o.is_discrete_sweep() and [*o.sweep_iterator()]):
                cure = f"{o.key_or_group}=A,B; intervals are for hydra/sweeper=optuna"
                raise BadInput.at(str(o.input_line), "has no values for a grid", cure)
        if not (size is None or (isinstance(size, int) and size > 0)):
            raise BadInput.at(f"hydra.sweeper.max_batch_size={size}", "is not a number of jobs", "at least 1")
        returns: list[Sequence[JobReturn]] = []
        for batch in BasicSweeper.split_arguments(given, size):
            returns.append(self.launcher.launch(batch, sum(map(len, returns))))
        return returns


class SweepLauncher(Launcher):
    """Submit the jobs of a batch that are neither done nor active; with sweep.wait, wait for all jobs."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Read and check the command's settings of the whole sweep.

        Args:
            task_function: called with each awaited Row when it has ended.
            config: the configuration that all jobs share.

        Raises:
            BadInput: all settings that contradict each other.
        """
        self.config, self.show_ended = config, task_function
        self.shown: Sweep | None = None  # by a dry run, with the jobs of earlier batches
        self.waits = bool(config.sweep.wait)
        given = [str(o) for o in config.hydra.overrides.task]
        several = [o for o in given if parsed(o).is_sweep_override()]
        searched = [o for o in map(str, config.hydra.overrides.hydra) if o.startswith("hydra.searchpath=")]
        self.fixed = searched + [o for o in given if o not in several and not is_of_the_command(o)]
        swept = [key_of(o) for o in several] + [str(k) for k in config.hydra.sweeper.get("params") or ()]
        if problems := list(_contradictions(config, swept)):
            raise BadInput(problems)
        name = config.sweep.name or config.name or name_for(swept, self.fixed)
        self.folder = find_run(config.sweep.dir, name).path
        with read_write(config), open_dict(config):  # the folder where sweepers write their results
            config.hydra.sweep.dir = str(self.folder)

    @ctrl_c(waits=False)
    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        shared = set(map(canonical, self.fixed))
        own = [[o for o in job if not is_of_the_command(o) and canonical(o) not in shared] for job in job_overrides]
        if self.config.dry_run:
            self.shown = sweep = self.shown or self._read()
            rows, undone = jobs.to_do(sweep, own)
            for config in undone.values():
                config.dry_run = True  # a setting of the command, which rows do not have
            show_dry_run(rows, prepare(list(undone.values())))
        else:
            with locked(self.folder):
                sweep = self._read()
                rows, undone = jobs.to_do(sweep, own)
                jobs.submit(sweep, undone, self.folder)
            show_submitted(sweep, rows, undone, initial_job_idx == 0 or not self.waits)
            if self.waits:
                try:
                    jobs.wait(sweep, rows, self.show_ended)
                except KeyboardInterrupt as e:
                    raise JobFailed("the jobs continue; the same command waits for them again") from e
        return [self._returned(sweep, row, list(job)) for row, job in zip(rows, job_overrides, strict=True)]

    def _read(self) -> Sweep:
        """Return the sweep's jobs, with the settings of this command."""
        name, config = self.folder.name, self.config
        sweep = sweeps_in(config.runs_dir).get(name, Sweep(name, config.runs_dir))
        settings = {key: config.sweep[key] for key in ("objective", "direction", "parallelism")}
        return replace(sweep, fixed=self.fixed, **settings)

    def _returned(self, sweep: Sweep, row: Row, overrides: list[str]) -> JobReturn:
        """Return a job's result for Hydra's sweepers: its objective, or why it has none."""
        result = JobReturn(overrides=overrides, status=JobStatus.COMPLETED)
        result.return_value = row.objective
        if self.waits and (row.state != "done" or row.objective is None):
            why = f"its metrics.jsonl has no {sweep.objective}" if row.state == "done" else row.reason
            result.return_value = JobFailed(f"{row.run} {row.state}: {why}")
            result.status = JobStatus.FAILED
        return result


def _contradictions(config: DictConfig, swept: Sequence[str]) -> Iterator[Problem]:
    """Yield problems with the settings of a whole sweep; `swept` are the keys with several values."""
    sweep, sweeper = config.sweep, config.hydra.sweeper
    for key in filter(is_of_the_command, swept):
        yield Problem(key, "applies to the whole sweep: it cannot have several values")
    yield from value_problems(OmegaConf.to_object(sweep), "sweep.")
    wanted = sweeper.get("direction")
    if (wanted := getattr(wanted, "name", wanted)) in ("minimize", "maximize") and wanted != sweep.direction:
        what = f"contradicts hydra.sweeper.direction={wanted}"
        yield Problem(f"sweep.direction={sweep.direction}", what, "the same for both")
    if sweep.name and config.name and sweep.name != config.name:
        what = f"name={config.name} names the sweep, too: its runs are {config.name}-000, {config.name}-001 ..."
        yield Problem(f"sweep.name={sweep.name}", what, "one of the two")
    if not sweep.wait and sweeper._target_ not in (PLUGINS["sweeper"], BasicSweeperConf._target_):
        what = f"{sweeper._target_.rpartition('.')[2]} chooses the next jobs by the results of the last ones"
        yield Problem("sweep.wait=false", what, "sweep.wait=true")
    elif sweep.wait and config.dry_run:
        yield Problem("dry_run=true", "submits nothing: sweep.wait has no results", "sweep.wait=false shows the jobs")
