"""The batch step: one attempt on one allocation, from its first process to the verdict, then a requeue or the end.

Runs as `python -m fsdp_jobs.launchers.slurm.batch RUN_DIR` on the job's first node. Each node's agent is a step of
its own, so that losing one touches no other and a died one can be started again.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fsdp_jobs.launchers.slurm import client, preflight
from fsdp_jobs.launchers.slurm.regrow import Companions
from fsdp_jobs.launchers.slurm.script import Steps
from fsdp_jobs.launchers.supervisor import Restarted
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import ATTEMPT_ENV, COORDINATOR_ENV, HOST_ENV
from fsdp_jobs.run.events import record_event
from fsdp_jobs.run.processes import free_port
from fsdp_jobs.run.tail import tail
from fsdp_jobs.run.verdict import EXIT_REQUEUE, Verdict

_POLL_S = 0.2
_ASK_SLURM_S = 5.0
_EARLY_DEATH_S = 20.0  # a process that dies younger than this, three times in a row, is given up
_EXCLUDE_S = 6 * 3600.0  # a node that fails the preflight
_LEAVE_S = 30.0  # for agents to go after the verdict
_LEAVE_SOON_S = 5.0  # before a requeue: the time limit may be near, and SLURM ends what is left
_REQUEUE_S = 120.0  # for SLURM to end this process once it has requeued the job


class _Step(Restarted):
    """The coordinator, or a step on some hosts."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, env: dict[str, str], hosts: Sequence[str]):
        self.hosts = list(hosts)
        super().__init__(name, argv, log, env, _EARLY_DEATH_S)


def srun(hosts: Sequence[str], cpus: int | None = None) -> list[str]:
    """A step with one task on each of these hosts, that outlives the death of any of them."""
    listed = [f"--nodes={len(hosts)}", f"--ntasks={len(hosts)}", f"--nodelist={','.join(hosts)}"]
    share = ["--overlap", "--cpu-bind=none", "--mpi=none", *([f"--cpus-per-task={cpus}"] if cpus else [])]
    return ["srun", *listed, *share, "--no-kill", "--kill-on-bad-exit=0", "--wait=0"]


class Batch:
    """One attempt."""

    def __init__(self, run: RunDir, steps: Steps):
        self.run, self.steps = run, steps
        self.job_id = client.own_id()
        self.hosts = client.hostnames(os.environ["SLURM_JOB_NODELIST"])
        self.cpus = client.cpus_by_node(self.hosts, os.environ["SLURM_JOB_CPUS_PER_NODE"])
        self.attempt = run.last_attempt() + 1
        self.asked_to_leave: str | None = None
        self.given_up: list[str] = []  # hosts on which no agent stays alive
        self.processes: list[_Step] = []
        self._asked_at = 0.0
        self._allocated = self.hosts

    def go(self) -> int:
        """Run the attempt. Returns the exit code of the job, unless SLURM kills this process to requeue it."""
        for what in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(what, self._on_signal)
        folder = self.run.attempt(self.attempt)
        folder.mkdir(parents=True)
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        details = {"slurm_job": self.job_id, "restarts": restarts, "hosts": self.hosts}
        record_event(self.run, "attempt_started", self.attempt, nodes=len(self.hosts), **details)
        here = f"{socket.gethostname()}:{free_port()}"
        self.env = {**os.environ, **self.steps.env, ATTEMPT_ENV: str(self.attempt), COORDINATOR_ENV: here}
        if self.steps.preflight and (bad := self._preflight(folder / "preflight")) is not None:
            return self._end(bad)
        self._start("coordinator", self.steps.coordinator, folder / "coordinator.log")
        for number, host in enumerate(self.hosts):
            argv = [*srun([host], self.cpus[host]), *(a.replace("{node}", str(number)) for a in self.steps.agent)]
            self._start(
                f"node-{number}", argv, self.run.node(self.attempt, number) / "agent.log", [host], **{HOST_ENV: host}
            )
        self._start_guard(self.hosts[1:])
        self.companions = Companions(self.run, self.steps, self.env, self.attempt, self.job_id)
        verdict = self._until_verdict()
        self._until_gone(_LEAVE_S if verdict.decision == "stop" else _LEAVE_SOON_S)
        self.companions.release()
        return self._end(verdict)

    def _end(self, verdict: Verdict) -> int:
        print(f"attempt {self.attempt}: {verdict.verdict}, {verdict.reason}", flush=True)
        return self._requeue() if verdict.decision == "requeue" else verdict.exit_code_of_attempt

    def _preflight(self, folder: Path) -> Verdict | None:
        """Test the nodes; a verdict when there is something wrong with them."""
        folder.mkdir()
        (folder / preflight.NONCE).touch()
        where = [str(folder), str(self.steps.ranks_per_node), f"{self.hosts[0]}:{free_port()}", self.steps.accelerator]
        argv = [*srun(self.hosts), *self.steps.preflight, *where, *self.hosts]
        step = _Step("preflight", argv, folder / "preflight.log", self.env, self.hosts)
        deadline = time.monotonic() + preflight.TIMEOUT_S
        while step.popen.poll() is None and time.monotonic() < deadline and not self.asked_to_leave:
            time.sleep(_POLL_S)
        step.popen.kill()
        if self.asked_to_leave:
            return self._judge(Verdict("preempted", "requeue", f"{self.asked_to_leave} during the preflight"))
        bad, between = preflight.blame(preflight.read_reports(folder), self.hosts)
        if bad and len(bad) < len(self.hosts):
            for host, why in bad.items():
                self.run.exclude(host, _EXCLUDE_S, f"preflight: {why}")
            told = "; ".join(f"{host}: {why}" for host, why in bad.items())
            return self._judge(Verdict("infrastructure", "requeue", f"preflight: {told}"))
        if bad or between:  # none of them alone
            told = "; ".join(between) or "; ".join(sorted(set(bad.values())))
            reason = f"preflight, {'links' if between else 'every node'}: {told}"
            return self._judge(Verdict("infrastructure", "stop", reason, last_lines=tail(step.log, 15)))
        return None

    def _judge(self, verdict: Verdict) -> Verdict:
        """Where there is no coordinator that could."""
        verdict.close(self.run, self.attempt)
        return verdict

    def _start(self, name: str, argv: Sequence[str], log: Path, hosts: Sequence[str] = (), **env: str) -> None:
        self.processes.append(_Step(name, argv, log, {**self.env, **env}, hosts))

    def _start_guard(self, others: Sequence[str]) -> None:
        """On two nodes, so that one may die with this one."""
        if others:
            command = [sys.executable, "-m", "fsdp_jobs.launchers.slurm.guard", str(self.run.path)]
            hosts = others[:2]
            self._start("guard", [*srun(hosts), *command], self.run.attempt(self.attempt) / "guard.log", hosts)

    def _on_signal(self, number: int, _frame: object) -> None:
        self.asked_to_leave = signal.Signals(number).name

    def _until_verdict(self) -> Verdict:
        told_at = 0.0
        while (verdict := Verdict.read(self.run, self.attempt)) is None:
            time.sleep(_POLL_S)
            if self.asked_to_leave and time.monotonic() - told_at > 1:
                told_at = time.monotonic()
                self._tell_coordinator()
            if time.monotonic() - self._asked_at > _ASK_SLURM_S:
                self._ask_slurm()
            dead = [p for p in self.processes if p.popen.poll()]  # 0: it has done what it had to
            if dead:
                self._ask_slurm()
            for process in dead:
                if process in self.processes and Verdict.read(self.run, self.attempt) is None:
                    self._on_death(process, process.popen.returncode)
        return verdict

    def _tell_coordinator(self) -> None:
        """Every rank is to save and leave. Said again until it is done: the coordinator may be a new one."""
        host, _, port = self.env[COORDINATOR_ENV].rpartition(":")
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=1):  # it has its signal handlers
            self.processes[0].popen.send_signal(signal.SIGUSR1)

    def _ask_slurm(self) -> None:
        """Which nodes this job still has, and whether those come that were asked for in place of others."""
        self._asked_at = time.monotonic()
        try:
            me = client.my_jobs(fresh=True).get(self.job_id)
            if me is not None and me.state == "RUNNING":
                self._allocated = client.hostnames(me.nodes)
            for process in list(self.processes):
                if process.hosts and not set(process.hosts) & set(self._allocated):
                    self._take_away(process)
            if not self.asked_to_leave:
                wanted = [n for n in range(self.steps.max_nodes) if not self._has_agent(n)]
                self.companions.ask_for(wanted)
        except client.SlurmError as e:  # the controller is away: ranks need it no more than we do
            print(f"WARNING {e}", flush=True)

    def _has_agent(self, number: int) -> bool:
        return any(p.name == f"node-{number}" for p in self.processes)

    def _take_away(self, process: _Step) -> None:
        """SLURM has taken a step's nodes from the job; its srun may wait for them for ever."""
        process.popen.kill()
        process.popen.wait()
        self.processes.remove(process)
        if process.name == "guard":
            self._start_guard([h for h in self._allocated if h != self.hosts[0]])
        else:
            record_event(self.run, "taken_away", self.attempt, process=process.name, hosts=process.hosts)

    def _on_death(self, process: _Step, exit_code: int) -> None:
        if process.note_death():
            record_event(self.run, "process_restarted", self.attempt, process=process.name, exit_code=exit_code)
            process.start()
            return
        self.processes.remove(process)
        self.given_up += process.hosts if process.name != "guard" else []
        if process.name == "coordinator" or not any(self._has_agent(n) for n in range(self.steps.max_nodes)):
            self._judge(process.given_up())
        else:
            record_event(self.run, "given_up", self.attempt, process=process.name, why=process.given_up().reason)

    def _until_gone(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        staying = [p for p in self.processes if p.name != "guard"]
        while any(p.popen.poll() is None for p in staying) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _requeue(self) -> int:
        """Hand the job back to the queue, without the nodes that failed it. Does not return when that works."""
        excluded = [*sorted({*self.run.excluded_hosts(), *self.given_up}), *self.steps.exclude]
        try:
            me = client.my_jobs(fresh=True).get(self.job_id)
            if me is None or me.state != "RUNNING":
                print(f"not requeued: the job is {me.state if me else 'unknown to SLURM'}", flush=True)
                return EXIT_REQUEUE
            client.call("scontrol", "requeue", self.job_id)
            _exclude(self.job_id, excluded)
        except client.SlurmError as e:
            print(f"not requeued: {e}", flush=True)
            return EXIT_REQUEUE
        self._until_signalled()
        return EXIT_REQUEUE

    def _until_signalled(self) -> None:
        """SLURM ends a requeued job's batch step; what ends before that it would count as failed."""
        self.asked_to_leave = None
        deadline = time.monotonic() + _REQUEUE_S
        while self.asked_to_leave is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def _exclude(job_id: str, hosts: Sequence[str]) -> None:
    """Keep the job off these nodes and no others: possible once it is pending again, while this process lives."""
    for _ in range(20):
        with suppress(client.SlurmError):
            client.call("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(hosts)}")
            print(f"requeued{' without ' if hosts else ''}{', '.join(hosts)}", flush=True)
            return
        time.sleep(0.2)
    print(f"WARNING could not exclude {', '.join(hosts)}", flush=True)


if __name__ == "__main__":
    directory = RunDir(sys.argv[1])
    sys.exit(Batch(directory, Steps.from_json((directory.submit / "steps.json").read_text())).go())
