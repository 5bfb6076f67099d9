"""The batch step: run one attempt on one allocation until its verdict, then requeue the job or end it.

Runs as `python -m fsdp_jobs.launchers.slurm.batch RUN_DIR [SIGNAL]` on the job's first node; SIGNAL has come before.
Each node's agent is a separate step, so that losing one does not affect the others and a dead one can be restarted.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from fsdp_jobs.config.errors import BadInput, one_line
from fsdp_jobs.launchers.app import with_environment
from fsdp_jobs.launchers.slurm import client, node_test
from fsdp_jobs.launchers.slurm.companions import Companions, reachable
from fsdp_jobs.launchers.slurm.steps import EXCLUDE_S, LEAST_TRAINING_S, Commands, srun, start_again
from fsdp_jobs.launchers.supervisor import Attempt, Process, is_superseded
from fsdp_jobs.plan.topology import expand_hostlist
from fsdp_jobs.run import events, log
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import ATTEMPT_ENV, COORDINATOR_ENV, HOST_ENV
from fsdp_jobs.run.processes import STOP_SIGNALS, hold_port
from fsdp_jobs.run.status import RunStatus
from fsdp_jobs.run.tail import last_lines
from fsdp_jobs.run.threads import in_thread, wait_until
from fsdp_jobs.run.verdict import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, Verdict, judge

_QUEUE_S = 20.0  # between queries to SLURM, which limits them per user, unless a process has died
_AGAIN_S = 5.0  # between tries to start the job or a step again, and queries to a controller that is away
_ANSWER_S = 2.0  # for SLURM to answer whether a process ended because its node was lost
_RESEND_S = 1.0  # between stop signals to the coordinator
_LEAVE_S = 30.0  # for agents to end after the verdict
_LEAVE_SOON_S = 5.0  # the same before a requeue: the time limit may be near, and SLURM ends the remaining processes
_NO_SLURM_S = 600.0  # before a requeue, for an unreachable controller to come back
_STEPS = 3  # tries of a node test that begins nowhere, while the controller answers
_REQUEUES = 3  # tries while the controller answers, but refuses both a requeue and a new job
_REQUEUE_S = 120.0  # for SLURM to end this process after requeueing the job

# What srun would read for each step: --gpus counts all nodes; where a site's rules have raised --cpus-per-task, there
# are two numbers of CPUs, and srun refuses them.
_NOT_OF_STEPS = (
    *("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_TRES_PER_TASK"),
    *("SLURM_GPU_BIND", "SLURM_TRES_BIND"),  # the one task of a step gets all of its node's GPUs
)

logger = logging.getLogger(__name__)


class Batch(Attempt):
    """An attempt on the nodes of an allocation: the coordinator runs here, each agent as a step."""

    poll_s = 0.2
    early_s = 20.0

    def __init__(self, run: RunDir, commands: Commands, stop_signal: str | None = None):
        super().__init__(run)
        self.commands = commands
        self.job_id = commands.job_id
        self.hosts = self.allocated = expand_hostlist(os.environ["SLURM_JOB_NODELIST"])
        self.held = hold_port()
        self.coordinator = f"{socket.gethostname()}:{self.held.getsockname()[1]}"
        names = {ATTEMPT_ENV: str(self.number), COORDINATOR_ENV: self.coordinator}
        self.env = {**with_environment(commands.env), **names}
        for name in _NOT_OF_STEPS:
            self.env.pop(name, None)
        self.companions = Companions(run, commands, self.env, self.number)
        self.stop_signal = stop_signal
        self.bad_hosts: list[str] = []  # hosts on which no agent stays alive
        self._no_agent: Verdict | None = None  # what to end with if none does, on any host
        self._signalled_at = self._asked_at = 0.0
        self._question: Future[tuple[client.QueuedJob | None, bool]] | None = None  # SLURM has not answered it yet
        self._is_away = False  # the controller: it has not answered the last query
        self._told = ""  # why no process can be started

    def go(self) -> int:
        """Run the attempt and return the exit code of the job, unless SLURM kills this process to requeue it."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        self.begin(events.AttemptStarted(len(self.hosts), self.hosts, self.job_id, restarts))
        if self.commands.node_test and (verdict := self._test_nodes()) is not None:
            verdict.close(self.run, self.number)
        else:
            verdict = self._train()
        logger.info("attempt %d: %s, %s", self.number, verdict.verdict, verdict.reason)
        return self._start_again(verdict) if verdict.decision == "requeue" else verdict.exit_code_of_attempt

    def _on_signal(self, number: int, _frame: object) -> None:
        self.stop_signal = signal.Signals(number).name

    def _test_nodes(self) -> Verdict | None:
        """Test the nodes; return a verdict if any node or link fails."""
        folder = self.run.attempt(self.number) / "node-test"
        folder.mkdir()
        (folder / node_test.NONCE).touch()
        argv = [*srun(self.hosts), *self.commands.node_test, str(folder), *self.hosts]
        step = Process("node test", argv, self.run.process_log(self.number, "node-test"), self.env)
        tries = _STEPS
        while True:
            late = self._run_test(step, folder)
            if self.stop_signal:
                return Verdict("preempted", "requeue", f"{self.stop_signal} during the node test")
            if len(late) < len(self.hosts) or step.popen.returncode is None:
                break
            try:  # srun has failed before it began anywhere
                client.running(self.job_id)
                tries -= 1
            except client.SlurmError as e:
                self._tell(e)
            if not tries:
                return step.failed(f"the node test began on no node: {last_lines(step.log, 1).strip()}")
            wait_until(lambda: self.stop_signal is not None, _AGAIN_S)
        reports = [node_test.Report.from_json(file.read_bytes()) for file in sorted(folder.glob("*.json"))]
        bad, between = node_test.blame(reports, self.hosts, late)
        if bad and len(bad) < len(self.hosts):
            for host, why in bad.items():
                self.run.exclude(host, EXCLUDE_S, f"node test: {why}")
            facts = "; ".join(f"{host}: {why}" for host, why in bad.items())
            return Verdict("infrastructure", "requeue", f"node test: {facts}")
        if bad or between:  # no single node is to blame
            facts = "; ".join(between) or "; ".join(sorted(set(bad.values())))
            return step.failed(f"node test, {'links' if between else 'every node'}: {facts}")
        return None

    def _run_test(self, step: Process, folder: Path) -> set[str]:
        """Run the node test to its end, or until it takes too long; return the nodes that have not begun."""

        def is_done() -> bool:
            return step.has_ended or self.stop_signal is not None

        step.start()
        wait_until(lambda: is_done() or not node_test.late(folder, self.hosts), node_test.BEGINS_S)
        late = node_test.late(folder, self.hosts)
        if not late:
            wait_until(is_done, node_test.TIMEOUT_S)
        self._notice_end(step)
        step.popen.kill()
        return late

    def _notice_end(self, step: Process) -> None:
        """Stop as if signalled when a signal has ended a step: GraceTime and `scancel --signal` signal only steps."""
        if step.has_ended and (number := step.popen.returncode - 128) in STOP_SIGNALS:
            self._on_signal(number, None)

    def _tell(self, error: client.SlurmError) -> None:
        """Record, once for each reason, that this host cannot start processes on the nodes."""
        why = f"SLURM does not answer {self.hosts[0]}, which cannot start processes: {one_line(error)}"
        if why != self._told:
            self._told = why
            events.record(self.run, self.number, events.Waiting(why))

    def _train(self) -> Verdict:
        """Run the coordinator and the agents until the verdict, then wait until they have ended."""
        self.start("coordinator", self.commands.coordinator, self.env)
        cpus = client.cpus_by_node(self.hosts, os.environ["SLURM_JOB_CPUS_PER_NODE"])
        for node, host in enumerate(self.hosts):
            argv = [*srun([host], cpus[host]), *self.commands.agent_of(node)]
            self.start(f"node-{node}", argv, {**self.env, HOST_ENV: host}, [host])
        self._start_guard()
        verdict = self.supervise()
        assert verdict is not None
        self.processes = [p for p in self.processes if p.name != "guard"]  # it ends by itself
        self.finish(_LEAVE_S if verdict.decision == "stop" else _LEAVE_SOON_S)
        if self._question is not None:
            wait([self._question], _ANSWER_S)  # the pending query may submit a companion
        self.companions.release()
        return verdict

    def _start_guard(self) -> None:
        """Start guards on two other nodes, because one of them may be lost together with this node."""
        if hosts := [host for host in self.allocated if host != self.hosts[0]][:2]:
            program = [sys.executable, "-m", "fsdp_jobs.launchers.slurm.companions", "guard", str(self.run.path)]
            self.start("guard", [*srun(hosts), *program], self.env, hosts)

    def on_poll(self) -> None:
        now = time.monotonic()
        for process in self.processes:
            self._notice_end(process)
        if self.stop_signal and now - self._signalled_at > _RESEND_S:  # repeated: the coordinator may be a new one
            self._signalled_at = now
            if reachable(self.coordinator):  # then its signal handlers are installed
                self.processes[0].popen.send_signal(signal.SIGUSR1)
        has_died = any(p.has_ended and self.restarts(p) for p in self.processes)
        missing = self._without_agent()
        may_be_lost = self._is_away or missing or self.commands.max_nodes > 1  # a job ends with its only node
        is_due = may_be_lost and now - self._asked_at > (_AGAIN_S if self._is_away else _QUEUE_S)
        if self._question is None and (has_died or is_due):
            self._asked_at = now
            self._question = in_thread(lambda: self._ask(missing))
        if self._question is not None and wait([self._question], _ANSWER_S if has_died else 0).done:
            question, self._question = self._question, None
            try:
                job, will_get_none = question.result()
            except client.SlurmError as e:  # training continues
                self._is_away = True
                for process in self.processes:
                    process.early_deaths = 0
                logger.warning("%s", e)
                (status := RunStatus(self.run)).glance()
                if status.waits_for_nodes:
                    self._tell(e)
                return
            self._is_away = False
            if job is not None:
                self._look_at_allocation(job)
            if self._no_agent is not None and will_get_none and not self.stop_signal:
                self._end_without_agents(self._no_agent)

    def _end_without_agents(self, verdict: Verdict) -> None:
        """End an attempt of a run that has never trained; another waits for what its nodes lack now."""
        rounds = events.newest_of(self.run, events.RoundStarted)
        if not any(e.attempt >= self.run.first_attempt() for e in rounds):
            verdict.close(self.run, self.number)

    def _ask(self, missing: Sequence[int]) -> tuple[client.QueuedJob | None, bool]:
        """Return SLURM's record of this job, and whether no node has an agent or will get one from a companion."""
        job, may_come = client.running(self.job_id), False
        if self.commands.regrow and not self.stop_signal:
            try:
                may_come = self.companions.request(missing)
            except client.SlurmError as e:
                may_come = True  # it is tried again
                logger.warning("%s", e)
        return job, len(missing) == self.commands.max_nodes and not may_come

    def _look_at_allocation(self, job: client.QueuedJob) -> None:
        """End processes whose nodes SLURM has taken from the job."""
        self.allocated = expand_hostlist(job.nodes)
        for process in list(self.processes):
            if process.hosts and not set(process.hosts) & set(self.allocated):
                self._drop(process)
                self._asked_at = 0.0  # for a companion

    def _without_agent(self) -> list[int]:
        """Return the numbers of nodes without an agent here, up to the job's maximum."""
        names = {process.name for process in self.processes}
        return [node for node in range(self.commands.max_nodes) if f"node-{node}" not in names]

    def restarts(self, process: Process) -> bool:
        """Whether it is restarted now: srun needs a controller that answers and, after its start, some seconds more."""
        is_held = self._is_away or time.monotonic() - process.started < _AGAIN_S
        return super().restarts(process) and not (process.hosts and is_held)

    def _drop(self, process: Process) -> None:
        """End a step whose nodes were lost; otherwise its srun may wait for them forever."""
        process.popen.kill()
        process.popen.wait()
        self.processes.remove(process)
        if process.name == "guard":
            self._start_guard()
        else:
            events.record(self.run, self.number, events.TakenAway(process.name, list(process.hosts)))

    def give_up(self, process: Process, verdict: Verdict) -> None:
        """End the attempt only without a coordinator; a node without an agent gets a companion."""
        if process.name == "coordinator":
            verdict.close(self.run, self.number)
            return
        if process.name != "guard":
            self.bad_hosts += process.hosts
            self._no_agent = replace(verdict, reason=f"no node's agent stays alive; {verdict.reason}")
            self._asked_at = 0.0  # for a companion
        events.record(self.run, self.number, events.GivenUp(process.name, verdict.reason))

    def _start_again(self, verdict: Verdict) -> int:
        """Restart the job without the nodes that failed. Does not return if SLURM requeues it."""
        excluded = self.commands.excluding([*self.run.excluded_hosts(), *self.bad_hosts])
        deadline, tries, why = time.monotonic() + _NO_SLURM_S, _REQUEUES, ""
        while tries and time.monotonic() < deadline:
            try:
                job = client.running(self.job_id)  # raises while the controller or munge is down
                if job is None:
                    if not client.is_requeued(self.job_id):
                        why = f"{verdict.reason}; SLURM ends the job: fsdp-jobs resume {self.run.name} continues it"
                        judge(self.run, replace(verdict, decision="stop", reason=why))
                    return EXIT_REQUEUE
                margin_s = self.commands.margin_s
                if client.seconds(job.limit) < margin_s + LEAST_TRAINING_S:
                    why = f"its time limit is {job.limit}, and the last save is requested {margin_s} s before it: "
                    why += "resume it with a longer cluster.time, or a shorter elastic.stop_grace_s"
                    break
                tries -= 1
                if start_again(self.run, self.number, self.job_id, excluded):
                    return EXIT_DONE
                _exclude(self.job_id, excluded)
                self.stop_signal = None
                wait_until(lambda: self.stop_signal is not None, _REQUEUE_S)  # exiting earlier would count as a failure
                return EXIT_REQUEUE
            except (client.SlurmError, BadInput) as e:
                why = one_line(e)
                logger.warning("not started again: %s", why)
            time.sleep(_AGAIN_S)
        judge(self.run, Verdict("infrastructure", "stop", f"{verdict.reason}; not started again: {why}"))
        return EXIT_FAILED


def _exclude(job_id: str, hosts: Sequence[str]) -> None:
    """Exclude exactly these nodes: possible once the job is pending again, while this process still runs."""
    for _ in range(20):
        with suppress(client.SlurmError):
            client.call("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(hosts)}")
            logger.info("requeued; excluded nodes: %s", ", ".join(hosts) or "none")
            return
        time.sleep(0.2)
    logger.warning("could not exclude %s", ", ".join(hosts))


if __name__ == "__main__":
    log.configure()
    os.environ.pop("SLURM_JWT", None)  # it expires, and nodes need none
    directory = RunDir(sys.argv[1])
    if is_superseded(directory):
        sys.exit(f"{directory.name} was submitted again since: this job leaves")
    sys.exit(Batch(directory, Commands.read(directory), *sys.argv[2:]).go())
