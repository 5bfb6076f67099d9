"""Ends jobs, one or all of a sweep's: what runs saves first, what waits has nothing to save. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torchx.specs import AppState

from fsdp_jobs.config.schema import plain_values
from fsdp_jobs.run.directory import RunDir, write_atomic
from fsdp_jobs.submit.submit import ACTIVE, describe_many, kill_many


def stop(runs: Sequence[RunDir], now: bool, say: Callable[[str], None]) -> None:
    """Save and stop jobs, all at the same time; `now` stops at once, without a checkpoint.

    Args:
        runs: of jobs that are active, in the order they were submitted in.
        say: is told of jobs that do not stop in time, and are killed.
    """
    handles = {run.name: str(run.read_job()["handle"]) for run in runs}
    told = describe_many([handles[run.name] for run in runs])
    waiting = [run for run, job in zip(runs, told, strict=True) if job.state is AppState.PENDING]
    kill_many([handles[run.name] for run in reversed(waiting)])  # before a place becomes free for them
    running = [run for run in runs if run not in waiting]
    patience: dict[str, float] = {}
    for run in running if not now else []:
        write_atomic(run.stop_request, "cancelled")
        patience[run.name] = time.monotonic() + plain_values(run.config)["elastic"]["stop_grace_s"]
    while patience:
        names = list(patience)
        for name, job in zip(names, describe_many([handles[name] for name in names]), strict=True):
            if job.state not in ACTIVE:
                del patience[name]
            elif time.monotonic() > patience[name]:
                say(f"{name} has not stopped in time: killing it")
                del patience[name]
        time.sleep(0.2)
    kill_many([handles[run.name] for run in running])
