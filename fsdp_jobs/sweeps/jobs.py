"""Submit a sweep's jobs, none of them twice and none that is done, and observe them. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.run.status import ENDED
from fsdp_jobs.run.tail import newest_json_lines
from fsdp_jobs.submit import submit as submission
from fsdp_jobs.submit.overview import Overview
from fsdp_jobs.submit.submitted import settle
from fsdp_jobs.submit.validate import composed
from fsdp_jobs.sweeps.table import NEW, Row, Sweep, find_sweep, sweeps_in

_POLL_S = 1.0  # between two looks at jobs that are waited for, at first and after one has ended
_SLOWEST_POLL_S = 15.0


def refresh(sweep: Sweep, rows: Sequence[Row], overview: Overview | None = None) -> None:
    """Bring rows up to date from their run directories, and from launchers where jobs have not ended."""
    settle([sweep.run_of(row) for row in rows])
    submitted = []
    for row in rows:
        if sweep.run_of(row).is_submitted:
            submitted.append(row)
        else:
            row.state, row.handle, row.reason = NEW, None, ""
    runs = [sweep.run_of(row) for row in submitted]
    for row, run, now in zip(submitted, runs, (overview or Overview()).look(runs), strict=True):
        row.handle, row.state, row.step, row.reason = now.handle, now.state, now.step or 0, now.reason
        row.objective = last_value(run.metrics, sweep.objective)


def measured(name: str, runs_dir: str) -> dict[str, Any]:
    """Return a sweep's content by its runs' records; no launcher is asked.

    Raises:
        BadInput: there is no such sweep.
    """
    sweep = find_sweep(name, runs_dir)
    refresh(sweep, sweep.jobs, Overview(lambda _: {}))
    return sweep.content()


def best_runs(runs_dir: str) -> list[str]:
    """Return the run with the best objective of each sweep that has one."""
    found = []
    for sweep in sweeps_in(runs_dir).values():
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
        BadInput: overrides of any job that are wrong.
    """
    rows = sweep.rows_for(jobs)
    configs = composed([sweep.overrides_of(row) for row in rows])
    refresh(sweep, sweep.jobs)
    undone = {}
    for row, config in zip(rows, configs, strict=True):
        is_done = row.state == "done" and (config.is_program or row.step >= config.steps)
        if not is_done and not row.is_active:
            undone[row.run] = config
    return rows, undone


def submit(sweep: Sweep, configs: dict[str, JobConfig], folder: Path) -> None:
    """Submit jobs, given as run -> configuration, together, all or none. The sweep must be locked.

    Args:
        folder: the sweep's, for launchers' files.

    Raises:
        BadInput: whatever is wrong with any of them; nothing is written then.
    """
    rows = [row for row in sweep.jobs if row.run in configs]
    prepared = submission.prepare([configs[row.run] for row in rows])
    for job, row in zip(prepared, rows, strict=True):
        job.sweep = sweep.record(row)
    overrides = [sweep.overrides_of(row) for row in rows]
    handles = submission.submit(prepared, overrides, sweep.parallelism, folder)
    for row, handle in zip(rows, handles, strict=True):
        row.handle, row.state, row.reason = handle, "submitted", ""


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
