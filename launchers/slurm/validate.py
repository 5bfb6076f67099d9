"""Validate jobs before submission, here and by SLURM, whose errors we report at our keys."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence

from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.resolve import least_nodes, most_nodes
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.base import Job
from fsdp_jobs.launchers.slurm import client, container
from fsdp_jobs.launchers.slurm.script import asked, cluster_of, long_form
from fsdp_jobs.launchers.slurm.steps import LEAST_TRAINING_S
from fsdp_jobs.run.directory import user_name
from fsdp_jobs.run.files import as_written, file_system
from fsdp_jobs.run.table import size

_IN_MEMORY = ("tmpfs", "ramfs")  # file systems that no other machine can mount
_ABOUT_NODES = ("node configuration", "nodes are busy", "node not available", "nodes required")
_ABOUT_TIME = ("invalid time specified", "not usable now", "reservation is in use", "maintenance reservation")
_IS_FULL = "Resource temporarily unavailable"  # sbatch's word for a controller that can hold no more jobs now
_BEFORE = re.compile(  # before an error of sbatch or srun
    r"^((sbatch|srun): )?((error|fatal|allocation failure|Batch job submission failed|Unable to allocate resources): )*"
)
_NO_REASON = "Unspecified error"  # follows the reason, if the site's own checks refuse the job
_LIMITS = "sacctmgr show assoc user=$USER and sacctmgr show qos list the limits"
_NOT_EXTRA = {  # options of sbatch -> what to use instead
    "--array": "--multirun makes arrays",
    **dict.fromkeys(("--clusters", "--cluster"), "submit on a login node of that cluster"),
    "--nodes": "nodes=4, or nodes=2:4",
    **dict.fromkeys(("--wait", "-W"), "attach=true follows the job"),
    **dict.fromkeys(("--parsable", "--quiet", "-Q"), "the job's id is read from what sbatch says"),
    "--signal": "it asks for the last save, elastic.stop_grace_s before the time limit, or as long as saves take",
    "--test-only": "dry_run=true",
}

logger = logging.getLogger(__name__)


def problems_here(job: Job) -> Iterator[Problem]:
    """Yield problems that this machine can find: in the keys, and, unless offline, in the machine itself."""
    cluster, run = cluster_of(job.config), job.run
    values = {f"cluster.{key}": value for key, value in vars(cluster).items() if key != "setup"}
    for key, value in {**values, "runs_dir": str(run.path.parent)}.items():
        for text in value if isinstance(value, list) else [value]:
            if any(c in str(text) for c in "\n\r\0"):
                yield Problem(f"{key}={text!r}", "holds a line break")
    if "\\" in str(as_written(run.path)):  # SLURM drops it, and leaves %j as it is
        yield Problem(f"run directory {run.path}", "SLURM writes nothing to a path with a backslash", "runs_dir=...")
    for given in cluster.extra:
        option, where = long_form(given), f"cluster.extra=[{given}]"
        if not option.startswith("-"):
            yield Problem(where, "not an option of sbatch", "for example cluster.extra=\"['--licenses=foo']\"")
        name = option.partition("=")[0]
        if taken := next((known for known in _NOT_EXTRA if known.startswith(name)), ""):  # sbatch takes beginnings, too
            yield Problem(where, f"{taken} is not for the user to set", _NOT_EXTRA[taken])
        if cluster.exclusive and option.startswith(("--exclusive=", "--oversubscribe", "-s")):
            what = "would share nodes, with one CPU of each, where cluster.exclusive=true asks for whole ones"
            yield Problem(where, what, "cluster.exclusive=false, too")
    if cluster.container is not None:
        yield from container.problems(job.config, run)
    if job.offline_notes:
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
        if (elsewhere := os.environ.get(name) or here) != here:
            what = f"jobs go to {here}, the cluster of this machine"
            yield Problem(f"{name}={elsewhere}", what, _NOT_EXTRA["--clusters"])


def check_with_slurm(job: Job, script: str, margin_s: int, count: int) -> list[Problem]:
    """Let sbatch validate the script of one job or of an array of `count`, and report its errors at our keys.

    sbatch --test-only also refuses jobs that only have to wait: for a reservation, for nodes that are down, drained or
    reserved now or later, or for so many jobs that it gives up after two seconds. That is no problem if the
    partition's nodes have the resources of the job; sbatch itself refuses a job that no nodes can ever hold.
    """
    cluster = cluster_of(job.config)
    partitions = client.partitions_of(asked(cluster, "partition")[0])  # SLURM chooses one of several
    time, where = asked(cluster, "time")
    longest = max((time or p.default_time or p.time for p in partitions), key=client.seconds)
    if client.seconds(longest) < margin_s + LEAST_TRAINING_S and (time or not client.site_chooses()):
        whose = "" if time else f" ({partitions[0].name}'s default is {longest})"
        what = f"the last save is requested {margin_s} s before the limit{whose}: no time is left to train in"
        return [Problem(where, what, "a longer limit, or a shorter elastic.stop_grace_s")]
    if problems := [*_partition_problems(job, partitions), *_qos_problems(job, partitions)]:
        return problems
    compare_with_default_memory(job, partitions[0])
    try:
        array = [f"--array=0-{count - 1}"] if count > 1 else []
        client.call("sbatch", "--test-only", *array, stdin=script, env=client.own_environment(os.environ, script))
    except client.SlurmError as e:
        if found := re.search(r"\w*(Max|Grp)Submit\w*", str(e)):
            return [_too_many(count, found[0])]
        if _IS_FULL in str(e):
            most = client.settings()["MaxJobCount"]
            return [_too_many(count, f"{_IS_FULL}, it holds {most} jobs of all users (MaxJobCount)")]
        has_to_wait = (*_ABOUT_TIME, *(_ABOUT_NODES if any(_can_hold(p, job) for p in partitions) else ()))
        if not any(words in str(e).lower() for words in has_to_wait):
            return [translate(job.config, partitions[0], str(e))]
    return []


def _can_hold(partition: client.Partition, job: Job) -> bool:
    """Whether enough nodes of a partition, if all were up, have the resources that our keys request."""
    cluster, trainer = cluster_of(job.config), job.role("trainer")
    cpus = cluster.cpus_per_task or trainer.resource.cpu
    are_counted = "gpu" in client.settings().get("GresTypes", "")
    wanted = str(cluster.gpus_per_node or trainer.resource.gpu) if are_counted else ""
    gpus = re.findall(r"(?:^|,)(?:([^:,]+):)?(\d+)(?=,|$)", wanted)
    mem = re.fullmatch(r"(\d+)([KMGT]?)", cluster.mem or "0", re.IGNORECASE)
    mem_mb = int(mem[1]) * 1024.0 ** ("KMGT".index(mem[2].upper() or "M") - 1) if mem else 0
    return least_nodes(job.config) <= partition.nodes - partition.listed + sum(
        nodes.count
        for nodes in partition.kinds
        if cpus <= nodes.cpus
        and mem_mb <= nodes.memory_mb
        and all(int(count) <= client.gpus_in(nodes.gres, kind) for kind, count in gpus)
    )


def compare_with_default_memory(job: Job, partition: client.Partition) -> None:
    """Warn if the job requests no memory, and a node's default share is less than the plan needs."""
    cluster = cluster_of(job.config)
    extra = [option for option in map(long_form, cluster.extra) if option.startswith("--mem")]
    if cluster.mem or extra or not partition.listed or any(name.startswith("SBATCH_MEM_PER") for name in os.environ):
        return
    known = [client.shown(partition), *(f"{key}={value}" for key, value in client.settings().items())]
    if not (default := re.search(r"DefMemPer(Node|CPU)=(\d+)", " ".join(known))):  # the partition's comes first
        return
    cpus = cluster.cpus_per_task or (partition.cpus if cluster.exclusive else job.role("trainer").resource.cpu)
    given = int(default[2]) * 2**20 * (1 if default[1] == "Node" else cpus)
    if given < job.memory_need:
        what = "a node gives this job %s of its memory (DefMemPer%s), and the plan needs %s: cluster.mem=0 takes all"
        logger.warning(what, size(given), default[1], size(job.memory_need))


def compare_with_kill_wait(name: str, save_s: float, need_s: float) -> None:
    """Warn if `scancel` leaves less time than `need_s`, twice what a save and a step of this run have taken."""
    given = client.settings().get("KillWait", "").partition(" ")[0]
    if save_s and given.isdecimal() and need_s > int(given):
        what = "%s: scancel would end it %s s later (KillWait), maybe before it has saved, which took up to %.0f s: %s"
        logger.warning(what, name, given, save_s, f"fsdp-jobs cancel {name} waits for the save")


def _partition_problems(job: Job, partitions: Sequence[client.Partition]) -> list[Problem]:
    """Compare a job with its partition's limits if sbatch would accept a job beyond them and let it wait forever."""
    if client.settings().get("EnforcePartLimits") != "NO" or len(partitions) > 1:
        return []
    partition, nodes = partitions[0], most_nodes(job.config)
    time, where = asked(cluster_of(job.config), "time")
    waits = "SLURM would let the job wait for ever (EnforcePartLimits=NO)"
    problems = []
    if time and client.seconds(time) > client.seconds(partition.time):
        what = f"partition {partition.name} allows {partition.time}: {waits}"
        problems.append(Problem(where, what, f"cluster.time={partition.time} or less"))
    sizes = [float(size.replace("infinite", "inf")) for size in re.findall(r"\d+|infinite", partition.job_nodes)]
    if sizes and not sizes[0] <= nodes <= sizes[-1]:
        what = f"a job of partition {partition.name} has {partition.job_nodes} nodes: {waits}"
        problems.append(Problem(f"nodes={job.config.nodes}", what, "as many, or another cluster.partition"))
    flags = client.accounting("qos", "format=Flags") if problems else ""
    return [] if flags is None or "Partition" in flags else problems  # PartitionTimeLimit, PartitionMaxNodes


def _qos_problems(job: Job, partitions: Sequence[client.Partition]) -> Iterator[Problem]:
    """Compare a job with the limits of the QOS that it names: sbatch lets a job beyond them wait forever.

    If the partition also has a QOS, that QOS takes precedence, and nothing is checked.
    """
    cluster, trainer, nodes = cluster_of(job.config), job.role("trainer"), least_nodes(job.config)
    qos, _ = asked(cluster, "qos")
    are_enforced = "limits" in client.settings().get("AccountingStorageEnforce", "")
    shown = " ".join(map(client.shown, partitions))
    if qos is None or "," in qos or not are_enforced or re.search(r"QoS=(?!N/A)\S", shown):
        return
    limits = client.accounting("qos", qos, "format=MaxWall,MinTRES,MaxTRES,MaxTRESPU,MaxTRESPA,GrpTRES") or ""
    wall, least, most = f"{limits.strip()}||".split("|", 2)
    cpus = cluster.cpus_per_task or trainer.resource.cpu
    needs = {"node": nodes, "cpu": nodes * cpus, "gres/gpu": nodes * trainer.resource.gpu}
    time, where = asked(cluster, "time")
    is_default = time is None and len(partitions) == 1 and not client.site_chooses()
    limit = partitions[0].default_time if is_default else time  # without a default SLURM uses the QOS's
    if wall and limit and client.seconds(limit) > client.seconds(wall):
        what = f"QOS {qos} allows {wall}: SLURM would let the job wait for ever"
        yield Problem(where, what, f"cluster.time={wall} or less, or another qos")
    for name, limit in re.findall(r"([\w/]+)=(\d+)(?=[,|]|$)", most):
        if needs.get(name, 0) > int(limit):
            what = f"QOS {qos} allows {name}={limit}, the job needs {needs[name]}: it would wait for ever"
            yield Problem(_sizes(job.config), what, "less, or another cluster.qos")
    if (fewest := re.search(r"\bnode=(\d+)", least)) and most_nodes(job.config) < int(fewest[1]):
        yield Problem(_sizes(job.config), f"QOS {qos} is for {fewest[1]} nodes or more", "more, or another cluster.qos")


def check_count(count: int) -> None:
    """Check that the whole cluster can hold so many jobs.

    Raises:
        BadInput: it cannot.
        SlurmError: there is no SLURM here.
    """
    if count > int(most := client.settings()["MaxJobCount"]):
        raise BadInput([_too_many(count, f"MaxJobCount={most}")])


def _too_many(count: int, limit: str) -> Problem:
    where, cure = ("this job", "when another has ended") if count == 1 else (f"{count} jobs at once", "fewer at once")
    return Problem(where, f"more than SLURM takes: {limit}", f"{cure}; {_LIMITS}")


def _admission(partition: client.Partition) -> str:
    """List the accounts of this user with the QOS of each, as far as accounting tells, and whom the partition takes."""
    rows = (client.accounting("assoc", f"user={user_name()}", "format=Account,QOS") or "").split()
    yours = [re.sub(r"\|(.+)", r" (QOS \1)", row).rstrip("|") for row in sorted(set(rows))]
    rules = re.findall(r"\b(?:Allo|Deny|RootOnly|ReqResv)\w*=(?!ALL|NO\b)\S+", client.shown(partition))
    told = {"your accounts:": yours[:20], f"partition {partition.name} has": rules}
    return "; ".join(f"{what} {', '.join(names)}" for what, names in told.items() if names)


def _size(partition: client.Partition) -> str:
    return f"partition {partition.name} has {partition.nodes} nodes with up to {partition.size}"


# Part of SLURM's message in lower case, the key that it is about (empty: sizes), the cure. The first match counts.
_RULES: tuple[tuple[str, str, Callable[[client.Partition], str]], ...] = (
    ("configuration", "", _size),
    ("resource (", "gpus_per_node", _size),  # generic (gres), or trackable (TRES)
    ("accounting/qos policy", "", lambda _: _LIMITS),
    ("account", "account", _admission),
    ("not permitted", "partition", _admission),  # a group
    ("access/permission denied", "partition", _admission),
    ("partition", "partition", lambda _: "one of " + ", ".join(p.name for p in client.partitions())),
    ("time limit", "time", lambda p: f"partition {p.name} allows {p.time}"),
    ("--time", "time", lambda _: "minutes, or days-hours:minutes:seconds"),
    ("qos", "qos", _admission),
    ("feature", "constraint", lambda p: f"its nodes have {p.features.replace('(null)', 'none')}"),
    ("reservation", "reservation", lambda _: "scontrol show reservation lists them"),
    ("node name", "nodelist", lambda _: "sinfo -N lists them; cluster.exclude may be the cause too"),
    ("number of nodes", "nodelist", lambda _: "not more hosts than nodes; cluster.exclude=HOSTLIST leaves hosts out"),
    ("--mem", "mem", lambda _: "500G, or 0 for all of it"),
    ("memory", "mem", _size),
    ("switches", "switches", lambda _: "a number, or number@max-time"),
    ("node count", "", lambda p: f"{_size(p)}, and a job has {p.job_nodes} nodes there"),
    ("processors", "", _size),
)


def answer(message: str) -> str:
    """Return SLURM's error, or the messages of the site's own checks (job_submit.lua) if they give a reason."""
    lines = [_BEFORE.sub("", line) for line in message.splitlines()]
    lines = [line for line in dict.fromkeys(lines) if line.strip() and not line.startswith("Try ")]
    return "; ".join([line for line in lines if line != _NO_REASON] or lines)


def translate(config: JobConfig, partition: client.Partition, message: str) -> Problem:
    """Report sbatch's error at the key that it is about."""
    cluster, words = cluster_of(config), answer(message)
    for part, key, cure in _RULES:
        if part in words.lower():
            where = asked(cluster, key)[1] if key else _sizes(config)
            return Problem(where, f"SLURM says: {words}", cure(partition))
    instead = "cluster.extra=\"['--wckey=foo']\" gives an option without a key; the environment's SBATCH_* count too"
    return Problem("sbatch", words, instead)


def _sizes(config: JobConfig) -> str:
    """Return the keys that request each node's resources."""
    cluster = cluster_of(config)
    keys = ("cpus_per_task", "gpus_per_node", "mem")
    requested = [f"cluster.{key}={getattr(cluster, key)}" for key in keys if getattr(cluster, key) is not None]
    return " ".join([f"nodes={config.nodes}", f"nproc_per_node={config.nproc_per_node}", *requested])
