"""Watches the first node from another one: when it dies, SLURM would leave the job running and empty.

With --no-kill a lost node is taken from the allocation and the others go on. That is right for every node but the
first: the batch step and the coordinator die with it, and nothing is left that would end the job.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time

from fsdp_jobs.launchers.slurm import client
from fsdp_jobs.plan.topology import expand_hostlist
from fsdp_jobs.run import log
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import ATTEMPT_ENV, COORDINATOR_ENV
from fsdp_jobs.run.verdict import Verdict

_POLL_S = 3.0
_SILENT_S = 12.0  # the batch step restarts a dead coordinator long before this

logger = logging.getLogger(__name__)


def reachable(address: str) -> bool:
    """Return whether a process listens at host:port."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
    except OSError:
        return False
    return True


def watch(run: RunDir, attempt: int, job_id: str, coordinator: str) -> None:
    """Wait for the verdict on the attempt; requeue the job when its first node is lost before."""
    seen_at = time.monotonic()
    while Verdict.read(run, attempt) is None:
        time.sleep(_POLL_S)
        if reachable(coordinator):
            seen_at = time.monotonic()
        elif time.monotonic() - seen_at > _SILENT_S:
            try:
                if (host := _lost_host(job_id)) is not None:
                    _requeue(run, attempt, job_id, host)
            except client.SlurmError as e:
                logger.warning("%s", e)


def _lost_host(job_id: str) -> str | None:
    """Return the job's first node if SLURM has taken it away."""
    job = client.running(job_id)
    return job.batch_host if job is not None and job.batch_host not in expand_hostlist(job.nodes) else None


def _requeue(run: RunDir, attempt: int, job_id: str, host: str) -> None:
    """Requeue the job, then write the verdict: SLURM leaves this process some seconds.

    Raises:
        SlurmError: SLURM refuses; to be tried again.
    """
    client.call("scontrol", "requeue", job_id)
    reason = f"lost {host}, the job's first node, which had the coordinator"
    Verdict("infrastructure", "requeue", reason).close(run, attempt)


if __name__ == "__main__":
    log.configure()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the ranks
    watch(RunDir(sys.argv[1]), int(os.environ[ATTEMPT_ENV]), client.own_id(), os.environ[COORDINATOR_ENV])
