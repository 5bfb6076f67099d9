"""What `fsdp-jobs doctor cluster=slurm` examines: this login node, the cluster, and one of its nodes."""

from __future__ import annotations

import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from fsdp_jobs.config.clusters import SlurmClusterConfig
from fsdp_jobs.config.resolve import accelerator
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.base import Finding
from fsdp_jobs.launchers.slurm import client
from fsdp_jobs.launchers.slurm.script import cluster_of
from fsdp_jobs.launchers.slurm.validate import file_system

_COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
_WAIT_S = 30  # for a free node
_ON_NODE = (
    "import socket, sys, torch, fsdp_jobs;"
    "print(open(sys.argv[1]).read(), socket.gethostname(), torch.__version__, torch.cuda.device_count())"
)


def examine(config: JobConfig) -> Iterator[Finding]:
    """Yield findings one by one: the node may keep the caller waiting."""
    cluster = cluster_of(config)
    missing = [command for command in _COMMANDS if shutil.which(command) is None]
    if missing:
        yield Finding("commands", "bad", f"not on PATH: {', '.join(missing)}", "go to a login node of the cluster")
        return
    yield Finding("commands", "ok", client.call("sbatch", "--version").strip())
    try:
        settings, partition = client.settings(), client.partition(cluster.partition)
    except client.SlurmError as e:
        yield Finding("controller", "bad", str(e), "SLURM_CONF, or the cluster's administrator")
        return
    yield Finding("controller", "ok", f"cluster {settings['ClusterName']}, SLURM {settings['SLURM_VERSION']}")
    size = f"{partition.nodes} nodes, {partition.cpus} CPUs, {partition.gres}, at most {partition.time}"
    if partition.nodes:
        yield Finding("partition", "ok", f"{partition.name}: {size}")
    else:
        names = ", ".join(p.name for p in client.partitions())
        yield Finding("partition", "bad", cluster.partition or "no default one", f"cluster.partition: {names}")
    try:
        client.call("sacct", "-n", "-X")
        yield Finding("accounting", "ok", "sacct answers")
    except client.SlurmError as e:
        fact = f"{str(e).splitlines()[-1]}; jobs that SLURM has forgotten are known by their run directories"
        yield Finding("accounting", "warning", fact)
    if accelerator(config) == "cpu":
        yield Finding("GPUs", "ok", "none requested")
    elif "gpu" in settings.get("GresTypes", ""):
        yield Finding("GPUs", "ok", "requested from SLURM")
    else:
        yield Finding("GPUs", "warning", "SLURM does not count GPUs here: a job takes whole nodes, and finds its own")
    yield _preemption(settings, partition, config.elastic.stop_grace_s)
    yield from _node(config, cluster)


def _preemption(settings: dict[str, str], partition: client.Partition, grace_s: float) -> Finding:
    shown = client.call("scontrol", "show", "partition", partition.name) if partition.nodes else ""
    mode = re.search(r"PreemptMode=(\w+)", shown)
    if settings.get("PreemptType", "preempt/none") == "preempt/none" or (mode and mode[1] == "OFF"):
        return Finding("preemption", "ok", "no job of this partition is preempted")
    grace = re.search(r"GraceTime=(\d+)", shown)
    seconds = int(grace[1]) if grace else 0
    if seconds < grace_s:
        fact = f"a preempted job has {seconds} s to save; elastic.stop_grace_s is {grace_s:.0f}"
        return Finding("preemption", "warning", fact, "a shorter checkpoint.every_minutes bounds what is lost")
    return Finding("preemption", "ok", f"{seconds} s to save")


def _node(config: JobConfig, cluster: SlurmClusterConfig) -> Iterator[Finding]:
    """Run a task on one node: does it see the run directories, and this Python?"""
    runs = Path(config.runs_dir).resolve()
    runs.mkdir(parents=True, exist_ok=True)
    kind = file_system(runs)
    word = secrets.token_hex(8)
    note = runs / f".doctor-{word}"
    note.write_text(word)
    keys = ("partition", "account", "qos", "constraint", "reservation")
    options = [f"--{key}={getattr(cluster, key)}" for key in keys if getattr(cluster, key) is not None]
    where = ["--nodes=1", "--ntasks=1", "--time=2", f"--immediate={_WAIT_S}", "--quiet", *options]
    python = cluster.python or sys.executable
    try:
        _, host, torch, gpus = client.call("srun", *where, python, "-c", _ON_NODE, str(note)).split()
    except client.SlurmError as e:
        yield _why_no_node(str(e), runs, kind, note)
        return
    finally:
        note.unlink()
    yield Finding("runs_dir", "ok", f"{host} sees {runs} ({kind})")
    yield Finding("python", "ok", f"{host} runs {python} with torch {torch}, {gpus} GPUs free")


def _why_no_node(error: str, runs: Path, kind: str, note: Path) -> Finding:
    if note.name in error:
        return Finding("runs_dir", "bad", f"the nodes do not see {runs} ({kind})", "runs_dir=... on shared storage")
    if "ModuleNotFound" in error or "No such file" in error or "execve" in error:
        last = next(line for line in reversed(error.splitlines()) if line.strip() and "srun" not in line[:5])
        return Finding("python", "bad", last, "an environment on shared storage; cluster.python=...")
    return Finding("node", "warning", f"none examined: {error.splitlines()[-1]}", "all may be busy; try again later")
