"""Run SLURM's commands and parse their output. Imports little: the batch step and its helpers use this."""

from __future__ import annotations

import logging
import math
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fsdp_jobs.config.errors import JobFailed
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.state import State

logger = logging.getLogger(__name__)

_FILTERS = ("SQUEUE_", "SINFO_", "SACCT_", "SCONTROL_", "SCANCEL_")
_VARIABLES = {  # sbatch's variables whose names differ from their options
    "mem": "MEM_PER_NODE",
    "requeue": "NO_REQUEUE",
    "switches": "REQ_SWITCH",
    "time": "TIMELIMIT",
}
_ONE_OF = (  # options that ask for the same in other words
    {"mem", "mem-per-cpu", "mem-per-gpu"},
    {"cpus-per-task", "cpus-per-gpu"},
    {"gpus", "gpus-per-node", "gpus-per-task", "gres"},
)
OF_A_JOB = {  # options that do not apply to a companion, a job of one more node
    *("array", "begin", "deadline", "dependency", "error", "exclude", "export", "gpus", "hold", "job-name"),
    *("licenses", "nodelist", "nodes", "ntasks", "ntasks-per-node", "output", "requeue", "signal", "switches"),
}
# They would turn one job into several, wait for its end, move what its script says on stderr out of its output, or
# fail it for want of a file to read.
_NEVER = {"SBATCH_ARRAY_INX", "SBATCH_WAIT", "SBATCH_ERROR", "SBATCH_INPUT"}
_OF_A_CLUSTER = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_SACK_SOCKET"}  # how commands reach it
_PARTITIONS = ("scontrol", "--all", "show", "partition")
_TIMEOUT_S = 60.0  # of a command
LOOK_S = 10.0  # of a query whose answer is only displayed; without an answer the run directory's record is shown
_QUEUE_AGE_S = 1.0  # for which an answer of squeue is reused
_ERROR_AGE_S = 5.0  # for which an error is reused, for all jobs of a command
_ACCOUNTING_AGE_S = 10.0  # for which an answer of sacct is reused, for jobs that the controller has forgotten

# SLURM's states. A job in any other state has nodes.
_STATES = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"), State.QUEUED),
    **dict.fromkeys(("RESV_DEL_HOLD", "CONFIGURING"), State.QUEUED),
    "COMPLETED": State.DONE,
    "CANCELLED": State.STOPPED,
    "REVOKED": State.SILENT,  # another cluster of the federation has the job
    **dict.fromkeys(("FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"), State.FAILED),
    **dict.fromkeys(("OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"), State.FAILED),
}


class SlurmError(JobFailed):
    """A SLURM command failed or is not installed; the message is the command's own."""


def _is_srun_s(name: str) -> bool:
    """Whether srun may take a variable for an option, or it describes the job that this process is in."""
    return name.startswith(("SLURM_", "SRUN_")) and name not in _OF_A_CLUSTER


def variable(option: str) -> str:
    """Return the name of the environment variable that sets an option of sbatch."""
    return f"SBATCH_{_VARIABLES.get(option, option.replace('-', '_').upper())}"


def own_environment(env: Mapping[str, str], script: str) -> dict[str, str]:
    """Return the environment for the submission of a script.

    It omits the user's SBATCH_ variables for options that the script sets, or asks for in other words, because sbatch
    prefers the variables or refuses both, and those that srun would read in the job, such as SLURM_TIMELIMIT. Inside a
    job these describe that job: sbatch would read them as requests, and the new job's processes would mistake them for
    their own.
    """
    options = {*re.findall(r"^#SBATCH '?--([\w-]+)", script, re.MULTILINE)}
    options.update(*(group for group in _ONE_OF if group & options))
    hidden = {*map(variable, options), *_NEVER}
    return {name: value for name, value in env.items() if name not in hidden and not _is_srun_s(name)}


def sbatch(script: str, *options: str, env: Mapping[str, str]) -> str:
    """Submit a script, and return the id of the job.

    Raises:
        SlurmError: as `call`, and if there is no id in what is printed.
    """
    return id_in(call("sbatch", "--parsable", *options, stdin=script, env=own_environment(env, script)))


def id_in(said: str) -> str:
    """Return the id of a job in what `sbatch --parsable` printed; log what the site's plugins and wrappers say with it.

    Raises:
        SlurmError: there is no id.
    """
    before, *found = re.split(r"^(\d+)(?:;\S+)?\s*$", said, flags=re.MULTILINE)
    if not found:
        raise SlurmError(f"sbatch printed no job id, only {said.strip()!r}: squeue --me shows whether there is a job")
    *more, job_id, after = found
    if notes := "".join([before, *more, after]).strip():
        logger.warning("SLURM says: %s", notes)
    return job_id


def call(*argv: str, stdin: str = "", env: Mapping[str, str] | None = None, timeout_s: float = _TIMEOUT_S) -> str:
    """Run a command and return its output; without `env`, without filters, formats and the job of this process.

    Raises:
        SlurmError: it is not installed, failed, or did not answer in time.
    """
    try:
        if env is None:
            env = {k: v for k, v in os.environ.items() if not (k.startswith(_FILTERS) or _is_srun_s(k))}
        # Names and comments of other jobs may be in any encoding.
        done = subprocess.run(argv, input=stdin, env=env, capture_output=True, errors="replace", timeout=timeout_s)
    except FileNotFoundError as e:
        raise SlurmError(f"{argv[0]} is not on this machine's PATH: go to a login node of the cluster") from e
    except OSError as e:
        raise SlurmError(f"{argv[0]} may not be used here: {e.strerror}") from e
    except subprocess.TimeoutExpired as e:
        what = f"{argv[0]} did not answer within {timeout_s:.0f} s: the controller is away, or busy"
        raise SlurmError(": ".join([what, *(e.stderr or b"").decode(errors="replace").splitlines()[-1:]])) from e
    if "establish a configuration source" in done.stderr:
        raise SlurmError(f"{argv[0]} finds no cluster from this machine: go to a login node, or set SLURM_CONF")
    if done.returncode:
        raise SlurmError(done.stderr.strip() or f"{argv[0]} ended with {done.returncode}")
    return done.stdout


_answers: dict[tuple[str, ...], tuple[float, str | SlurmError]] = {}  # command -> time and output


def recent(*argv: str, max_age_s: float = math.inf, timeout_s: float = _TIMEOUT_S) -> str:
    """Return the output of a command that is at most `max_age_s` old; if there is none, run the command.

    Raises:
        SlurmError: as `call`; it is also reused, but only for some seconds.
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


def forget() -> None:
    """Drop all answers that `recent` would reuse."""
    _answers.clear()


@dataclass(frozen=True)
class QueuedJob:
    """A job as squeue or sacct describes it."""

    id: str  # <job>, or <job>_<task> of an array
    slurm_state: str  # PENDING, RUNNING, CANCELLED, ...
    reason: str = ""  # why it waits, or has ended so
    start: str = ""  # when it started, or will; N/A when unknown
    nodes: str = ""  # hostlist
    batch_host: str = ""
    record: str = ""  # the controller's number of the job; for an array's last task the array's, which means all tasks
    limit: str = ""  # of its time
    name: str = ""
    comment: str = ""  # from squeue with the path of its script

    @property
    def tag(self) -> str:
        """The tag that our script wrote into the job's comment; empty for a job that is not ours."""
        found = re.search(r"fsdp_jobs:([\w.-]+)", self.comment)
        return found[1] if found else ""

    def is_of(self, run: RunDir) -> bool:
        """Whether this job is the run's newest submission: a cluster that is set up anew reuses ids."""
        if self.tag:
            return self.tag.partition(".")[0] == run.submission
        if any(part in self.comment for part in (f"/{run.name}/submit/slurm/", f"/slurm/{run.submission}/")):
            return True  # a site's plugin may write a name and a comment of its own
        return not self.name or f"{run.name}-".startswith(f"{self.name}-")  # an array has its sweep's name

    @property
    def is_started(self) -> bool:
        return self.slurm_state in ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING")

    @property
    def is_completing(self) -> bool:
        """Whether SLURM ends its last processes, and runs the site's epilog, which may take minutes."""
        return self.slurm_state == "COMPLETING"

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
    argv = ("squeue", "--me", "--states=all", "--array", "--noheader", "--format=%i|%T|%r|%S|%N|%B|%A|%l|%j|%k|%o")
    text = recent(*argv, max_age_s=0.0 if fresh else _QUEUE_AGE_S, timeout_s=timeout_s)
    return {fields[0]: QueuedJob(*fields) for line in text.splitlines() if len(fields := line.split("|", 9)) >= 7}


def running(job_id: str) -> QueuedJob | None:
    """Return a job as squeue describes it now; None unless it is running, or suspended by another.

    Raises:
        SlurmError: as `queue`.
    """
    job = queue(fresh=True).get(job_id)
    return job if job is not None and job.is_started else None


def is_requeued(job_id: str) -> bool:
    """Whether SLURM starts the job of this process again, which no longer runs; False if it ends the job.

    Raises:
        SlurmError: as `call`.
    """
    shown = call("scontrol", "show", "job", job_id)
    return f" Restarts={os.environ.get('SLURM_RESTART_COUNT', '0')} " not in shown


def jobs(job_ids: Sequence[str]) -> list[QueuedJob | None]:
    """Return jobs for display, from the queue or else from accounting; None for a job that neither lists.

    Raises:
        SlurmError: as `queue`.
    """
    known = queue(timeout_s=LOOK_S)
    if not known.keys() >= set(job_ids):  # a job may be newer than the cached answer
        known = queue(fresh=True, timeout_s=LOOK_S)
    forgotten = [job_id for job_id in job_ids if job_id not in known]
    accounted = _accounted(forgotten) if forgotten else {}
    return [known.get(job_id) or accounted.get(job_id) for job_id in job_ids]


def _accounted(job_ids: Sequence[str]) -> dict[str, QueuedJob | None]:
    """Return what accounting knows of these jobs, with one sacct; nothing without accounting.

    A job of this user that has not ended there is asked for by its id: accounting may have missed its end, and some
    sites answer squeue from a cache that lacks new jobs.
    """
    what = "JobID,State,Start,NodeList,UID,JobName,Comment"
    arrays = ",".join(dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids))
    columns = ("-X", "-n", "-P", "-j", arrays, "-o", what)
    try:
        text = recent("sacct", *columns, max_age_s=_ACCOUNTING_AGE_S, timeout_s=LOOK_S)
    except SlurmError:
        return {}
    found: dict[str, QueuedJob | None] = {}
    for line in text.splitlines():  # a requeued job has several; the last is the newest
        job_id, state, start, nodes, uid, name, comment, *_ = [*line.split("|", 6), *[""] * 6]
        state = state.partition(" ")[0]  # "CANCELLED by 1000"
        nodes = nodes.replace("None assigned", "")
        job = QueuedJob(job_id, state, start=start, nodes=nodes, name=name, comment=comment)
        found[job_id] = _controllers(job) if job.state.is_active and uid == str(os.getuid()) else job
    return found


def _controllers(job: QueuedJob) -> QueuedJob | None:
    """Return a job with its state by the controller; None if the controller has no such job."""
    try:
        text = recent("scontrol", "show", "job", job.id, max_age_s=_ACCOUNTING_AGE_S, timeout_s=LOOK_S)
    except SlurmError:
        return None
    state = re.search(r"JobState=(\w+)", text)
    return replace(job, slurm_state=state[1]) if state is not None else None


@dataclass(frozen=True)
class Nodes:
    """The nodes of one kind in a partition."""

    count: int
    cpus: int
    memory_mb: int
    gres: str


@dataclass
class Partition:
    """Resources and limits of a partition, as sinfo shows them."""

    name: str
    default: bool
    time: str
    default_time: str = ""  # of a job without a limit; empty: as long as the partition, or a QOS, allows
    kinds: list[Nodes] = field(default_factory=list)
    features: str = ""
    job_nodes: str = "1-infinite"  # of a job
    hosts: list[str] = field(default_factory=list)  # hostlists

    @property
    def nodes(self) -> int:
        """How many there are, with those of a cloud that are powered down, which sinfo hides."""
        total = re.search(r" TotalNodes=(\d+)", shown(self))
        return int(total[1]) if total else self.listed

    @property
    def listed(self) -> int:
        return sum(kind.count for kind in self.kinds)

    @property
    def cpus(self) -> int:
        return max((kind.cpus for kind in self.kinds), default=0)

    @property
    def size(self) -> str:
        """The resources of its largest nodes, in words."""
        if not self.listed:
            return "sizes that SLURM does not show"
        memory_mb = max((kind.memory_mb for kind in self.kinds), default=0)
        gres = " or ".join(dict.fromkeys(kind.gres for kind in self.kinds if kind.gres != "(null)"))
        return f"{self.cpus} CPUs, {memory_mb} MB, {gres or 'no GPUs counted'}"


def partitions() -> list[Partition]:
    """Return every partition, including those that a site hides; without sizes if it hides its nodes from users.

    Raises:
        SlurmError: there is no SLURM here.
    """
    by_name: dict[str, Partition] = {}
    columns = "--format=%P|%D|%c|%G|%m|%l|%f|%L|%s|%N"
    try:
        said = recent("sinfo", "--all", "--exact", "--noconvert", "--noheader", columns)
    except SlurmError:  # PrivateData=nodes
        keys = ("^PartitionName", " Default", " DefaultTime", " MaxNodes", " MaxTime", " MinNodes", "^ +Nodes")
        told = ".*?".join(rf"{key}=(\S*)" for key in keys)
        shown = re.findall(told, recent(*_PARTITIONS), re.MULTILINE | re.DOTALL)
        return [
            Partition(
                name,
                default == "YES",
                limit,
                usual.replace("NONE", ""),
                job_nodes=f"{least}-{most}".replace("UNLIMITED", "infinite"),
                hosts=[hosts],
            )
            for name, default, usual, most, limit, least, hosts in shown
        ]
    for line in said.splitlines():
        if len(fields := line.split("|")) != 10:  # of a site's wrapper; each other one describes nodes of one kind
            continue
        name, nodes, cpus, gres, memory_mb, limit, features, default, size, hosts = fields
        partition = by_name.setdefault(
            name, Partition(name.rstrip("*"), name.endswith("*"), limit, default.replace("n/a", ""))
        )
        partition.kinds.append(Nodes(int(nodes), int(cpus), int(memory_mb), gres))
        partition.features, partition.job_nodes = features, size
        partition.hosts.append(hosts)
    return list(by_name.values())


def partitions_of(names: str | None) -> list[Partition]:
    """Return the partitions of a list of names, of which SLURM chooses one; an empty one if none of them exists.

    For None return the default partition; if the site's own checks may choose another, return all, the default first.

    Raises:
        SlurmError: there is no SLURM here.
    """
    known = sorted(partitions(), key=lambda p: not p.default)
    if names is not None:
        known = [p for p in known if p.name in names.split(",")]
    elif not site_chooses():
        known = [p for p in known if p.default]
    return known or [Partition(names or "", False, "")]


def site_chooses() -> bool:
    """Whether a plugin of the site may choose what a job does not request: a partition, a time limit."""
    plugins = (settings().get(key, "(null)") for key in ("JobSubmitPlugins", "CliFilterPlugins"))
    return any(plugin not in ("(null)", "") for plugin in plugins)


def gpus_in(gres: str, kind: str = "") -> int:
    """Return how many GPUs, of one type or of all, a node's resources have: `gpu:a100:4(S:0-1),nvme:1`, or `(null)`."""
    of_kind = f"{re.escape(kind)}:" if kind else "(?:[^:,()]+:)?"
    return sum(map(int, re.findall(rf"\bgpu:{of_kind}(\d+)(?=[,(]|$)", gres)))


def seconds(time: str) -> float:
    """Parse a time limit as sbatch reads it; infinite for words and for 0, which in SLURM means no limit."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        return math.inf
    days, first, second, third = (int(g) if g else 0 for g in match.groups())
    if match[1] is not None or match[4] is not None:  # days-hours[:minutes[:seconds]], hours:minutes:seconds
        return 86400 * days + 3600 * first + 60 * second + third or math.inf
    return 60 * first + second or math.inf  # minutes[:seconds]


def shown(partition: Partition) -> str:
    """Return `scontrol show partition`; empty for a partition that does not exist."""
    found = re.search(rf"^PartitionName={re.escape(partition.name)}\n( .*\n)*", recent(*_PARTITIONS), re.MULTILINE)
    return found[0] if found else ""


def accounting(*what: str) -> str | None:
    """Return rows of the accounting database, no rows if there is no database; None if it does not answer."""
    if "slurmdbd" not in settings().get("AccountingStorageType", ""):
        return ""
    try:
        return call("sacctmgr", "-nP", "show", *what)
    except SlurmError:
        return None


def silent() -> str:
    """Return why SLURM cannot be queried here; empty if it answers."""
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
