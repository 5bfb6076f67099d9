"""The launcher `local_fsdp`: every node is a process of this machine. No torch.

    python -m fsdp_jobs.launchers.local RUN_DIR

This supervisor stands in for a cluster's scheduler, and outlives the terminal: it starts the coordinator and the
agents of an attempt, restarts dead ones as a cluster would replace a node, and begins another attempt by the verdict.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdp_jobs.config.clusters import LocalClusterConfig
from fsdp_jobs.config.errors import Problem
from fsdp_jobs.config.resolve import node_range
from fsdp_jobs.config.schema import load_config
from fsdp_jobs.launchers.app import arguments
from fsdp_jobs.launchers.base import Job, prepare_each
from fsdp_jobs.launchers.detached import DetachedLauncher, main, staged
from fsdp_jobs.launchers.supervisor import Attempt, Process
from fsdp_jobs.plan.memory import size
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir, write_atomic
from fsdp_jobs.run.env import ADDRESS_ENV, ATTEMPT_ENV, COORDINATOR_ENV
from fsdp_jobs.run.processes import free_port, visible_gpus
from fsdp_jobs.run.verdict import Verdict

_LEAVE_S = 20.0  # for processes to end after their attempt's verdict


@dataclass
class LocalRequest:
    """The processes of a job."""

    run_dir: str
    gpus: list[str]  # ids; none if there is not one for every rank
    env: dict[str, str]
    coordinator: list[str]  # its command line
    nodes: list[list[str]]

    def processes(self) -> Iterator[tuple[str, list[str], dict[str, str]]]:
        """Yield name, command line and own environment of each process; every node has its share of the GPUs."""
        yield "coordinator", self.coordinator, self.env
        size = len(self.gpus) // len(self.nodes)
        for node, argv in enumerate(self.nodes):
            own = self.gpus[node * size : (node + 1) * size]
            yield f"node-{node}", argv, {**self.env, "CUDA_VISIBLE_DEVICES": ",".join(own)}

    def __str__(self) -> str:
        processes = ((name, *(f"{k}={v}" for k, v in env.items()), *argv) for name, argv, env in self.processes())
        return "\n".join(f"{name}: {' '.join(words)}" for name, *words in processes)


class LocalLauncher(DetachedLauncher):
    """Runs a job as processes of this machine."""

    name = "local_fsdp"
    supervisor = "fsdp_jobs.launchers.local"

    def prepare(self, jobs: Sequence[Job]) -> list[LocalRequest]:
        return prepare_each(jobs, _problems, _request)


create_scheduler = LocalLauncher.scheduler


def _problems(job: Job) -> Iterator[Problem]:
    nodes, ranks, gpus = node_range(job.config.nodes)[1], job.plan.ranks_per_node, visible_gpus()
    if job.config.cluster.accelerator == "cuda" and len(gpus) < nodes * ranks:
        what = f"{nodes} x {ranks} ranks need a GPU each; this machine shows {len(gpus)}"
        cure = "fewer nodes= or nproc_per_node=, or cluster.accelerator=auto, which then takes the CPU"
        yield Problem("cluster.accelerator=cuda", what, cure)
    memory, need = Path(job.config.checkpoint.memory.dir), nodes * job.plan.captured_bytes
    if not job.config.checkpoint.memory.every_steps:
        return
    if not memory.is_dir():
        what = "is not a folder on this machine"
        yield Problem(f"checkpoint.memory.dir={memory}", what, "/dev/shm, or another file system in memory")
    elif need > (room := shutil.disk_usage(memory).free):
        what = f"captures of {nodes} nodes take {size(need)} of this machine's memory, and {size(room)} are free there"
        cure = "checkpoint.memory.dir in a larger file system in memory, or checkpoint.memory.every_steps=0"
        yield Problem(f"checkpoint.memory.dir={memory}", what, cure)


def _request(job: Job) -> LocalRequest:
    coordinator, agent = job.app.roles
    nodes, gpus = agent.num_replicas, visible_gpus()
    needed = nodes * job.plan.ranks_per_node
    return LocalRequest(
        run_dir=str(job.run.path.resolve()),
        gpus=gpus[:needed] if len(gpus) >= needed else [],
        env=agent.env,
        coordinator=[coordinator.entrypoint, *arguments(coordinator)],
        nodes=[[agent.entrypoint, *arguments(agent, node)] for node in range(nodes)],
    )


class _LocalAttempt(Attempt):
    """An attempt whose nodes are processes of this machine."""

    def __init__(self, run: RunDir, restart_nodes: bool):
        super().__init__(run, run.last_attempt() + 1)
        self.restart_nodes = restart_nodes

    def restarts(self, process: Process) -> bool:
        return super().restarts(process) and (self.restart_nodes or process.name == "coordinator")

    def go(self, request: LocalRequest) -> Verdict:
        """Run the attempt to its end."""
        self.folder.mkdir(parents=True)
        events.record(self.run, self.number, events.AttemptStarted(len(request.nodes)))
        address = f"127.0.0.1:{free_port()}"
        env = {ATTEMPT_ENV: str(self.number), COORDINATOR_ENV: address, ADDRESS_ENV: "127.0.0.1"}
        for name, argv, own in request.processes():
            self.start(name, argv, {**os.environ, **own, **env})
        verdict = self.supervise()
        assert verdict is not None
        self.finish(_LEAVE_S)
        return verdict


def supervise(run: RunDir) -> int:
    """Run attempts until a verdict stops the job; return the exit code."""
    cluster, request = load_config(run.config).cluster, LocalRequest(**staged(run))
    assert isinstance(cluster, LocalClusterConfig)

    def stop(number: int, _frame: object) -> None:
        write_atomic(run.stop_request, f"{signal.Signals(number).name} to the supervisor")

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    while (verdict := _LocalAttempt(run, cluster.restart_nodes).go(request)).decision == "requeue":
        pass
    return verdict.exit_code_of_attempt


if __name__ == "__main__":
    main(supervise)
