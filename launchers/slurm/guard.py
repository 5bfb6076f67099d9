"""Watches the first node from another one: where it dies SLURM would leave the job running, and empty.

With --no-kill a lost node is taken from the allocation and the rest goes on, which is what we want of every node
but the first: the batch step and the coordinator die with that, and nobody is left who would end the job.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

from fsdp_jobs.launchers.slurm import client
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import ATTEMPT_ENV, COORDINATOR_ENV
from fsdp_jobs.run.verdict import Verdict

_LOOK_S = 3.0
_SILENT_S = 12.0  # the batch step starts a died coordinator again long before this


def reachable(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
    except OSError:
        return False
    return True


def watch(run: RunDir, attempt: int, job_id: str, coordinator: str) -> int:
    """Until the attempt is judged, by the coordinator or, when its node is lost to the job, by us."""
    seen = time.monotonic()
    while Verdict.read(run, attempt) is None:
        time.sleep(_LOOK_S)
        if reachable(coordinator):
            seen = time.monotonic()
        elif time.monotonic() - seen > _SILENT_S:
            try:
                if lost := _lost_host(job_id):
                    _requeue(run, attempt, job_id, lost)
            except client.SlurmError as e:
                print(f"WARNING {e}", flush=True)
    return 0


def _lost_host(job_id: str) -> str | None:
    """The job's first node, when SLURM has taken it away."""
    me = client.my_jobs(fresh=True).get(job_id)
    if me is None or me.state != "RUNNING":
        return None
    return me.batch_host if me.batch_host not in client.hostnames(me.nodes) else None


def _requeue(run: RunDir, attempt: int, job_id: str, host: str) -> None:
    """Once it is done the verdict is said: SLURM leaves this process some seconds.

    Raises:
        SlurmError: SLURM would not; to be tried again.
    """
    client.call("scontrol", "requeue", job_id)
    verdict = Verdict("infrastructure", "requeue", f"lost {host}, the job's first node: it had the coordinator")
    verdict.close(run, attempt)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # what the ranks are told is none of our business
    of_job = int(os.environ[ATTEMPT_ENV]), client.own_id(), os.environ[COORDINATOR_ENV]
    sys.exit(watch(RunDir(sys.argv[1]), *of_job))
