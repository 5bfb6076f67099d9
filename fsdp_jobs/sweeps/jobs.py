"""Submit a sweep's jobs, none of them twice and none that is done, and observe them. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.status import ENDED
from fsdp_jobs.run.tail import newest_json_lines
from fsdp_jobs.submit import submit as submission
from fsdp_jobs.submit.overview import Overview
from fsdp_jobs.submit.submitted import settle
from fsdp_jobs.submit.validate import composed
from fsdp_jobs.sweeps.identity import canonical, identity, is_of_the_command
from fsdp_jobs.sweeps.table import NEW, Row, Sweep, find_sweep, read_sweep, sweep_names

_POLL_S = 1.0  # between two looks at jobs that are waited for, at first and after one has ended
_SLOWEST_POLL_S = 15.0


def refresh(sweep: Sweep, rows: Sequence[Row]) -> None:
    """Bring rows up to date from their run directories, and from launchers where jobs have not ended."""
    submitted = []
    settle([sweep.run_of(row) for row in rows])
    for row in rows:
        if sweep.run_of(row).is_submitted:
            submitted.append(row)
        elif row.state != "done":  # a job that is done stays so, also when its run directory was removed
            row.state, row.handle, row.reason = NEW, None, ""
    runs = [sweep.run_of(row) for row in submitted]
    for row, run, now in zip(submitted, runs, Overview().look(runs), strict=True):
        row.handle, row.state, row.step, row.reason = now.handle, now.state, now.step or 0, now.reason
        row.objective = last_value(run.metrics, sweep.objective)


def measured(name: str, sweeps_dir: str = "sweeps") -> dict[str, Any]:
    """Return a sweep's content with the newest objectives and the states as last seen; no launcher is asked.

    Raises:
        BadInput: there is no such sweep, or its table cannot be read.
    """
    sweep = read_sweep(find_sweep(name, sweeps_dir))
    for row in sweep.jobs:
        row.objective = last_value(sweep.run_of(row).metrics, sweep.objective)
    return sweep.content()


def best_runs(sweeps_dir: str = "sweeps") -> list[str]:
    """Return the run with the best objective of each sweep that has one."""
    found = []
    for name in sweep_names(sweeps_dir):
        sweep = read_sweep(find_sweep(name, sweeps_dir))
        refresh(sweep, sweep.jobs)
        found += [best.run] if (best := sweep.best()) is not None else []
    return found


def last_value(metrics: Path, key: str) -> float | None:
    """Return the newest number of a key in a metrics.jsonl."""
    numbers = (record.get(key) for record in newest_json_lines(metrics))
    return next((float(n) for n in numbers if isinstance(n, int | float)), None)


def to_do(sweep: Sweep, jobs: Sequence[Sequence[str]]) -> tuple[list[Row], dict[str, JobConfig]]:
    """Return the rows of jobs, and by run the configurations of those that are neither done nor active.

    Done means: all the steps that the overrides ask for; of a program, which alone knows them, that it has ended well.

    Raises:
        BadInput: overrides of any job that are wrong; a run of a row's name that is another job's.
    """
    if not sweep.jobs:
        sweep.jobs = list(_rows_of_runs(sweep))
    known = {row.run for row in sweep.jobs}
    rows = sweep.rows_for(jobs)
    configs = composed([sweep.overrides_of(row) for row in rows])
    if problems := list(dict.fromkeys(_name_clashes(sweep, [row for row in rows if row.run not in known]))):
        raise BadInput(problems)
    refresh(sweep, sweep.jobs)
    undone = {}
    for row, config in zip(rows, configs, strict=True):
        is_done = row.state == "done" and (config.is_program or row.step >= config.steps)
        if not is_done and not row.is_active:
            undone[row.run] = config
    return rows, undone


def _rows_of_runs(sweep: Sweep) -> Iterator[Row]:
    """Yield the rows of a sweep whose table was lost, from its run directories."""
    shared = set(identity(sweep.fixed))
    for job in sorted(Path(sweep.runs_dir).glob(f"{sweep.name}-[0-9][0-9][0-9]*/job.json")):
        overrides = [o for o in RunDir(job.parent).read_job()["overrides"] if not is_of_the_command(o)]
        if shared <= set(identity(overrides)):
            yield Row(job.parent.name, [o for o in overrides if canonical(o) not in shared])


def _name_clashes(sweep: Sweep, rows: Sequence[Row]) -> Iterator[Problem]:
    """Yield runs that exist although the sweep table does not list them, and are other jobs."""

    def job_of(overrides: Iterable[str]) -> tuple[str, ...]:
        return identity(o for o in overrides if not is_of_the_command(o))

    for row in rows:
        run = sweep.run_of(row)
        before = run.read_job().get("overrides")
        if before is not None and job_of(before) != job_of(sweep.overrides_of(row)):
            what = f"exists already, from another job: {' '.join(before)}"
            yield Problem(f"run {run.path}", what, "another sweep.name, or another runs_dir")


def submit(sweep: Sweep, configs: dict[str, JobConfig]) -> None:
    """Submit jobs, given as run -> configuration, together, all or none. The sweep must be locked.

    Raises:
        BadInput: whatever is wrong with any of them; nothing is written then.
    """
    rows = [row for row in sweep.jobs if row.run in configs]
    prepared = submission.prepare([configs[row.run] for row in rows])
    sweep.write()  # before the jobs exist: a command that dies in between has not lost their names
    overrides = [sweep.overrides_of(row) for row in rows]
    handles = submission.submit(prepared, overrides, sweep.parallelism, sweep.folder)
    for row, handle in zip(rows, handles, strict=True):
        row.handle, row.state, row.reason = handle, "submitted", ""
    sweep.write()


def wait(sweep: Sweep, rows: Sequence[Row], say: Callable[[Row], Any]) -> None:
    """Wait until all rows have ended; `say` is called with each as it ends."""
    waiting, pause_s = list(rows), _POLL_S
    while waiting:
        refresh(sweep, waiting)
        for row in [row for row in waiting if row.state in ENDED]:
            say(row)
            waiting.remove(row)
            pause_s = _POLL_S
        if waiting:
            time.sleep(pause_s)
            pause_s = min(_SLOWEST_POLL_S, 1.1 * pause_s)
