"""A sweep's jobs, submitted and observed: neither done again nor submitted twice. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fsdp_jobs.config.clusters import KubernetesClusterConfig
from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.hydra import compose_many
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.config.validate import check
from fsdp_jobs.run.directory import RunDir, newest_json_lines
from fsdp_jobs.submit import submit as submission
from fsdp_jobs.sweeps.identity import canonical, identity, is_of_the_command
from fsdp_jobs.sweeps.table import ENDED, NEW, Row, Sweep

_POLL_S = 1.0  # between two looks at jobs that are waited for, at first and after one has ended
_SLOWEST_POLL_S = 15.0


def refresh(sweep: Sweep, rows: Sequence[Row] | None = None) -> None:
    """Bring rows up to date: run directories tell of ends, launchers of what runs and waits."""
    submitted = []
    for row in sweep.jobs if rows is None else rows:
        if sweep.run_of(row).read_job():
            submitted.append(row)
        elif row.state != "done":  # what is done stays so, also when its directory was cleared away
            row.state, row.handle, row.reason = NEW, None, ""
    for row, status in zip(submitted, submission.statuses_of([sweep.run_of(r) for r in submitted]), strict=True):
        row.handle, row.state = status.run.read_job()["handle"], status.state
        row.step, row.reason = status.step, status.reason
        row.objective = last_value(status.run.metrics, sweep.objective)


def last_value(metrics: Path, key: str) -> float | None:
    """The newest number of a key in a metrics.jsonl."""
    numbers = (record.get(key) for record in newest_json_lines(metrics))
    return next((float(n) for n in numbers if isinstance(n, int | float)), None)


def to_do(sweep: Sweep, jobs: Sequence[Sequence[str]]) -> tuple[list[Row], dict[str, JobConfig]]:
    """The rows of jobs, and the configurations, by run, of those that are neither done nor active.

    Done means: all the steps that are asked for now.

    Raises:
        BadInput: whatever is wrong with any job's overrides; a run of such a name that is another job's.
    """
    if not sweep.jobs:
        sweep.jobs = list(_runs_without_list(sweep))
    known = {row.run for row in sweep.jobs}
    rows = sweep.rows_for(jobs)
    configs = composed(sweep, rows)
    found = [row for row in rows if row.run not in known]
    if problems := list(dict.fromkeys(_taken(sweep, found))):
        raise BadInput(problems)
    refresh(sweep)
    undone = {}
    for row, config in zip(rows, configs, strict=True):
        done = row.state == "done" and row.step >= config.steps
        if not done and not row.is_active:
            undone[row.run] = config
    return rows, undone


def composed(sweep: Sweep, rows: Sequence[Row]) -> list[JobConfig]:
    """The configurations of rows.

    Raises:
        BadInput: with what is wrong with overrides, and with what the good ones make, all at once.
    """
    jobs = [sweep.overrides_of(row) for row in rows]
    made = compose_many(jobs)
    problems = [p for job in made if isinstance(job, BadInput) for p in job.problems]
    if not problems:
        return [job for job in made if isinstance(job, JobConfig)]
    bad = {p.where for p in problems}
    for config in compose_many([[o for o in job if o not in bad] for job in jobs]):
        if isinstance(config, JobConfig):
            try:
                check(config)
            except BadInput as e:
                problems += e.problems
    raise BadInput(dict.fromkeys(problems))


def _runs_without_list(sweep: Sweep) -> Iterator[Row]:
    """Rows of the runs of a sweep whose list was lost."""
    shared = set(identity(sweep.fixed))
    for job in sorted(Path(sweep.runs_dir).glob(f"{sweep.name}-[0-9][0-9][0-9]*/job.json")):
        overrides = [o for o in RunDir(job.parent).read_job()["overrides"] if not is_of_the_command(o)]
        if shared <= set(identity(overrides)):
            yield Row(job.parent.name, [o for o in overrides if canonical(o) not in shared])


def _taken(sweep: Sweep, rows: Sequence[Row]) -> Iterator[Problem]:
    """Runs that are there already, although the sweep's list does not know them, and are other jobs."""
    for row in rows:
        run = sweep.run_of(row)
        before = run.read_job().get("overrides")
        if before is not None and _job_identity(before) != _job_identity(sweep.overrides_of(row)):
            what = f"is there already, from another job: {' '.join(before)}"
            yield Problem(f"run {run.path}", what, "another sweep.name, or another runs_dir")


def _job_identity(overrides: Sequence[str]) -> tuple[str, ...]:
    return identity(o for o in overrides if not is_of_the_command(o))


def prepare(sweep: Sweep, configs: Sequence[JobConfig]) -> list[submission.Prepared]:
    """Check, plan and render jobs. Writes and starts nothing.

    Raises:
        BadInput: whatever is wrong with any of them.
    """
    problems = list(dict.fromkeys(_unthrottled(sweep, configs)))
    try:
        prepared = submission.prepare_many(configs)
    except BadInput as e:
        raise BadInput([*problems, *e.problems]) from e
    if problems:
        raise BadInput(problems)
    return prepared


def _unthrottled(sweep: Sweep, configs: Sequence[JobConfig]) -> Iterator[Problem]:
    for cluster in [config.cluster for config in configs] if sweep.parallelism else []:
        if isinstance(cluster, KubernetesClusterConfig) and cluster.queue is None:
            what = "on Kubernetes a queue's quota says how many run at once"
            yield Problem(f"sweep.parallelism={sweep.parallelism}", what, "cluster.queue=NAME of a queue of Kueue's")


def submit(sweep: Sweep, undone: dict[str, JobConfig]) -> None:
    """Submit rows together, by run and configuration, all or none. Call it with the sweep locked.

    Raises:
        BadInput: whatever is wrong with any of them; nothing is written then.
    """
    rows = [row for row in sweep.jobs if row.run in undone]
    prepared = prepare(sweep, [undone[row.run] for row in rows])
    sweep.write()  # before the jobs are there: a command that dies in between has not lost their names
    overrides = [sweep.overrides_of(row) for row in rows]
    handles = submission.submit_many(prepared, overrides, sweep.parallelism, sweep.folder)
    for row, handle in zip(rows, handles, strict=True):
        row.handle, row.state, row.reason = handle, "submitted", ""
    sweep.write()


def wait(sweep: Sweep, rows: Sequence[Row], tell: Callable[[Row], Any]) -> None:
    """Until all rows have ended; `tell` is called with each, when it has."""
    waited = {row.run: row for row in rows}
    pause = _POLL_S
    while waited:
        refresh(sweep, list(waited.values()))
        for row in [row for row in waited.values() if row.state in ENDED]:
            tell(row)
            del waited[row.run]
            pause = _POLL_S
        if waited:
            time.sleep(pause)
            pause = min(_SLOWEST_POLL_S, 1.1 * pause)
