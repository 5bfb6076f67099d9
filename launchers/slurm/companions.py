"""Helpers of a batch step: guards watch the job's first node, and companions replace lost nodes.

    python -m fsdp_jobs.launchers.slurm.companions guard RUN_DIR
    python -m fsdp_jobs.launchers.slurm.companions node RUN_DIR NODE JOB

With --no-kill SLURM removes a lost node from the allocation, and the other nodes continue. That is right for every
node except the first: the batch step and the coordinator are lost with it, and nothing is left to end the job. A
guard, a step on another node, then requeues the job. SLURM does not replace a lost node of a running job, so the batch
step submits a companion: a job of one node whose agent joins the rendezvous of the main job, and ends with it.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from fsdp_jobs.config.errors import BadInput, one_line
from fsdp_jobs.launchers.slurm import client
from fsdp_jobs.launchers.slurm.steps import EXCLUDE_S, Commands, srun, start_again
from fsdp_jobs.launchers.supervisor import Attempt, StorageErrors
from fsdp_jobs.plan.topology import expand_hostlist
from fsdp_jobs.run import events, log
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import ATTEMPT_ENV, COORDINATOR_ENV, HOST_ENV
from fsdp_jobs.run.files import as_written, exists
from fsdp_jobs.run.processes import STOP_SIGNALS
from fsdp_jobs.run.threads import in_thread, wait_until
from fsdp_jobs.run.verdict import Verdict

_TRIES = 3  # per node
_POLL_S = 1.0
_QUEUE_S = 30.0  # between queries to SLURM
_LEAVE_S = 15.0  # for the agent, after the verdict
_GUARD_S = 3.0  # between a guard's checks of the coordinator
_SILENT_S = 12.0  # after which the node counts as lost: the batch step restarts a dead coordinator long before

logger = logging.getLogger(__name__)


@dataclass
class Companions:
    """The companions of an attempt, by the number of the node that each replaces."""

    run: RunDir
    commands: Commands
    env: dict[str, str]
    attempt: int
    jobs: dict[int, str] = field(default_factory=dict)
    tries: Counter[int] = field(default_factory=Counter)

    def request(self, nodes: Sequence[int]) -> bool:
        """Submit a companion for each of these nodes that has none queued or running; False if none will run.

        Further companions, and the requeued job, leave out a node that could not start one.
        After the last refusal `status` shows the reason.

        Raises:
            SlurmError: SLURM does not answer, or refuses.
        """
        known = client.queue()
        active = {job.id: job.name for job in known.values() if job.state.is_active}
        for node, id in tuple(self.jobs.items()):
            failed = id in known and known[id].reason == "JobLaunchFailure"  # also if its process was killed
            why = f"SLURM could not start job {id} on it: has it mounted the run directory?"
            with suppress(BadInput, OSError):  # the user edits the file, or storage fails; it is tried again
                if failed and not exists(self.run.node(self.attempt, node) / f"companion-{id}.out"):
                    self.run.exclude(known[id].nodes, EXCLUDE_S, why)
                    del self.jobs[node]  # only once: the user may allow the node again
        named = {name: id for id, name in active.items()}
        for node in nodes:
            name = f"{self.run.name}-{self.commands.job_id}-node-{node}"  # another run may have this name
            if name in named:  # SLURM may also have taken one without an answer
                self.jobs[node] = named[name]
            if self.jobs.get(node) in active or self.tries[node] == _TRIES:  # the site may name it anew
                continue
            self.tries[node] += 1
            try:
                self.jobs[node] = self._submit(node, name)
            except client.SlurmError as e:
                if self.tries[node] == _TRIES:
                    why = f"no node in place of node {node}: SLURM says: {one_line(e)}"
                    events.record(self.run, self.attempt, events.Waiting(why))
                raise
            active[self.jobs[node]] = name
            events.record(self.run, self.attempt, events.NodeAskedFor(node, self.jobs[node]))
        return any(self.jobs.get(node) in active or self.tries[node] < _TRIES for node in nodes)

    def _submit(self, node: int, name: str) -> str:
        program = [sys.executable, "-m", "fsdp_jobs.launchers.slurm.companions", "node"]
        script = f"#!/bin/bash\nexec {shlex.join([*program, str(self.run.path), str(node), self.commands.job_id])}\n"
        folder = self.run.node(self.attempt, node)
        folder.mkdir(parents=True, exist_ok=True)
        options = [
            f"--chdir={as_written('.')}",
            "--nodes=1",
            "--ntasks=1",
            "--no-requeue",
            f"--job-name={name}",
            f"--output={str(folder).replace('%', '%%')}/companion-%j.out",
        ]
        if excluded := self.commands.excluding(self.run.excluded_hosts()):
            options.append(f"--exclude={','.join(excluded)}")
        of_the_job = {*map(client.variable, client.OF_A_JOB)}
        env = {name: value for name, value in self.env.items() if name not in of_the_job}
        return client.sbatch(script, *options, *self.commands.submit, env=env)

    def release(self) -> None:
        """Cancel the companions: running ones would also end by themselves, waiting ones would start for nothing."""
        if self.jobs:
            try:
                client.call("scancel", "--quiet", *self.jobs.values())
            except client.SlurmError as e:
                logger.warning("%s", e)


def fill_in(run: RunDir, node: int, job_id: str) -> int:
    """Run one agent until its attempt ends; return its exit code if it ends before."""
    attempt, host = Attempt(run, int(os.environ[ATTEMPT_ENV])), os.environ["SLURMD_NODENAME"]
    storage_errors = StorageErrors()

    def is_over() -> bool:
        with storage_errors:
            return attempt.is_over() or run.last_attempt() != attempt.number
        return False

    if is_over() or not _may_run(job_id):
        return 0
    argv = [*srun([host], int(os.environ["SLURM_CPUS_ON_NODE"])), *Commands.read(run).agent_of(node)]
    agent = attempt.start(f"node-{node}", argv, {**os.environ, HOST_ENV: host})
    gone = in_thread(lambda: wait_until(lambda: not _may_run(job_id), math.inf, _QUEUE_S))
    while not agent.has_ended and not is_over():
        time.sleep(_POLL_S)
        if gone.done() and gone.result():  # raises its error
            return 0
    attempt.finish(_LEAVE_S)
    return 0 if is_over() else int(agent.popen.returncode)


def _may_run(job_id: str) -> bool:
    """Whether the job runs; True while SLURM's controller is unreachable, when only the verdict ends the job."""
    try:
        return client.running(job_id) is not None
    except client.SlurmError as e:
        logger.warning("%s", e)
        return True


def reachable(address: str) -> bool:
    """Return whether a process listens at host:port."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
    except OSError:
        return False
    return True


def guard(run: RunDir) -> None:
    """Wait for the verdict on the attempt; if the job's first node is lost before, requeue the job."""
    attempt, job_id, coordinator = int(os.environ[ATTEMPT_ENV]), Commands.read(run).job_id, os.environ[COORDINATOR_ENV]
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # these signals are meant for the ranks
    seen_at, storage_errors = time.monotonic(), StorageErrors()
    while True:
        with storage_errors:
            if Verdict.read(run, attempt) is not None:
                return
            if reachable(coordinator):
                seen_at = time.monotonic()
            elif time.monotonic() - seen_at > _SILENT_S:
                _requeue_without_first_node(run, attempt, job_id)
        time.sleep(_GUARD_S)


def _requeue_without_first_node(run: RunDir, attempt: int, job_id: str) -> None:
    """Requeue the job, and give the verdict, if SLURM has taken its first node from it."""
    try:
        job = client.running(job_id)
        if job is not None and job.batch_host not in expand_hostlist(job.nodes):
            if start_again(run, attempt, job_id, []):
                client.call("scancel", job_id)
            if Verdict.read(run, attempt) is None:  # SLURM gives this guard, and the other, some seconds more
                reason = f"lost {job.batch_host}, the job's first node, which had the coordinator"
                Verdict("infrastructure", "requeue", reason).close(run, attempt)
    except (client.SlurmError, BadInput) as e:  # retried in the next turn
        logger.warning("%s", e)


if __name__ == "__main__":
    log.configure()
    role, directory, *more = sys.argv[1:]
    if role == "node":
        sys.exit(fill_in(RunDir(directory), int(more[0]), more[1]))
    guard(RunDir(directory))
