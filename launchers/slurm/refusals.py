"""What cannot be submitted, and why: found here, or by SLURM and put into this project's keys."""

from __future__ import annotations

import importlib.util
import math
import os
import pwd
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fsdp_jobs.config.clusters import SlurmClusterConfig
from fsdp_jobs.config.errors import BadInput, Problem, nearest
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.slurm import client
from fsdp_jobs.run.directory import RunDir

_OWN_MEMORY = ("tmpfs", "ramfs")  # file systems that no other machine can have mounted


def no_slurm(why: str) -> Problem:
    return Problem(
        "cluster=slurm",
        f"there is no SLURM to submit to: {why}",
        "submit on a login node of the cluster; cluster=local runs on this machine, fsdp-jobs plan needs neither",
    )


def check(config: JobConfig, run: RunDir) -> None:
    """What this machine can tell by itself.

    Raises:
        BadInput: with all of it.
    """
    cluster = config.cluster
    assert isinstance(cluster, SlurmClusterConfig)
    problems = []
    for key, value in vars(cluster).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and any(c in text for c in "\n\r\0") and key != "setup":
                problems.append(Problem(f"cluster.{key}={text!r}", "holds a line break"))
    for option in cluster.extra:
        if not option.startswith("-"):
            problems.append(Problem(f"cluster.extra=[{option}]", "is no option", "extra=['--licenses=foo'], say"))
    if cluster.container_runtime not in ("pyxis", "apptainer"):
        what = "allowed: pyxis, apptainer"
        hint = nearest(cluster.container_runtime, ("pyxis", "apptainer"))
        problems.append(Problem(f"cluster.container_runtime={cluster.container_runtime}", what, hint))
    if "\n" in str(run.path):
        problems.append(Problem("runs_dir", "holds a line break"))
    kind = file_system(run.path)
    if kind in _OWN_MEMORY:
        what = f"is on {kind}, in this machine's memory: the nodes cannot see it"
        problems.append(Problem(f"run directory {run.path}", what, "runs_dir=... on storage that the nodes share"))
    if importlib.util.find_spec("submitit") is None:
        problems.append(Problem("cluster=slurm", "submitit is not installed", "pip install 'fsdp_jobs[slurm]'"))
    if shutil.which("sbatch") is None:
        problems.append(no_slurm("sbatch is not on this machine's PATH"))
    if problems:
        raise BadInput(problems)


def file_system(path: Path) -> str:
    """The kind of file system that a path is on, or will be."""
    place = str(path.resolve())
    best, kind = "", ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, of, *_ = line.split()
        point = point.encode().decode("unicode_escape")  # \040 is a space
        inside = place == point or place.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, of
    return kind


def _seconds(time: str) -> float:
    """A time limit as sbatch reads it; infinite for words."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        return math.inf
    days, first, second, third = (int(g) if g else 0 for g in match.groups())
    if match[1] is not None or match[4] is not None:  # days-hours[:minutes[:seconds]], hours:minutes:seconds
        return 86400 * days + 3600 * first + 60 * second + third
    return 60 * first + second  # minutes[:seconds]


def ask_slurm(config: JobConfig, script: str, margin_s: int, count: int) -> None:
    """Let sbatch itself look at the script of one job, or of so many in an array.

    Raises:
        BadInput: its answer, with the key that it is about and what the cluster has.
    """
    cluster = config.cluster
    assert isinstance(cluster, SlurmClusterConfig)
    if cluster.time is not None and _seconds(cluster.time) < margin_s + 30:
        what = f"the last save is asked for {margin_s} s before the limit: no time is left to train in"
        instead = "a longer limit, or a shorter elastic.stop_grace_s"
        raise BadInput([Problem(f"cluster.time={cluster.time}", what, instead)])
    try:
        array = [f"--array=0-{count - 1}"] if count > 1 else []
        client.call("sbatch", "--test-only", *array, stdin=script)
    except client.SlurmError as e:
        limit = re.search(r"\w*MaxSubmit\w*", str(e))
        raise BadInput([_too_many(count, limit[0]) if limit else _translate(cluster, config, str(e))]) from e


def check_count(count: int) -> None:
    """What the whole cluster can hold.

    Raises:
        BadInput: it is less.
        SlurmError: there is no SLURM here.
    """
    most = client.settings()["MaxJobCount"]
    if count > int(most):
        raise BadInput([_too_many(count, f"MaxJobCount={most}")])


def _too_many(count: int, limit: str) -> Problem:
    return Problem(
        f"{count} job{'' if count == 1 else 's'} at once",
        f"more than SLURM takes: {limit}",
        f"fewer values, or a part of them now; sacctmgr show assoc {_me()} and sacctmgr show qos tell the limits",
    )


@dataclass(frozen=True)
class _Rule:
    """How one of SLURM's complaints reads in our keys."""

    says: str  # part of its message, in lower case
    key: str
    what: Callable[[SlurmClusterConfig], str]


def _partition_of(cluster: SlurmClusterConfig) -> client.Partition | None:
    for partition in client.partitions():
        if partition.name == cluster.partition or (cluster.partition is None and partition.default):
            return partition
    return None


def _names(*command: str) -> str:
    """The first column of an accounting list."""
    try:
        names = sorted({line for line in client.call(*command).split() if line})
    except client.SlurmError as e:
        return str(e)
    return "there are " + ", ".join(names[:20])


def _size(cluster: SlurmClusterConfig) -> str:
    p = _partition_of(cluster)
    if p is None:
        return ""
    gres = "" if p.gres in ("", "(null)") else f", {p.gres}"
    return f"partition {p.name} has {p.nodes} nodes with up to {p.cpus} CPUs, {p.memory_mb} MB{gres}"


def _limit(cluster: SlurmClusterConfig) -> str:
    p = _partition_of(cluster)
    return f"partition {p.name} allows {p.time}" if p is not None else ""


_RULES = (  # the first that fits
    _Rule("configuration", "", _size),
    _Rule("account", "account", lambda _: _names("sacctmgr", "-nP", "show", "assoc", _me(), "format=Account")),
    _Rule("partition", "partition", lambda _: "there are " + ", ".join(p.name for p in client.partitions())),
    _Rule("time limit", "time", _limit),
    _Rule("--time", "time", lambda _: "minutes, or days-hours:minutes:seconds"),
    _Rule("qos", "qos", lambda _: _names("sacctmgr", "-nP", "show", "qos", "format=Name")),
    _Rule("feature", "constraint", lambda c: f"its nodes have {getattr(_partition_of(c), 'features', '')}"),
    _Rule("reservation", "reservation", lambda _: "scontrol show reservation lists them"),
    _Rule("node name", "nodelist", lambda _: "sinfo -N lists them; cluster.exclude is looked at, too"),
    _Rule("--mem", "mem", lambda _: "500G, or 0 for all of it"),
    _Rule("memory", "mem", _size),
    _Rule("switches", "switches", lambda _: "a number, or number@max-time"),
    _Rule("node count", "", _size),
    _Rule("processors", "", _size),
)


def _translate(cluster: SlurmClusterConfig, config: JobConfig, message: str) -> Problem:
    said = message.replace("allocation failure: ", "").replace("sbatch: ", "").replace("error: ", "").splitlines()[-1]
    if said.startswith("Try "):
        said = message.splitlines()[0].removeprefix("sbatch: ")
    for rule in _RULES:
        if rule.says in said.lower():
            asked = f"cluster.{rule.key}={getattr(cluster, rule.key)}" if rule.key else _asked(cluster, config)
            return Problem(asked, f"SLURM says: {said}", rule.what(cluster))
    return Problem("sbatch --test-only", said, "cluster.extra and the environment's SBATCH_* count, too")


def _asked(cluster: SlurmClusterConfig, config: JobConfig) -> str:
    """What was asked of each node, in keys."""
    keys = ("cpus_per_task", "gpus_per_node", "mem")
    asked = [f"cluster.{key}={getattr(cluster, key)}" for key in keys if getattr(cluster, key) is not None]
    return " ".join([f"nodes={config.nodes}", f"nproc_per_node={config.nproc_per_node}", *asked])


def _me() -> str:
    return f"user={pwd.getpwuid(os.getuid()).pw_name}"
