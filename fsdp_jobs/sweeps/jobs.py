"""Submit a sweep's jobs, except those that are active or done, and observe them. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.run.record import JsonObject
from fsdp_jobs.run.tail import newest_json_lines
from fsdp_jobs.submit import submit as submission
from fsdp_jobs.submit.overview import VERDICT_S, Overview
from fsdp_jobs.submit.submitted import settle
from fsdp_jobs.submit.validate import composed, training_changes
from fsdp_jobs.sweeps.table import NEW, Row, Sweep, find_sweep, sweeps_in

_POLL_S = 1.0  # between looks at awaited jobs, at first and after one has ended
_SLOWEST_POLL_S = 15.0


def refresh(sweep: Sweep, rows: Sequence[Row], overview: Overview | None = None) -> None:
    """Update rows from their run directories and, for jobs that have not ended, from their launchers."""
    runs = [sweep.run_of(row) for row in rows]
    settle(runs)
    looked = (overview or Overview()).look([run for run in runs if run.is_submitted])
    for row, run in zip(rows, runs, strict=True):
        if run in looked:
            now = looked[run]
            row.handle, row.state, row.step, row.reason = now.handle, now.state, now.step or 0, now.reason
            row.objective = last_value(run.metrics, sweep.objective)
        elif Path(sweep.runs_dir).exists():  # else its storage does not answer, and no run is gone
            row.state, row.handle, row.reason = NEW, None, "not submitted, or removed since"


def measured(name: str, runs_dir: str) -> JsonObject:
    """Return a sweep's content from its runs' records, without a query to launchers.

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


def to_do(sweep: Sweep, jobs: Sequence[Sequence[str]]) -> tuple[list[Row], dict[Row, JobConfig]]:
    """Return the rows of jobs, and the configurations of those that are neither done nor active.

    A job is done after all steps that its overrides set; a user's program is done when it has ended successfully.

    Raises:
        BadInput: all overrides that do not fit, or would change jobs that are done or active.
    """
    rows = sweep.rows_for(jobs)
    configs = composed([sweep.overrides_of(row) for row in rows])
    refresh(sweep, sweep.jobs)
    undone, problems = dict[Row, JobConfig](), list[Problem]()
    for row, config in zip(rows, configs, strict=True):
        is_done = row.state == "done" and (config.is_program or row.step >= config.steps)
        if is_done or row.is_active:
            problems += training_changes(config, sweep.run_of(row))
        else:
            undone[row] = config
    if problems:
        raise BadInput(problems)
    return rows, undone


def submit(sweep: Sweep, configs: Mapping[Row, JobConfig], folder: Path) -> None:
    """Submit jobs together: all or none. The sweep must be locked.

    Args:
        folder: of the sweep, for launchers' files.

    Raises:
        BadInput: all problems of all jobs; nothing is written then.
    """
    prepared = submission.prepare([*configs.values()])
    for job, row in zip(prepared, configs, strict=True):
        job.sweep = sweep.record(row)
    submission.submit(prepared, [sweep.overrides_of(row) for row in configs], sweep.parallelism, folder)


def wait(sweep: Sweep, rows: Sequence[Row], say: Callable[[Row], Any]) -> None:
    """Wait until all rows have ended; `say` is called with each as it ends."""
    waiting, pause_s, overview = [*dict.fromkeys(rows)], _POLL_S, Overview(patience_s=VERDICT_S)
    while waiting:
        refresh(sweep, waiting, overview)
        for row in [row for row in waiting if not row.is_active]:
            say(row)
            waiting.remove(row)
            pause_s = _POLL_S
        if waiting:
            time.sleep(pause_s)
            pause_s = min(_SLOWEST_POLL_S, 1.1 * pause_s)
