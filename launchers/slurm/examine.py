"""Examine a site for `doctor`: its controller, a partition, accounting, preemption, requeues, and one node."""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fsdp_jobs import __version__
from fsdp_jobs.config.clusters import SlurmClusterConfig
from fsdp_jobs.config.resolve import accelerator, node_range
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.base import Finding, findings
from fsdp_jobs.launchers.slurm import client, container, site
from fsdp_jobs.launchers.slurm.script import asked, cluster_of
from fsdp_jobs.launchers.slurm.validate import answer, translate
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import as_written, file_system

_WAIT_S = 30  # for a free node
_IMPORT_MINUTES = 10  # for an image that the node does not have yet
_NOTE = ".doctor-"  # begins the name of a file in runs_dir that a node is asked to read
_CLOCK_SKEW_S = 2.0
_ON_NODE = """
import socket, sys, time, torch, fsdp_jobs
print(open(sys.argv[1]).read(), socket.gethostname(), time.time())
print(fsdp_jobs.__version__, torch.__version__, torch.cuda.device_count())
"""


def examine(config: JobConfig) -> Iterator[Finding]:
    """Yield each finding as soon as it is known: waiting for a node may take long.

    Raises:
        SlurmError: there is no SLURM here, or it does not answer.
    """
    cluster = cluster_of(config)
    wanted, where = asked(cluster, "partition")
    settings, partition = client.settings(), client.partitions_of(wanted)[0]
    state = "warning" if settings["SLURM_VERSION"] < "22.05" else "ok"
    fact = f"cluster {settings['ClusterName']}, SLURM {settings['SLURM_VERSION']}"
    yield Finding("controller", state, fact, "22.05 or newer: before, steps of a node compete for its GPUs and memory")
    size = f"{partition.nodes} nodes with {partition.size}, at most {partition.time}"
    fact = f"{partition.name}: {size}" if partition.nodes else where if wanted else "no default one"
    names = ", ".join(p.name for p in client.partitions())
    yield Finding("partition", "ok" if partition.nodes else "bad", fact, f"cluster.partition: {names}")
    try:
        client.call("sacct", "-n", "-X")
        yield Finding("accounting", "ok", "sacct answers")
    except client.SlurmError as e:
        fact = f"{str(e).splitlines()[-1]}; jobs that SLURM has forgotten are known by their run directories"
        yield Finding("accounting", "warning", fact)
    counts = accelerator(config) == "cpu" or "gpu" in settings.get("GresTypes", "")
    fact = "requested from SLURM, or none" if counts else "SLURM does not count them: a job finds those of its nodes"
    yield Finding("GPUs", "ok" if counts else "warning", fact)
    if partition.nodes:
        yield _preemption(settings, partition, config.elastic.stop_grace_s)
        try:
            yield _requeue(config)
        except client.SlurmError as e:
            yield from findings("node", [translate(config, partition, str(e))])
            return
        yield from _node(config, cluster)


def _preemption(settings: dict[str, str], partition: client.Partition, grace_s: float) -> Finding:
    shown = client.shown(partition)
    mode = re.search(r"PreemptMode=(\w+)", shown)
    kind = settings.get("PreemptType", "preempt/none")
    if kind == "preempt/qos":
        return Finding("preemption", "ok", "jobs are preempted by QOS: sacctmgr show qos format=name,preempt,gracetime")
    if kind == "preempt/none" or (mode and mode[1] == "OFF"):
        return Finding("preemption", "ok", "no job of this partition is preempted")
    # SLURM sends SIGTERM at the beginning and at the end of GraceTime, and SIGKILL after KillWait.
    seconds = sum(map(int, re.findall(r"GraceTime=(\d+)", shown) + re.findall(r"\d+", settings.get("KillWait", ""))))
    fact = f"a preempted job has {seconds} s to save; elastic.stop_grace_s is {grace_s:.0f}"
    cure = "a shorter checkpoint.every_minutes bounds what is lost"
    return Finding("preemption", "warning" if seconds < grace_s else "ok", fact, cure)


def _where(config: JobConfig) -> list[str]:
    """Return options that send a job of doctor's to where the user's would go; with a GPU if the user's has GPUs."""
    cluster = cluster_of(config)
    kind, colon, _ = (cluster.gpus_per_node or "").rpartition(":")
    option = site.ask().gpu_option if accelerator(config) != "cpu" else ""
    mem = "mem-per-cpu" if asked(cluster, "mem")[0] is None else "mem"
    keys = ("partition", "account", "qos", "constraint", "reservation", "comment", "wckey", mem)
    where = [f"--{key}={value}" for key in keys if (value := asked(cluster, key)[0]) is not None]
    return [*where, option.replace("{}", f"{kind}{colon}1")] if option else where


def _requeue(config: JobConfig) -> Finding:
    """Find out whether the site allows requeues, by a job that is submitted on hold and cancelled at once.

    Raises:
        SlurmError: SLURM takes no job for so many nodes and with these keys.
    """
    nodes = "--nodes={}-{}".format(*node_range(config.nodes))
    own = ("--job-name=doctor", nodes, "--time=2", "--output=/dev/null", "--requeue", "--hold")
    job = client.sbatch("#!/bin/sh\n", *own, *_where(config), env=os.environ)
    try:
        may = "Requeue=1" in client.call("scontrol", "show", "job", job)
    finally:
        client.call("scancel", job)
    fact = "jobs that ask for it are requeued" if may else "the site forbids it: a new job continues one that has saved"
    cure = "a longer cluster.time: each of them waits in the queue"
    return Finding("requeue", "ok" if may else "warning", fact, cure)


def _node(config: JobConfig, cluster: SlurmClusterConfig) -> Iterator[Finding]:
    """Run a task on one node to check that it sees the run directories and this Python, and one in the container."""
    runs = as_written(config.runs_dir)
    runs.mkdir(parents=True, exist_ok=True)
    kind = file_system(runs)
    python = container.python_outside(cluster, sys.executable)
    try:
        before = time.time()
        host, now, *versions = _ask_node(config, runs, [python], minutes=2)
        skew_s = max(before - float(now), float(now) - time.time(), 0.0)
    except client.SlurmError as e:
        yield _why_no_node(str(e), runs, kind)
        return
    yield Finding("runs_dir", "ok", f"{host} sees {runs} ({kind})")
    yield _versions("python", f"{host} runs {python}", versions)
    fact = f"the clock of {host} differs by {skew_s:.1f} s from this machine's"
    yield Finding("time", "ok" if skew_s < _CLOCK_SKEW_S else "warning", fact, "NTP on both")
    if cluster.container is None:
        return
    container.make_folders(config, RunDir(runs))
    agents = container.python_of_agents(cluster, config, RunDir(runs), python)
    try:
        host, _, *versions = _ask_node(config, runs, agents, minutes=_IMPORT_MINUTES)
        yield _versions("container", f"{host} runs {agents[-1]} in {cluster.container}", versions)
    except client.SlurmError as e:
        yield Finding(
            "container", "bad", _last_line(str(e)), "an image with fsdp_jobs in it; its interpreter: cluster.python=..."
        )


def _ask_node(config: JobConfig, runs: Path, python: list[str], minutes: int) -> list[str]:
    """Return what a node says: its name, its time in seconds, and its versions of fsdp_jobs and torch, and its GPUs.

    Raises:
        SlurmError: it does not see `runs`, or cannot run the script.
    """
    word = secrets.token_hex(8)
    note = runs / f"{_NOTE}{word}"
    note.write_text(word)
    place = [re.sub("^--mem=.*", "--mem=2G", option) for option in _where(config)]  # no node may have all of it free
    where = ["--nodes=1", "--ntasks=1", f"--time={minutes}", f"--immediate={_WAIT_S}", "--quiet", *place]
    try:
        timeout_s = 60 * minutes + 2 * _WAIT_S
        said = client.call("srun", *where, *python, "-c", _ON_NODE, str(note), timeout_s=timeout_s)
    finally:
        note.unlink()
    return said.rpartition(word)[2].split()[:5]  # a site may print lines around it


def _versions(title: str, fact: str, versions: Sequence[str]) -> Finding:
    fsdp_jobs, torch, gpus = versions
    fact = f"{fact} with fsdp_jobs {fsdp_jobs}, torch {torch}, {gpus} GPUs"
    return Finding(title, "ok" if fsdp_jobs == __version__ else "warning", fact, f"fsdp_jobs {__version__} there")


def _why_no_node(error: str, runs: Path, kind: str) -> Finding:
    if _NOTE in error:
        return Finding("runs_dir", "bad", f"the nodes do not see {runs} ({kind})", "runs_dir=... on shared storage")
    if "ModuleNotFound" in error or "No such file" in error or "execve" in error:
        return Finding("python", "bad", _last_line(error), "an environment on shared storage; cluster.python=...")
    return Finding("node", "warning", f"none examined: {answer(error)}", "all may be busy; try again later")


def _last_line(error: str) -> str:
    """Return the line that says most: that of enroot, which is not the last, or the last that is not srun's own."""
    lines = [line for line in error.splitlines() if line.strip() and "srun" not in line[:5]]
    return next((line for line in lines if "[ERROR]" in line), lines[-1] if lines else error)
