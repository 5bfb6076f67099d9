"""The launcher `local_fsdp`: every node is a process of this machine. No torch.

    python -m fsdp_jobs.launchers.local RUN_DIR

This supervisor stands in for a cluster's scheduler, and outlives the terminal: it starts the coordinator and the
agents of an attempt, restarts dead ones as a cluster would replace a node, and begins another attempt by the verdict.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchx.specs import macros

from fsdp_jobs.config.clusters import LocalClusterConfig
from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.schema import load_config
from fsdp_jobs.launchers.base import Job, TorchxScheduler, prepare_each
from fsdp_jobs.launchers.detached import DetachedLauncher, kill_supervisor, start_supervisor, supervisor_record
from fsdp_jobs.launchers.supervisor import Attempt, Process
from fsdp_jobs.run import events, log
from fsdp_jobs.run.directory import RunDir, write_atomic
from fsdp_jobs.run.env import ADDRESS_ENV, ATTEMPT_ENV, COORDINATOR_ENV
from fsdp_jobs.run.processes import free_port, record_this_process, visible_gpus
from fsdp_jobs.run.verdict import Verdict

_LEAVE_S = 20.0  # for processes to end after their attempt's verdict


@dataclass
class Command:
    """One process of an attempt."""

    name: str  # coordinator, or node-<i>
    argv: list[str]
    env: dict[str, str]


@dataclass
class LocalRequest:
    """The processes of a job."""

    run_dir: str
    commands: list[Command] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(
            f"{c.name}: {' '.join(f'{k}={v}' for k, v in c.env.items())} {' '.join(c.argv)}" for c in self.commands
        )


class LocalLauncher(DetachedLauncher):
    """Runs a job as processes of this machine."""

    name = "local_fsdp"

    def prepare(self, jobs: Sequence[Job]) -> list[LocalRequest]:
        gpus = visible_gpus()

        def one(job: Job) -> LocalRequest:
            nodes, ranks = len(job.plan.nodes) + len(job.plan.spares), job.plan.ranks_per_node
            if job.config.cluster.accelerator == "cuda" and len(gpus) < nodes * ranks:
                what = f"{nodes} x {ranks} ranks need a GPU each; this machine shows {len(gpus)}"
                cure = "fewer nodes= or nproc_per_node=, or cluster.accelerator=auto, which then takes the CPU"
                raise BadInput([Problem("cluster.accelerator=cuda", what, cure)])
            return _request(job, gpus)

        return prepare_each(one, jobs)

    def stage(self, request: LocalRequest, app_id: str) -> None:
        _write_commands(RunDir(request.run_dir), request.commands)

    def gpus_of(self, run: RunDir) -> list[str]:
        return [gpu for command in _read_commands(run) for gpu in _gpus(command)]

    def move(self, run: RunDir, gpus: Mapping[str, str]) -> None:
        commands = _read_commands(run)
        for command in commands:
            if before := _gpus(command):
                command.env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.get(gpu, gpu) for gpu in before)
        _write_commands(run, commands)

    def start(self, run: RunDir, app_id: str) -> None:
        start_supervisor(run, "fsdp_jobs.launchers.local")

    def kill(self, run: RunDir, app_id: str) -> bool:
        return kill_supervisor(run)


def create_scheduler(session_name: str, **_kwargs: object) -> TorchxScheduler:
    return TorchxScheduler(LocalLauncher(), session_name)


def _request(job: Job, gpus: list[str]) -> LocalRequest:
    request = LocalRequest(str(job.run.path.resolve()))
    for role in job.app.roles:
        for replica in range(role.num_replicas):
            values = macros.Values(img_root="", app_id=job.app.name, replica_id=str(replica), rank0_env="")
            concrete = values.apply(role)
            name = "coordinator" if role.name == "coordinator" else f"node-{replica}"
            ranks = job.plan.ranks_per_node
            if role.name == "trainer":  # its own GPUs, or none if there is not one for every rank
                enough = len(gpus) >= role.num_replicas * ranks
                own = gpus[replica * ranks : (replica + 1) * ranks] if enough else []
                concrete.env["CUDA_VISIBLE_DEVICES"] = ",".join(own)
            request.commands.append(Command(name, [concrete.entrypoint, *concrete.args], concrete.env))
    return request


def _write_commands(run: RunDir, commands: Sequence[Command]) -> None:
    write_atomic(run.submit / "commands.json", json.dumps([vars(c) for c in commands], indent=2))


def _read_commands(run: RunDir) -> list[Command]:
    return [Command(**c) for c in json.loads((run.submit / "commands.json").read_text())]


def _gpus(command: Command) -> list[str]:
    return [gpu for gpu in command.env.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]


class _LocalAttempt(Attempt):
    """An attempt whose nodes are processes of this machine."""

    def __init__(self, run: RunDir, restart_nodes: bool):
        super().__init__(run, run.last_attempt() + 1)
        self.restart_nodes = restart_nodes

    def restarts(self, process: Process) -> bool:
        return super().restarts(process) and (self.restart_nodes or process.name == "coordinator")

    def go(self, commands: Sequence[Command]) -> Verdict:
        """Run the attempt to its end."""
        self.folder.mkdir(parents=True)
        events.record(self.run, self.number, events.AttemptStarted(len(commands) - 1))
        address = f"127.0.0.1:{free_port()}"
        env = {ATTEMPT_ENV: str(self.number), COORDINATOR_ENV: address, ADDRESS_ENV: "127.0.0.1"}
        for command in commands:
            self.start(command.name, command.argv, {**os.environ, **command.env, **env})
        self.supervise()
        self.finish(_LEAVE_S)
        verdict = self.verdict
        assert verdict is not None
        return verdict


def supervise(run: RunDir) -> int:
    """Run attempts until a verdict stops the job; return the exit code."""
    config = load_config(run.config)
    assert isinstance(config.cluster, LocalClusterConfig)
    commands = _read_commands(run)

    def stop(number: int, _frame: object) -> None:
        write_atomic(run.stop_request, f"{signal.Signals(number).name} to the supervisor")

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    while (verdict := _LocalAttempt(run, config.cluster.restart_nodes).go(commands)).decision == "requeue":
        pass
    return verdict.exit_code_of_attempt


if __name__ == "__main__":
    log.configure()
    directory = RunDir(sys.argv[1])
    record_this_process(supervisor_record(directory))
    sys.exit(supervise(directory))
