"""Stop a job, or all jobs of a sweep: running ones save first. No torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from fsdp_jobs.config.errors import Damaged
from fsdp_jobs.config.schema import JobConfig, plain_values
from fsdp_jobs.config.terminal import say
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.state import State
from fsdp_jobs.run.table import listed
from fsdp_jobs.submit.submitted import check_own, describe, has_ended, kill

_LEAVES_S = 30.0  # for the request to reach the job and, after the save, for the job to leave


def stop(runs: Sequence[RunDir], now: bool = False) -> None:
    """Save and stop jobs, all at the same time; with `now` stop them at once, without a checkpoint.

    The request to stop is a file in the run directory, so it also reaches a job whose launcher does not answer; then
    the verdict is awaited. A job that does not stop in time is named to the user and killed.

    Args:
        runs: of active jobs, in the order of submission.
        now: stop without saving.

    Raises:
        BadInput, JobFailed: a run belongs to another user, a job to another run, or the launcher of a job that must be
            killed does not answer.
    """
    for run in runs:
        check_own(run)
    handles = {run: run.handle for run in runs}
    said = describe(handles.values())
    queued = [run for run in runs if said[handles[run]].state is State.QUEUED]
    kill([handles[run] for run in reversed(queued)])  # last first, so that none of them is started meanwhile
    running = [run for run in runs if run not in queued]
    deadlines: dict[RunDir, float] = {}  # of the jobs that are still to stop
    for run in running if not now else ():
        write_atomic(run.stop_request, "cancelled")
        deadlines[run] = time.monotonic() + _grace_s(run) + _LEAVES_S
    if deadlines:
        names = listed([run.name for run in deadlines], of="jobs")
        say(f"{names}: asked to save a checkpoint and stop, even if this command ends", "yellow")
    while deadlines:
        said = describe(handles[run] for run in deadlines)
        for run, deadline in tuple(deadlines.items()):
            job = said[handles[run]]
            if has_ended(run, job):
                del deadlines[run]
                if job.state is State.SILENT:  # its launcher cannot remove leftovers now
                    running.remove(run)
            elif time.monotonic() > deadline:
                why = f": {job.message}" if job.state is State.SILENT else ""
                say(f"{run.name} has not stopped in time{why}", "yellow")
                del deadlines[run]
        time.sleep(0.2)
    kill([handles[run] for run in running])


def _grace_s(run: RunDir) -> float:
    """Return the run's `elastic.stop_grace_s`; the default if its configuration is damaged, or a program's own."""
    with suppress(Damaged, KeyError, TypeError):
        return float(plain_values(run.config)["elastic"]["stop_grace_s"])
    return JobConfig().elastic.stop_grace_s
