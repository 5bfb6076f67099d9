"""Validation before submission, by us and by SLURM with its messages at our keys; and what `doctor` examines."""

from __future__ import annotations

import logging
import math
import os
import pwd
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from fsdp_jobs import __version__
from fsdp_jobs.config.clusters import SlurmClusterConfig
from fsdp_jobs.config.errors import Problem
from fsdp_jobs.config.resolve import accelerator
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.base import Finding, Job
from fsdp_jobs.launchers.slurm import client
from fsdp_jobs.launchers.slurm.script import cluster_of, long_form
from fsdp_jobs.run.directory import as_written

_IN_MEMORY = ("tmpfs", "ramfs")  # file systems that no other machine can have mounted
_ABOUT_NODES = ("node configuration", "nodes are busy", "node not available", "nodes required")
_NO_REASON = "Unspecified error"  # where the site's own checks refuse, and say why in lines before
_NOT_EXTRA = {  # options of sbatch -> what there is for it
    "--array": "--multirun makes arrays",
    "--clusters": "submit on a login node of that cluster",
    "--nodes": "nodes=4, or nodes=2:4",
}
_LEAST_TRAINING_S = 30  # between the start of a job and its last save
_WAIT_S = 30  # for a free node
_CLOCK_SKEW_S = 2.0
_ON_NODE = """
import socket, sys, time, torch, fsdp_jobs
print(open(sys.argv[1]).read(), socket.gethostname(), time.time())
print(fsdp_jobs.__version__, torch.__version__, torch.cuda.device_count())
"""

logger = logging.getLogger(__name__)


def problems_here(job: Job) -> Iterator[Problem]:
    """Yield what this machine can tell: of the keys, and, if the cluster is to get the job, of itself."""
    cluster, run = cluster_of(job.config), job.run
    values = {f"cluster.{key}": value for key, value in vars(cluster).items() if key != "setup"}
    for key, value in {**values, "runs_dir": str(run.path.parent)}.items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and any(c in text for c in "\n\r\0"):
                yield Problem(f"{key}={text!r}", "holds a line break")
    for option in cluster.extra:
        if not option.startswith("-"):
            cure = "for example cluster.extra=\"['--licenses=foo']\""
            yield Problem(f"cluster.extra=[{option}]", "not an option of sbatch", cure)
        if (name := long_form(option).partition("=")[0]) in _NOT_EXTRA:
            yield Problem(f"cluster.extra=[{option}]", f"{name} is not for the user to set", _NOT_EXTRA[name])
    if job.away:
        return
    if (kind := file_system(run.path)) in _IN_MEMORY:
        what = f"is on {kind}, in this machine's memory: the nodes cannot see it"
        yield Problem(f"run directory {run.path}", what, "runs_dir=... on storage that the nodes share")
    if why := client.silent():
        cure = "submit on a login node; dry_run=true and plan work without one, cluster=local runs on this machine"
        yield Problem("cluster=slurm", f"there is no SLURM to submit to: {why}", cure)
        return
    here = client.settings()["ClusterName"]
    for name in ("SLURM_CLUSTERS", "SBATCH_CLUSTERS"):
        if (elsewhere := os.environ.get(name, here)) != here:
            what = f"jobs go to {here}, the cluster of this machine"
            yield Problem(f"{name}={elsewhere}", what, _NOT_EXTRA["--clusters"])


def file_system(path: Path) -> str:
    """Return the kind of file system that a path is on, or will be."""
    real = path.resolve()
    above = [mount for mount in psutil.disk_partitions(all=True) if real.is_relative_to(mount.mountpoint)]
    return str(max(reversed(above), key=lambda mount: len(mount.mountpoint)).fstype)  # of several in one place the last


def _seconds(time: str) -> float:
    """Parse a time limit as sbatch reads it; infinite for words, and for 0, by which SLURM means no limit."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        return math.inf
    days, first, second, third = (int(g) if g else 0 for g in match.groups())
    if match[1] is not None or match[4] is not None:  # days-hours[:minutes[:seconds]], hours:minutes:seconds
        return 86400 * days + 3600 * first + 60 * second + third or math.inf
    return 60 * first + second or math.inf  # minutes[:seconds]


def check_with_slurm(job: Job, script: str, margin_s: int, count: int) -> list[Problem]:
    """Let sbatch validate the script of one job or of an array of `count`; its answer in our keys.

    sbatch --test-only also refuses what only has to wait: for nodes that are down, drained or reserved now. That is
    no problem as long as the partition's nodes, those included, have what the job needs.
    """
    cluster = cluster_of(job.config)
    partition = client.partition(cluster.partition)
    is_one_of_several = "," in (cluster.partition or "")  # SLURM chooses one of them
    elsewhere = [o for o in map(long_form, cluster.extra) if o.startswith(("--time=", "--partition="))]
    is_default = not (elsewhere or is_one_of_several or "SBATCH_TIMELIMIT" in os.environ)
    limit = cluster.time or (partition.default_time if is_default else "")
    if _seconds(limit) < margin_s + _LEAST_TRAINING_S:
        whose = "" if cluster.time else f" ({partition.name}'s default is {limit})"
        what = f"the last save is requested {margin_s} s before the limit{whose}: no time is left to train in"
        return [Problem(f"cluster.time={cluster.time}", what, "a longer limit, or a shorter elastic.stop_grace_s")]
    if problems := [*_partition_problems(job, partition), *_qos_problems(job, _seconds(limit))]:
        return problems
    try:
        array = [f"--array=0-{count - 1}"] if count > 1 else []
        client.call("sbatch", "--test-only", *array, stdin=script, env=client.own_environment(os.environ, script))
    except client.SlurmError as e:
        if found := re.search(r"\w*MaxSubmit\w*", str(e)):
            return [_too_many(count, found[0])]
        is_about_nodes = any(words in str(e).lower() for words in _ABOUT_NODES)
        if not is_about_nodes or not partition.away or not _can_hold(partition, job):
            return [_translate(job.config, partition, str(e))]
    return []


def _can_hold(partition: client.Partition, job: Job) -> bool:
    """Whether a partition's nodes, if all of them were up, have what a job asks for by our keys."""
    cluster, trainer = cluster_of(job.config), job.role("trainer")
    gpus = re.findall(r"gpu:(?:[^:,()]+:)?(\d+)", partition.gres)
    mem = re.fullmatch(r"(\d+)([KMGT]?)", cluster.mem or "0", re.IGNORECASE)
    mem_mb = int(mem[1]) * {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}[mem[2].upper()] if mem else 0
    return (
        (trainer.min_replicas or trainer.num_replicas) <= partition.nodes
        and (cluster.cpus_per_task or trainer.resource.cpu) <= partition.cpus
        and (not gpus or trainer.resource.gpu <= max(map(int, gpus)))
        and mem_mb <= partition.memory_mb
    )


def compare_with_kill_wait(name: str, save_s: float, need_s: float) -> None:
    """Warn when `scancel` leaves a run that has saved before less time than twice what a save and a step took."""
    given = client.settings().get("KillWait", "").partition(" ")[0]
    if save_s and given.isdecimal() and need_s > int(given):
        what = "%s: scancel would end it %s s later (KillWait), maybe before it has saved, which took up to %.0f s: %s"
        logger.warning(what, name, given, save_s, f"fsdp-jobs cancel {name} waits for the save")


def _partition_problems(job: Job, partition: client.Partition) -> Iterator[Problem]:
    """Compare a job with the limits of its partition where sbatch takes it nevertheless, and lets it wait for ever."""
    config, cluster, trainer = job.config, cluster_of(job.config), job.role("trainer")
    if client.settings().get("EnforcePartLimits") != "NO" or "," in (cluster.partition or ""):
        return
    nodes = trainer.min_replicas or trainer.num_replicas
    waits = "SLURM would let the job wait for ever (EnforcePartLimits=NO)"
    if cluster.time and _seconds(cluster.time) > _seconds(partition.time):
        what = f"partition {partition.name} allows {partition.time}: {waits}"
        yield Problem(f"cluster.time={cluster.time}", what, f"cluster.time={partition.time} or less")
    if partition.most_nodes.isdecimal() and nodes > int(partition.most_nodes):
        what = f"a job of partition {partition.name} has at most {partition.most_nodes} nodes: {waits}"
        yield Problem(f"nodes={config.nodes}", what, "fewer, or another cluster.partition")


def _qos_problems(job: Job, limit_s: float) -> Iterator[Problem]:
    """Compare a job with the limits of the QOS that it names: sbatch lets a job wait for ever that breaks them."""
    cluster, trainer = cluster_of(job.config), job.role("trainer")
    if cluster.qos is None:
        return
    try:
        limits = client.call("sacctmgr", "-nP", "show", "qos", cluster.qos, "format=MaxWall,MaxTRES,MaxTRESPU,GrpTRES")
    except client.SlurmError:
        return  # no accounting: no QOS either, or sbatch says more
    wall, _, tres = limits.strip().partition("|")
    nodes = trainer.min_replicas or trainer.num_replicas
    cpus = cluster.cpus_per_task or trainer.resource.cpu
    needs = {"node": nodes, "cpu": nodes * cpus, "gres/gpu": nodes * trainer.resource.gpu}
    if wall and limit_s > _seconds(wall):
        what = f"QOS {cluster.qos} allows {wall}: SLURM would let the job wait for ever"
        yield Problem(f"cluster.time={cluster.time}", what, f"cluster.time={wall} or less, or another qos")
    for name, most in re.findall(r"([\w/]+)=(\d+)(?=[,|]|$)", tres):
        if needs.get(name, 0) > int(most):
            what = f"QOS {cluster.qos} allows {name}={most}, the job needs {needs[name]}: it would wait for ever"
            yield Problem(_sizes(job.config), what, "less, or another cluster.qos")


def check_count(count: int) -> list[Problem]:
    """Return a problem when the whole cluster cannot hold so many jobs.

    Raises:
        SlurmError: there is no SLURM here.
    """
    most = client.settings()["MaxJobCount"]
    return [_too_many(count, f"MaxJobCount={most}")] if count > int(most) else []


def _too_many(count: int, limit: str) -> Problem:
    cure = f"fewer values, or a part of them now; sacctmgr show assoc {_user()} and sacctmgr show qos list the limits"
    return Problem(f"{count} job{'' if count == 1 else 's'} at once", f"more than SLURM takes: {limit}", cure)


def _names(*command: str) -> str:
    """Return the first column of an accounting list."""
    try:
        names = sorted({line for line in client.call(*command).split() if line})
    except client.SlurmError as e:
        return str(e)
    return "there are " + ", ".join(names[:20])


def _size(partition: client.Partition) -> str:
    gres = "" if partition.gres in ("", "(null)") else f", {partition.gres}"
    most = f"up to {partition.cpus} CPUs, {partition.memory_mb} MB{gres}"
    return f"partition {partition.name} has {partition.nodes} nodes with {most}"


# Part of SLURM's message in lower case, the key it is about (empty: sizes), the cure. The first that fits.
_RULES: tuple[tuple[str, str, Callable[[client.Partition], str]], ...] = (
    ("configuration", "", _size),
    ("account", "account", lambda _: _names("sacctmgr", "-nP", "show", "assoc", _user(), "format=Account")),
    ("partition", "partition", lambda _: "there are " + ", ".join(p.name for p in client.partitions())),
    ("time limit", "time", lambda p: f"partition {p.name} allows {p.time}"),
    ("--time", "time", lambda _: "minutes, or days-hours:minutes:seconds"),
    ("qos", "qos", lambda _: _names("sacctmgr", "-nP", "show", "qos", "format=Name")),
    ("feature", "constraint", lambda p: f"its nodes have {p.features}"),
    ("reservation", "reservation", lambda _: "scontrol show reservation lists them"),
    ("node name", "nodelist", lambda _: "sinfo -N lists them; cluster.exclude may be the cause too"),
    ("--mem", "mem", lambda _: "500G, or 0 for all of it"),
    ("memory", "mem", _size),
    ("switches", "switches", lambda _: "a number, or number@max-time"),
    ("node count", "", _size),
    ("processors", "", _size),
)


def _answer(message: str) -> str:
    """Return what SLURM says and, if they do, what the site's own checks (job_submit.lua) say in place of an error."""
    lines = [re.sub(r"^(sbatch|srun): |error: |allocation failure: ", "", line) for line in message.splitlines()]
    lines = [line for line in dict.fromkeys(lines) if line.strip() and not line.startswith("Try ")]
    own = [line for line in lines if not re.search(f"{_NO_REASON}|Batch job submission failed", line)]
    return "; ".join(own or lines)


def _translate(config: JobConfig, partition: client.Partition, message: str) -> Problem:
    """Put sbatch's answer at our keys."""
    cluster, answer = cluster_of(config), _answer(message)
    for part, key, cure in _RULES:
        if part in answer.lower():
            given = [option for option in cluster.extra if key and option.startswith(f"--{key}=")]
            where = f"cluster.{key}={getattr(cluster, key)}" if key else _sizes(config)
            where = f"cluster.extra=[{given[-1]}]" if given else where
            return Problem(where, f"SLURM says: {answer}", cure(partition))
    return Problem("sbatch --test-only", answer, "cluster.extra and the environment's SBATCH_* count too")


def _sizes(config: JobConfig) -> str:
    """Return what is requested of each node, as keys."""
    cluster = cluster_of(config)
    keys = ("cpus_per_task", "gpus_per_node", "mem")
    requested = [f"cluster.{key}={getattr(cluster, key)}" for key in keys if getattr(cluster, key) is not None]
    return " ".join([f"nodes={config.nodes}", f"nproc_per_node={config.nproc_per_node}", *requested])


def _user() -> str:
    return f"user={pwd.getpwuid(os.getuid()).pw_name}"


def examine(config: JobConfig) -> Iterator[Finding]:
    """Yield findings one by one: the node may keep the caller waiting.

    Raises:
        SlurmError: there is no SLURM here, or it does not answer.
    """
    cluster = cluster_of(config)
    settings, partition = client.settings(), client.partition(cluster.partition)
    yield Finding("controller", "ok", f"cluster {settings['ClusterName']}, SLURM {settings['SLURM_VERSION']}")
    size = f"{partition.nodes} nodes, {partition.cpus} CPUs, {partition.gres}, at most {partition.time}"
    fact = f"{partition.name}: {size}" if partition.nodes else cluster.partition or "no default one"
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
    yield _preemption(settings, partition, config.elastic.stop_grace_s)
    yield from _requeue(cluster)
    yield from _node(config, cluster)


def _preemption(settings: dict[str, str], partition: client.Partition, grace_s: float) -> Finding:
    shown = client.call("scontrol", "show", "partition", partition.name) if partition.nodes else ""
    mode = re.search(r"PreemptMode=(\w+)", shown)
    if settings.get("PreemptType", "preempt/none") == "preempt/none" or (mode and mode[1] == "OFF"):
        return Finding("preemption", "ok", "no job of this partition is preempted")
    grace = re.search(r"GraceTime=(\d+)", shown)
    seconds = int(grace[1]) if grace else 0
    fact = f"a preempted job has {seconds} s to save; elastic.stop_grace_s is {grace_s:.0f}"
    cure = "a shorter checkpoint.every_minutes bounds what is lost"
    return Finding("preemption", "warning" if seconds < grace_s else "ok", fact, cure)


def _where(cluster: SlurmClusterConfig) -> list[str]:
    """Return the options of a job of doctor's own, so that it goes where the user's would."""
    keys = ("partition", "account", "qos", "constraint", "reservation")
    return [f"--{key}={getattr(cluster, key)}" for key in keys if getattr(cluster, key) is not None]


def _requeue(cluster: SlurmClusterConfig) -> Iterator[Finding]:
    """Look what the site makes of a job that is to be requeued; it is held, and cancelled at once."""
    own = ("--job-name=doctor", "--nodes=1", "--time=2", "--output=/dev/null", "--requeue", "--hold")
    try:
        job = client.sbatch("#!/bin/sh\n", *own, *_where(cluster), env=os.environ)
    except client.SlurmError:
        return  # the node's finding says why
    try:
        may = "Requeue=1" in client.call("scontrol", "show", "job", job)
    finally:
        client.call("scancel", job)
    fact = "jobs that ask for it are requeued" if may else "the site forbids it: a new job continues one that has saved"
    yield Finding("requeue", "ok" if may else "warning", fact, "a longer cluster.time: each of them waits in the queue")


def _node(config: JobConfig, cluster: SlurmClusterConfig) -> Iterator[Finding]:
    """Run a task on one node: does it see the run directories, and this Python?"""
    runs = as_written(config.runs_dir)
    runs.mkdir(parents=True, exist_ok=True)
    kind = file_system(runs)
    word = secrets.token_hex(8)
    note = runs / f".doctor-{word}"
    note.write_text(word)
    where = ["--nodes=1", "--ntasks=1", "--time=2", f"--immediate={_WAIT_S}", "--quiet", *_where(cluster)]
    python = cluster.python or sys.executable
    try:
        before = time.time()
        _, host, now, fsdp_jobs, torch, gpus = client.call("srun", *where, python, "-c", _ON_NODE, str(note)).split()
        skew_s = max(before - float(now), float(now) - time.time(), 0.0)
    except client.SlurmError as e:
        yield _why_no_node(str(e), runs, kind, note)
        return
    finally:
        note.unlink()
    yield Finding("runs_dir", "ok", f"{host} sees {runs} ({kind})")
    fact = f"{host} runs {python} with fsdp_jobs {fsdp_jobs}, torch {torch}, {gpus} GPUs free"
    yield Finding("python", "ok" if fsdp_jobs == __version__ else "warning", fact, f"fsdp_jobs {__version__} there")
    fact = f"the clock of {host} differs by {skew_s:.1f} s from this machine's"
    yield Finding("time", "ok" if skew_s < _CLOCK_SKEW_S else "warning", fact, "NTP on both")


def _why_no_node(error: str, runs: Path, kind: str, note: Path) -> Finding:
    if note.name in error:
        return Finding("runs_dir", "bad", f"the nodes do not see {runs} ({kind})", "runs_dir=... on shared storage")
    if "ModuleNotFound" in error or "No such file" in error or "execve" in error:
        last = next(line for line in reversed(error.splitlines()) if line.strip() and "srun" not in line[:5])
        return Finding("python", "bad", last, "an environment on shared storage; cluster.python=...")
    if _NO_REASON in error:
        return Finding("node", "bad", f"refused: {_answer(error)}", "cluster.account, cluster.partition, cluster.qos")
    return Finding("node", "warning", f"none examined: {_answer(error)}", "all may be busy; try again later")
