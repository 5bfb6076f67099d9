"""The launcher `local_fsdp`: every node is a process of this machine. No torch."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from fsdp_jobs.config.clusters import LocalClusterConfig
from fsdp_jobs.config.errors import Problem
from fsdp_jobs.config.resolve import accelerator_of_node, most_nodes, ranks_per_node
from fsdp_jobs.config.schema import JobConfig, load_config
from fsdp_jobs.launchers.app import arguments
from fsdp_jobs.launchers.base import Finding, Job, findings, prepare_each
from fsdp_jobs.launchers.detached import DetachedLauncher
from fsdp_jobs.launchers.local_supervisor import LocalRequest
from fsdp_jobs.run import folders
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import as_written
from fsdp_jobs.run.processes import visible_gpus
from fsdp_jobs.run.rank_state import remove_leftovers
from fsdp_jobs.run.table import size

_SHM = 32 * 2**20  # bytes of /dev/shm for a rank: its data workers' batches, and NCCL's or gloo's buffers


class LocalLauncher(DetachedLauncher):
    """Runs a job as processes of this machine."""

    name = "local_fsdp"
    supervisor = "fsdp_jobs.launchers.local_supervisor"

    def examine(self, config: JobConfig) -> Iterator[Finding]:
        ranks, gpus = most_nodes(config) * ranks_per_node(config), len(visible_gpus())
        fact = f"{gpus} for {ranks} ranks, which use {accelerator_of_node(config, gpus, ranks)}"
        yield from findings("GPUs", list(_too_few_gpus(config)), fact)
        if Path("/dev/shm").is_dir():  # macOS has none
            free = shutil.disk_usage("/dev/shm").free
            cure = "mount -o remount,size=50% /dev/shm; in a container: docker run --shm-size=8g"
            yield Finding("/dev/shm", "ok" if free > ranks * _SHM else "warning", f"{size(free)} free", cure)
        up = [name for name, interface in psutil.net_if_stats().items() if interface.isup]
        fact = f"interfaces that are up: {', '.join(up)}; nodes here use the loopback"
        yield Finding("network", "ok" if {"lo", "lo0"} & set(up) else "bad", fact, "ip link set lo up")

    def kill(self, run: RunDir) -> bool:
        """End all processes of a run's newest job, and remove what they kept in this machine's memory."""
        had_job = super().kill(run)
        if had_job:
            remove_leftovers()
            folders.remove(Path(load_config(run.config).checkpoint.memory.dir), folders.snapshots_of(run))
        return had_job

    def prepare(self, jobs: Sequence[Job]) -> list[LocalRequest]:
        return prepare_each(jobs, _problems, _request)


create_scheduler = LocalLauncher.scheduler


def _too_few_gpus(config: JobConfig) -> Iterator[Problem]:
    nodes, ranks, gpus = most_nodes(config), ranks_per_node(config), visible_gpus()
    if config.cluster.accelerator == "cuda" and len(gpus) < nodes * ranks:
        what = f"{nodes} x {ranks} ranks need a GPU each; this machine shows {len(gpus)}"
        cure = "fewer nodes= or nproc_per_node=, or cluster.accelerator=auto, which then takes the CPU"
        yield Problem("cluster.accelerator=cuda", what, cure)


def _problems(job: Job) -> Iterator[Problem]:
    nodes = most_nodes(job.config)
    yield from _too_few_gpus(job.config)
    memory, need = Path(job.config.checkpoint.memory.dir), nodes * job.plan.snapshot_bytes
    if not job.config.checkpoint.memory.every_steps:
        return
    if not memory.is_dir():
        what = "is not a folder on this machine"
        yield Problem(f"checkpoint.memory.dir={memory}", what, "/dev/shm, or another file system in memory")
    elif need > (room := shutil.disk_usage(memory).free):
        what = f"snapshots of {nodes} nodes take {size(need)} of this machine's memory, and {size(room)} are free there"
        cure = "checkpoint.memory.dir in a larger file system in memory, or checkpoint.memory.every_steps=0"
        yield Problem(f"checkpoint.memory.dir={memory}", what, cure)


def _request(job: Job) -> LocalRequest:
    assert isinstance(job.config.cluster, LocalClusterConfig)
    coordinator, agent = job.app.roles
    nodes, gpus = agent.num_replicas, visible_gpus()
    needed = nodes * job.plan.ranks_per_node
    return LocalRequest(
        run_dir=str(as_written(job.run.path)),
        gpus=gpus[:needed] if len(gpus) >= needed else [],
        env=agent.env,
        coordinator=[coordinator.entrypoint, *arguments(coordinator)],
        nodes=[[agent.entrypoint, *arguments(agent, node)] for node in range(nodes)],
        restart_nodes=job.config.cluster.restart_nodes,
    )
