"""SLURM's own commands, and what they say. Only the standard library: the batch step uses this, too."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

_TIMEOUT_S = 60.0
_ACCOUNTED_S = 10.0  # likewise of sacct, which is asked for jobs that the controller has forgotten
_FRESH_S = 1.0  # so long one answer of squeue serves every question


class SlurmError(Exception):
    """A command of SLURM's that failed, or is not there; the message is its own."""


def call(*argv: str, stdin: str | None = None, env: Mapping[str, str] | None = None) -> str:
    """What a command prints.

    Raises:
        SlurmError: it is not installed, it failed, or it did not answer.
    """
    try:
        done = subprocess.run(argv, input=stdin or "", env=env, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except FileNotFoundError as e:
        raise SlurmError(f"{argv[0]} is not on this machine's PATH") from e
    except subprocess.TimeoutExpired as e:
        raise SlurmError(f"{argv[0]} did not answer within {_TIMEOUT_S:.0f} s") from e
    if done.returncode:
        raise SlurmError(done.stderr.strip() or f"{argv[0]} ended with {done.returncode}")
    return done.stdout


@cache
def settled(*argv: str) -> str:
    """What a command prints, asked once in this process: for what stays the same while jobs are submitted.

    Raises:
        SlurmError: as `call`.
    """
    return call(*argv)


def own_id() -> str:
    """The id of the job that this process belongs to, as squeue tells it.

    The last task of an array to start has the array's own number in SLURM_JOB_ID, which stands for all of them.
    """
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]


@dataclass(frozen=True)
class QueuedJob:
    """One job as squeue or sacct tells it."""

    id: str  # <job>, or <job>_<task> of an array
    state: str  # SLURM's word: PENDING, RUNNING, CANCELLED, ...
    reason: str = ""  # why it waits
    start: str = ""  # when it started, or will; N/A when nobody knows
    nodes: str = ""  # hostlist
    batch_host: str = ""
    record: str = ""  # the controller's number for it; of an array's last task it is the array's, and means all of them

    @property
    def for_signals(self) -> str:
        """What scancel is to be told: it sends no signal to <job>_<task> while others of the array wait."""
        return self.id if self.record in ("", self.id.partition("_")[0]) else self.record


_accounted: dict[str, tuple[float, str]] = {}  # what sacct said of a job, or of all of an array, and when
_queue: tuple[float, dict[str, QueuedJob]] = (-_FRESH_S, {})


def my_jobs(fresh: bool = False) -> dict[str, QueuedJob]:
    """Every job of this user's that the controller remembers, by id: one squeue for all of them.

    Raises:
        SlurmError: there is no squeue, or no controller.
    """
    global _queue
    if fresh or time.monotonic() - _queue[0] > _FRESH_S:
        text = call("squeue", "--me", "--states=all", "--array", "--noheader", "--format=%i|%T|%r|%S|%N|%B|%A")
        jobs = [QueuedJob(*fields) for line in text.splitlines() if len(fields := line.split("|")) == 7]
        _queue = time.monotonic(), {job.id: job for job in jobs}
    return _queue[1]


def job(job_id: str, queue: Mapping[str, QueuedJob]) -> QueuedJob | None:
    """A job of `my_jobs`, or once the controller has forgotten it by sacct; None when nobody knows it."""
    if (known := queue.get(job_id)) is not None:
        return known
    try:
        text = _accounting(job_id.partition("_")[0])
    except SlurmError:  # no accounting on this cluster
        return None
    lives = [line.split("|") for line in text.splitlines() if line.startswith(f"{job_id}|")]
    if not lives:
        return None
    found, state, start, nodes = lives[-1]  # a requeued job has several; the last is the newest
    return QueuedJob(found, state.split()[0], start=start, nodes=nodes)  # "CANCELLED by 1000"


def _accounting(number: str) -> str:
    """Every life of a job, or of all tasks of an array: one sacct for all of them."""
    asked_at, text = _accounted.get(number, (-_ACCOUNTED_S, ""))
    if time.monotonic() - asked_at > _ACCOUNTED_S:
        text = call("sacct", "-X", "-n", "-P", "-j", number, "-o", "JobID,State,Start,NodeList")
        _accounted[number] = time.monotonic(), text
    return text


@dataclass(frozen=True)
class Partition:
    """What a partition has and allows, as sinfo tells it; the largest of its nodes counts."""

    name: str
    nodes: int
    cpus: int
    gres: str
    memory_mb: int
    time: str
    features: str
    default: bool


def partitions() -> list[Partition]:
    """Every partition.

    Raises:
        SlurmError: there is no SLURM here.
    """
    found: dict[str, Partition] = {}
    for line in call("sinfo", "--noheader", "--format=%P|%D|%c|%G|%m|%l|%f").splitlines():
        name, nodes, cpus, gres, memory, limit, features = line.split("|")
        before = found.get(name.rstrip("*"))
        number = [int(re.sub(r"\D", "", text) or 0) for text in (nodes, cpus, memory)]
        if before is not None:  # one line a kind of node, and a state
            number = [number[0] + before.nodes, max(number[1], before.cpus), max(number[2], before.memory_mb)]
            gres = before.gres if gres == "(null)" else gres
        found[name.rstrip("*")] = Partition(
            name.rstrip("*"), number[0], number[1], gres, number[2], limit, features, name.endswith("*")
        )
    return list(found.values())


def settings() -> dict[str, str]:
    """`scontrol show config`, key -> value."""
    return dict(re.findall(r"^(\w+)\s*= (.*)$", settled("scontrol", "show", "config"), re.MULTILINE))


def hostnames(hostlist: str) -> list[str]:
    """A hostlist written out, in SLURM's order."""
    return call("scontrol", "show", "hostnames", hostlist).split() if hostlist else []


def cpus_by_node(hosts: Sequence[str], text: str) -> dict[str, int]:
    """SLURM_JOB_CPUS_PER_NODE (`2(x3),4`) for the hosts of a job."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return dict(zip(hosts, counts, strict=True))
