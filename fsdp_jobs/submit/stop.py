"""Stop jobs, one or all of a sweep's: running ones save first. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from fsdp_jobs.config.schema import plain_values
from fsdp_jobs.launchers.state import State
from fsdp_jobs.run.directory import RunDir, write_atomic
from fsdp_jobs.submit.submit import describe, kill


def stop(runs: Sequence[RunDir], now: bool, say: Callable[[str], None]) -> None:
    """Save and stop jobs, all at the same time; with `now` stop them at once, without a checkpoint.

    Args:
        runs: of active jobs, in the order of submission.
        say: is called with a message for each job that is killed because it did not stop in time.
    """
    handles = {run.name: str(run.read_job()["handle"]) for run in runs}
    states = [job.state for job in describe([handles[run.name] for run in runs])]
    queued = [run for run, state in zip(runs, states, strict=True) if state is State.QUEUED]
    kill([handles[run.name] for run in reversed(queued)])  # the last first: none of them is started meanwhile
    running = [run for run in runs if run not in queued]
    deadlines: dict[str, float] = {}
    for run in running if not now else []:
        write_atomic(run.stop_request, "cancelled")
        deadlines[run.name] = time.monotonic() + plain_values(run.config)["elastic"]["stop_grace_s"]
    while deadlines:
        names = list(deadlines)
        for name, job in zip(names, describe([handles[name] for name in names]), strict=True):
            if not job.state.is_active:
                del deadlines[name]
            elif time.monotonic() > deadlines[name]:
                say(f"{name} has not stopped in time: killing it")
                del deadlines[name]
        time.sleep(0.2)
    kill([handles[run.name] for run in running])
