"""Launcher `local_fsdp`: every node is a process of this machine.

A detached supervisor stands in for a cluster's scheduler: it starts an attempt's coordinator and agents,
starts a died one again as a cluster would replace a node, and requeues when the verdict says so. It runs
as `python -m fsdp_jobs.launchers.local RUN_DIR` and outlives the terminal it was started from.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchx.specs import macros

from fsdp_jobs.config.clusters import LocalClusterConfig
from fsdp_jobs.config.schema import load_config
from fsdp_jobs.launchers.base import Job, TorchxScheduler
from fsdp_jobs.launchers.detached import (
    KILLED,
    DetachedLauncher,
    judge,
    kill_supervisor,
    start_supervisor,
)
from fsdp_jobs.launchers.supervisor import Restarted
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir, write_atomic
from fsdp_jobs.run.env import ADDRESS_ENV, ATTEMPT_ENV, COORDINATOR_ENV
from fsdp_jobs.run.processes import free_port
from fsdp_jobs.run.verdict import Verdict

_POLL_S = 0.1
_EARLY_DEATH_S = 10.0  # a process that dies younger than this, three times in a row, is not worth starting again
_LEAVE_S = 20.0  # what is left of an attempt so long after its verdict is killed


@dataclass
class Command:
    """One process of an attempt."""

    name: str  # coordinator, or node-<i>
    argv: list[str]
    env: dict[str, str]


@dataclass
class LocalRequest:
    """What is submitted: the processes, and where their run directory is."""

    run_dir: str
    commands: list[Command] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(
            f"{c.name}: {' '.join(f'{k}={v}' for k, v in c.env.items())} {' '.join(c.argv)}" for c in self.commands
        )


def visible_gpus() -> list[str]:
    """Ids of the NVIDIA GPUs that this process may use: CUDA_VISIBLE_DEVICES, else all that the driver lists."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [c for c in chosen.split(",") if c]
    return [str(i) for i, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]


class LocalLauncher(DetachedLauncher):
    """Runs a job as processes of this machine. An app's id is its run's name and the time of submission."""

    name = "local_fsdp"

    def prepare(self, jobs: Sequence[Job]) -> list[LocalRequest]:
        gpus = visible_gpus()
        return [_request(job, gpus) for job in jobs]

    def stage(self, request: LocalRequest, app_id: str) -> None:
        _write_commands(RunDir(request.run_dir), request.commands)

    def gpus_of(self, run: RunDir) -> list[str]:
        return [gpu for command in _read_commands(run) for gpu in _gpus(command)]

    def move(self, run: RunDir, gpus: Mapping[str, str]) -> None:
        commands = _read_commands(run)
        for command in commands:
            if mine := _gpus(command):
                command.env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.get(gpu, gpu) for gpu in mine)
        _write_commands(run, commands)

    def start(self, run: RunDir, app_id: str) -> None:
        start_supervisor(run, "fsdp_jobs.launchers.local")

    def kill(self, run: RunDir, app_id: str) -> None:
        if kill_supervisor(run):
            judge(run, 0, KILLED)


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
            if role.name == "trainer":  # its own GPUs, or none when there is not one for every rank
                enough = len(gpus) >= role.num_replicas * ranks
                mine = gpus[replica * ranks : (replica + 1) * ranks] if enough else []
                concrete.env["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
            request.commands.append(Command(name, [concrete.entrypoint, *concrete.args], concrete.env))
    return request


def _write_commands(run: RunDir, commands: Sequence[Command]) -> None:
    write_atomic(run.submit / "commands.json", json.dumps([vars(c) for c in commands], indent=2))


def _read_commands(run: RunDir) -> list[Command]:
    return [Command(**c) for c in json.loads((run.submit / "commands.json").read_text())]


def _gpus(command: Command) -> list[str]:
    return [gpu for gpu in command.env.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]


def run_attempt(run: RunDir, commands: list[Command], attempt: int, restart_nodes: bool) -> Verdict:
    """One life of the job, from the start of its processes to the verdict."""
    events.record(run, attempt, events.AttemptStarted(len(commands) - 1))
    env = {
        ATTEMPT_ENV: str(attempt),
        COORDINATOR_ENV: f"127.0.0.1:{free_port()}",
        ADDRESS_ENV: "127.0.0.1",
    }
    folder = run.attempt(attempt)
    processes = [
        Restarted(
            c.name,
            c.argv,
            folder / ("coordinator.log" if c.name == "coordinator" else f"{c.name}/agent.log"),
            {**os.environ, **c.env, **env},
            _EARLY_DEATH_S,
        )
        for c in commands
    ]
    try:
        while Verdict.read(run, attempt) is None:
            time.sleep(_POLL_S)
            for process in processes:
                exit_code = process.popen.poll()
                if exit_code is None or Verdict.read(run, attempt) is not None:
                    continue
                is_node = process.name != "coordinator"
                if is_node and (exit_code == 0 or not restart_nodes):
                    continue
                if not process.note_death():
                    judge(run, attempt, process.given_up())
                    break
                events.record(run, attempt, events.ProcessRestarted(process.name, exit_code))
                process.start()
        deadline = time.monotonic() + _LEAVE_S
        while any(p.popen.poll() is None for p in processes) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    finally:
        for process in processes:
            if process.popen.poll() is None:
                process.popen.kill()  # its children die with it
                process.popen.wait()
    verdict = Verdict.read(run, attempt)
    assert verdict is not None
    return verdict


def supervise(run: RunDir) -> int:
    """Attempts until the job is done, stopped, or not worth another one."""
    config = load_config(run.config)
    assert isinstance(config.cluster, LocalClusterConfig)
    commands = _read_commands(run)

    def stop(number: int, _frame: object) -> None:
        write_atomic(run.stop_request, f"{signal.Signals(number).name} to the supervisor")

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    while True:
        attempt = run.last_attempt() + 1
        run.attempt(attempt).mkdir(parents=True)
        verdict = run_attempt(run, commands, attempt, config.cluster.restart_nodes)
        if verdict.decision != "requeue":
            return verdict.exit_code_of_attempt


if __name__ == "__main__":
    sys.exit(supervise(RunDir(sys.argv[1])))
