"""The launcher `local_fsdp`: every node is a process of this machine. No torch."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from fsdp_jobs.config.clusters import LocalClusterConfig
from fsdp_jobs.config.errors import Problem
from fsdp_jobs.config.resolve import node_range
from fsdp_jobs.launchers.app import arguments
from fsdp_jobs.launchers.base import Job, prepare_each
from fsdp_jobs.launchers.detached import DetachedLauncher
from fsdp_jobs.launchers.local_supervisor import LocalRequest
from fsdp_jobs.plan.memory import size
from fsdp_jobs.run.processes import visible_gpus


class LocalLauncher(DetachedLauncher):
    """Runs a job as processes of this machine."""

    name = "local_fsdp"
    supervisor = "fsdp_jobs.launchers.local_supervisor"

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
    assert isinstance(job.config.cluster, LocalClusterConfig)
    coordinator, agent = job.app.roles
    nodes, gpus = agent.num_replicas, visible_gpus()
    needed = nodes * job.plan.ranks_per_node
    return LocalRequest(
        run_dir=str(job.run.path.resolve()),
        gpus=gpus[:needed] if len(gpus) >= needed else [],
        env=agent.env,
        coordinator=[coordinator.entrypoint, *arguments(coordinator)],
        nodes=[[agent.entrypoint, *arguments(agent, node)] for node in range(nodes)],
        restart_nodes=job.config.cluster.restart_nodes,
    )
