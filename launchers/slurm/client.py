"""SLURM's commands and their answers. Imports little: the batch step and its helpers use this."""

from __future__ import annotations

import math
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_jobs.config.errors import JobFailed
from fsdp_jobs.launchers.state import State
from fsdp_jobs.run.directory import RunDir

_FILTERS = ("SQUEUE_", "SINFO_", "SACCT_", "SCONTROL_", "SCANCEL_", "SLURM_TIME_FORMAT", "SLURM_CLUSTERS")
_VARIABLES = {  # of sbatch, for options that are named otherwise
    "array": "ARRAY_INX",
    "mem": "MEM_PER_NODE",
    "requeue": "NO_REQUEUE",
    "switches": "REQ_SWITCH",
    "time": "TIMELIMIT",
}
_UP = ("idle", "mixed", "allocated", "completing")  # states of nodes that jobs can have, now or later
_TIMEOUT_S = 60.0  # of a command
LOOK_S = 10.0  # of a question whose answer is only shown: without one the run directory's record is
_QUEUE_AGE_S = 1.0  # one answer of squeue serves for so long
_ERROR_AGE_S = 5.0  # of an error, which serves all jobs of a command
_ACCOUNTING_AGE_S = 10.0  # of an answer of sacct, which is asked for jobs that the controller has forgotten

# SLURM's states. One that is not listed belongs to a job that has nodes.
_STATES = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"), State.QUEUED),
    "COMPLETED": State.DONE,
    **dict.fromkeys(("CANCELLED", "REVOKED"), State.STOPPED),
    **dict.fromkeys(("FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"), State.FAILED),
    **dict.fromkeys(("OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"), State.FAILED),
}


class SlurmError(JobFailed):
    """A SLURM command that failed or is not installed; the message is the command's own."""


def clean_environment() -> dict[str, str]:
    """Return the environment for questions to SLURM: the user's filters and formats would change the answers."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_FILTERS)}


def own_environment(env: Mapping[str, str], script: str) -> dict[str, str]:
    """Return the environment for the submission of a script.

    It lacks the user's SBATCH_ variables for options that the script sets: sbatch would prefer them. Inside a job it
    lacks what describes that job and its allocation: sbatch would take it for requests, and the new job's processes
    for their own.
    """
    options = re.findall(r"^#SBATCH '?--([\w-]+)", script, re.MULTILINE)
    hidden = {f"SBATCH_{_VARIABLES.get(option, option.replace('-', '_').upper())}" for option in options}
    is_inside = "SLURM_JOB_ID" in env
    return {
        name: value
        for name, value in env.items()
        if name not in hidden and not (is_inside and name.startswith("SLURM_") and name != "SLURM_CONF")
    }


def sbatch(script: str, *options: str, env: Mapping[str, str]) -> str:
    """Submit a script, and return the id of the job; a site's greeting may stand before it.

    Raises:
        SlurmError: as `call`.
    """
    said = call("sbatch", "--parsable", *options, stdin=script, env=own_environment(env, script))
    return said.split()[-1].partition(";")[0]


def call(
    *argv: str, stdin: str | None = None, env: Mapping[str, str] | None = None, timeout_s: float = _TIMEOUT_S
) -> str:
    """Run a command and return what it prints; without `env` in a clean environment.

    Raises:
        SlurmError: it is not installed, failed, or did not answer in time.
    """
    try:
        env = clean_environment() if env is None else env
        done = subprocess.run(argv, input=stdin or "", env=env, capture_output=True, text=True, timeout=timeout_s)
    except FileNotFoundError as e:
        raise SlurmError(f"{argv[0]} is not on this machine's PATH: go to a login node of the cluster") from e
    except subprocess.TimeoutExpired as e:
        raise SlurmError(f"{argv[0]} did not answer within {timeout_s:.0f} s: the controller is away, or busy") from e
    if done.returncode:
        raise SlurmError(done.stderr.strip() or f"{argv[0]} ended with {done.returncode}")
    return done.stdout


_answers: dict[tuple[str, ...], tuple[float, str | SlurmError]] = {}  # command -> when, and what it said


def recent(*argv: str, max_age_s: float = math.inf, timeout_s: float = _TIMEOUT_S) -> str:
    """Return what a command printed at most `max_age_s` ago, or call it when there is no such answer.

    Raises:
        SlurmError: as `call`; it is remembered, too, but for no more than some seconds.
    """
    at, answer = _answers.get(argv, (-math.inf, SlurmError()))
    if time.monotonic() - at > (min(max_age_s, _ERROR_AGE_S) if isinstance(answer, SlurmError) else max_age_s):
        try:
            answer = call(*argv, timeout_s=timeout_s)
        except SlurmError as e:
            answer = e
        _answers[argv] = time.monotonic(), answer
    if isinstance(answer, SlurmError):
        raise SlurmError(*answer.args)
    return answer


def own_id(is_task: bool) -> str:
    """Return the id of the job that this process belongs to, as squeue shows it.

    The last task of an array to start has the array's own number in SLURM_JOB_ID, which stands for all of them.

    Args:
        is_task: it was submitted as a task of an array. A job that was submitted from inside another one's task may
            have that array's variables.
    """
    if is_task:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ["SLURM_JOB_ID"]


@dataclass(frozen=True)
class QueuedJob:
    """A job as squeue or sacct describes it."""

    id: str  # <job>, or <job>_<task> of an array
    slurm_state: str  # PENDING, RUNNING, CANCELLED, ...
    reason: str = ""  # why it waits
    start: str = ""  # when it started, or will; N/A when unknown
    nodes: str = ""  # hostlist
    batch_host: str = ""
    record: str = ""  # the controller's number for it; of an array's last task it is the array's, and means all of them
    name: str = ""
    comment: str = ""

    @property
    def tag(self) -> str:
        """What `script.tag` put into its comment; empty for a job that is not ours."""
        found = re.search(r"fsdp_jobs:(\S+)", self.comment)
        return found[1] if found else ""

    def is_of(self, run: RunDir) -> bool:
        """Whether it is a run's newest submission: ids begin again when a cluster is set up anew."""
        if self.tag or not self.name:
            return not self.tag or self.tag.partition(".")[0] == run.submission
        return run.name == self.name or run.name.startswith(f"{self.name}-")  # an array has its sweep's name

    @property
    def state(self) -> State:
        return _STATES.get(self.slurm_state, State.RUNNING)

    @property
    def signal_id(self) -> str:
        """The id for scancel --signal, which ignores <job>_<task> while other tasks of the array wait."""
        return self.id if self.record in ("", self.id.partition("_")[0]) else self.record


def queue(fresh: bool = False, timeout_s: float = _TIMEOUT_S) -> dict[str, QueuedJob]:
    """Return all of this user's jobs that the controller remembers, by id, from one squeue.

    Raises:
        SlurmError: there is no squeue, or no controller.
    """
    argv = ("squeue", "--me", "--states=all", "--array", "--noheader", "--format=%i|%T|%r|%S|%N|%B|%A|%j|%k")
    text = recent(*argv, max_age_s=0.0 if fresh else _QUEUE_AGE_S, timeout_s=timeout_s)
    jobs = [QueuedJob(*fields) for line in text.splitlines() if len(fields := line.split("|", 8)) >= 7]
    return {job.id: job for job in jobs}


def running(job_id: str) -> QueuedJob | None:
    """Return a job as squeue describes it now; None unless it is running.

    Raises:
        SlurmError: as `queue`.
    """
    job = queue(fresh=True).get(job_id)
    return job if job is not None and job.slurm_state == "RUNNING" else None


def jobs(job_ids: Sequence[str]) -> list[QueuedJob | None]:
    """Return jobs from the queue, else from accounting, to show them; None for one that neither knows.

    Raises:
        SlurmError: as `queue`.
    """
    known = queue(timeout_s=LOOK_S)
    if not known.keys() >= set(job_ids):  # it may be newer than the last answer
        known = queue(fresh=True, timeout_s=LOOK_S)
    return [known.get(job_id) or _accounted(job_id) for job_id in job_ids]


def _accounted(job_id: str) -> QueuedJob | None:
    """Return a job from one sacct for all tasks of its array; None without accounting."""
    columns = ("-X", "-n", "-P", "-j", job_id.partition("_")[0], "-o", "JobID,State,Start,NodeList,JobName,Comment")
    try:
        text = recent("sacct", *columns, max_age_s=_ACCOUNTING_AGE_S, timeout_s=LOOK_S)
    except SlurmError:
        return None
    records = [[*line.split("|", 5), "", ""] for line in text.splitlines() if line.startswith(f"{job_id}|")]
    if not records:
        return None
    _, state, start, nodes, name, comment, *_ = records[-1]  # a requeued job has several; the last is the newest
    state = state.partition(" ")[0]  # "CANCELLED by 1000"
    return QueuedJob(job_id, state, start=start, nodes=nodes, name=name, comment=comment)


@dataclass
class Partition:
    """What a partition has and allows, as sinfo shows it; sizes are those of its largest node."""

    name: str
    default: bool
    time: str
    default_time: str = ""  # of a job that names none
    nodes: int = 0
    away: int = 0  # of these, nodes that no job can have now: down, drained, reserved
    cpus: int = 0
    gres: str = "(null)"
    memory_mb: int = 0
    features: str = ""
    most_nodes: str = "infinite"  # of a job


def partitions() -> list[Partition]:
    """Return every partition.

    Raises:
        SlurmError: there is no SLURM here.
    """
    by_name: dict[str, Partition] = {}
    for line in call("sinfo", "--noheader", "--format=%P|%D|%c|%G|%m|%l|%f|%L|%T|%s").splitlines():
        name, nodes, cpus, gres, memory_mb, limit, features, default, state, size = line.split(
            "|"
        )  # of a kind, in a state
        default = limit if default == "n/a" else default
        partition = by_name.setdefault(name, Partition(name.rstrip("*"), name.endswith("*"), limit, default))
        partition.nodes += int(nodes)
        partition.away += int(nodes) if not state.startswith(_UP) or state.endswith("*") else 0
        partition.cpus = max(partition.cpus, int(cpus.rstrip("+")))
        partition.memory_mb = max(partition.memory_mb, int(memory_mb.rstrip("+")))
        partition.gres = partition.gres if gres == "(null)" else gres
        partition.features, partition.most_nodes = features, size.rpartition("-")[2]
    return list(by_name.values())


def partition(name: str | None) -> Partition:
    """Return the partition of a name, the first one of several, the default one for None; an empty one for none.

    Raises:
        SlurmError: there is no SLURM here.
    """
    wanted = (name or "").split(",")
    known = (p for p in partitions() if p.name in wanted or (name is None and p.default))
    return next(known, Partition(name or "", False, ""))


def silent() -> str:
    """Return why SLURM cannot be asked here; empty: it answers."""
    try:
        settings()
    except SlurmError as e:
        return str(e)
    return ""


def settings(timeout_s: float = _TIMEOUT_S) -> dict[str, str]:
    """Return `scontrol show config`, key -> value."""
    text = recent("scontrol", "show", "config", timeout_s=timeout_s)
    return dict(re.findall(r"^(\w+)\s*= (.*)$", text, re.MULTILINE))


def cpus_by_node(hosts: Sequence[str], text: str) -> dict[str, int]:
    """Parse SLURM_JOB_CPUS_PER_NODE (`2(x3),4`) for the hosts of a job."""
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    counts = [int(count) for count, times in groups for _ in range(int(times or 1))]
    return dict(zip(hosts, counts, strict=True))
