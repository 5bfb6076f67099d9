"""Stop jobs, one or all of a sweep's: running ones save first. No torch."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fsdp_jobs.config.schema import plain_values
from fsdp_jobs.config.terminal import say
from fsdp_jobs.launchers.state import State
from fsdp_jobs.run.directory import RunDir, write_atomic
from fsdp_jobs.run.identity import check_may_act
from fsdp_jobs.submit.submitted import check_own, describe, has_ended, kill


def stop(runs: Sequence[RunDir], now: bool = False) -> None:
    """Save and stop jobs, all at the same time; with `now` stop them at once, without a checkpoint.

    Where a launcher is silent, the request to stop is in the run directory nevertheless, and the verdict is awaited.
    One that does not stop in time is killed, and the user told.

    Args:
        runs: of active jobs, in the order of submission.
        now: at once.

    Raises:
        BadInput, JobFailed: another user's run, or another run's job; a job that has to be killed, and whose launcher
            does not answer here.
    """
    for run in runs:
        check_may_act(run)
        check_own(run)
    handles = {run.name: str(run.read_job()["handle"]) for run in runs}
    states = [job.state for job in describe([handles[run.name] for run in runs])]
    queued = [run for run, state in zip(runs, states, strict=True) if state is State.QUEUED]
    kill([handles[run.name] for run in reversed(queued)])  # the last first: none of them is started meanwhile
    running = [run for run in runs if run not in queued]
    waiting = list(running) if not now else []
    deadlines: dict[str, float] = {}
    for run in waiting:
        write_atomic(run.stop_request, "cancelled")
        deadlines[run.name] = time.monotonic() + plain_values(run.config)["elastic"]["stop_grace_s"]
    while waiting:
        for run, job in zip(tuple(waiting), describe([handles[run.name] for run in waiting]), strict=True):
            if has_ended(run, job):
                waiting.remove(run)
                if job.state is State.SILENT:  # there is nobody to ask for its leftovers
                    running.remove(run)
            elif time.monotonic() > deadlines[run.name]:
                say(f"{run.name} has not stopped in time: killing it", "yellow")
                waiting.remove(run)
        time.sleep(0.2)
    kill([handles[run.name] for run in running])
