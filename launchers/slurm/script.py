"""Render the sbatch script of a job and the commands of its batch step. No I/O, except for files that list hosts."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_jobs.config.clusters import SlurmClusterConfig
from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.resolve import node_range
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.app import arguments
from fsdp_jobs.launchers.base import Job
from fsdp_jobs.launchers.slurm import client, container
from fsdp_jobs.launchers.slurm.steps import Commands
from fsdp_jobs.plan.topology import expand_hostlist
from fsdp_jobs.run.env import SUBMISSION_ENV
from fsdp_jobs.run.files import as_written

if TYPE_CHECKING:
    from torchx.specs import Role

    from fsdp_jobs.plan.plan import Plan
    from fsdp_jobs.plan.topology import Topology

_BATCH = "fsdp_jobs.launchers.slurm.batch"
_NODE_TEST = "fsdp_jobs.launchers.slurm.node_test"
_OPTIONS = (  # keys of the group `cluster` that are options of sbatch
    *("partition", "account", "qos", "time", "mem", "constraint", "nodelist", "exclude", "reservation"),
    *("comment", "mail_user", "mail_type"),
)
_LONG = {  # sbatch's one-letter options that take a value -> their long names
    "-A": "account",
    "-a": "array",
    "-b": "begin",
    "-C": "constraint",
    "-c": "cpus-per-task",
    "-D": "chdir",
    "-d": "dependency",
    "-e": "error",
    "-G": "gpus",
    "-J": "job-name",
    "-L": "licenses",
    "-M": "clusters",
    "-m": "distribution",
    "-N": "nodes",
    "-n": "ntasks",
    "-o": "output",
    "-p": "partition",
    "-q": "qos",
    "-t": "time",
    "-w": "nodelist",
    "-x": "exclude",
}


@dataclass
class Site:
    """Properties of a cluster that plans and scripts depend on; also the keys of a site file."""

    cluster: str  # SLURM's ClusterName
    gpu_option: str = "--gpus-per-node={}"  # with the number of GPUs per node; empty: the cluster does not count GPUs
    python: str = sys.executable  # the interpreter on the nodes if `cluster.python` names none
    partitions: dict[str, str] = field(default_factory=dict)  # name (the default's ends in *) -> hostlist of its nodes
    switches: list[str] = field(default_factory=list)  # lines of `scontrol show topology`; empty: not known
    own_switches: dict[str, list[str]] = field(default_factory=dict)  # by partition, of those with another topology


def cluster_of(config: JobConfig) -> SlurmClusterConfig:
    """Narrow the type of `config.cluster`."""
    assert isinstance(config.cluster, SlurmClusterConfig)
    return config.cluster


def asked(cluster: SlurmClusterConfig, key: str) -> tuple[str | None, str]:
    """Return the value that sbatch will use for one of its options, and where it is set; None: the site chooses."""
    begin = f"--{key.replace('_', '-')}="
    if given := [option for option in map(long_form, cluster.extra) if option.startswith(begin)]:
        return given[-1].partition("=")[2], f"cluster.extra=[{given[-1]}]"
    value, variable = getattr(cluster, key, None), client.variable(key)
    if value is None and variable in os.environ:
        return os.environ[variable], f"{variable}={os.environ[variable]}"
    return value, f"cluster.{key}={value}"


def commands(job: Job, script: Script) -> Commands:
    """Render the commands of the batch step that a job's script starts."""
    cluster = cluster_of(job.config)
    trainer = job.role("trainer")
    python = container.python_of_agents(cluster, job.config, job.run, script.python)
    kind = [str(trainer.resource.cpu), "cuda" if trainer.resource.gpu else "cpu"]
    options = (*script.resources, *script.extra)
    return Commands(
        coordinator=[script.python, *arguments(job.role("coordinator"))],
        agent=[*python, *arguments(trainer, "{node}")],
        node_test=[*python, "-m", _NODE_TEST, *kind] if cluster.preflight else [],
        env=trainer.env,
        max_nodes=trainer.num_replicas,
        regrow=cluster.regrow,
        exclude=_hosts(cluster, "exclude"),  # not expanded: it may be long, and goes on a command line
        submit=[o for o in options if o.partition("=")[0].removeprefix("--") not in client.OF_A_JOB],
        margin_s=script.margin_s,
        required=[host for hosts in _hosts(cluster, "nodelist") for host in expand_hostlist(hosts)],
    )


def _hosts(cluster: SlurmClusterConfig, key: str) -> list[str]:
    """Return the hostlists of `nodelist` or `exclude`; as in sbatch, a value with a slash names a file of them.

    Raises:
        BadInput: the file cannot be read, or there is no hostlist in it.
    """
    value, where = asked(cluster, key)
    try:
        listed = Path(value).read_text().split() if value and "/" in value else [value or ""]
        return [hosts for hosts in listed if expand_hostlist(hosts)]
    except (OSError, ValueError) as e:
        raise BadInput.at(where, str(getattr(e, "strerror", None) or e)) from e


def long_form(option: str) -> str:
    """Return an option of `cluster.extra` as `--name=value`: `-d afterok:7` as `--dependency=afterok:7`."""
    if name := _LONG.get(option[:2]):
        return f"--{name}={option[2:].lstrip(' =')}"
    return re.sub(r"^(--[\w-]+) +", r"\1=", option)  # a blank is for command lines: sbatch takes it for the name's


@dataclass(frozen=True)
class Script:
    """A batch script except its job's own values: jobs with equal scripts can be the tasks of one array.

    Everything that the user wrote is quoted for the shell, except the lines of `setup`.
    """

    resources: tuple[str, ...]  # options of sbatch
    extra: tuple[str, ...]  # the user's own options of sbatch; they come last
    setup: tuple[str, ...]  # lines of shell
    python: str
    folder: str  # working directory of the submitting command and of the job
    brings_code: bool  # the run directory has a copy of the code
    margin_s: int = field(compare=False)

    def of_run(self, run_dir: Path | str, name: str, tag: str, after: str = "") -> str:
        """Render the script of one job; `tag` and `after` as in `of_array`."""
        written = str(as_written(run_dir))
        output = f"--output={written.replace('%', '%%')}/submit/slurm-%j.out"
        return self._text(name, tag, after, [output], shlex.quote(written))

    def of_array(self, links: Path, name: str, tag: str, count: int, at_once: int, after: str) -> str:
        """Render the script of an array of jobs.

        Args:
            tag: the id of the submission, for its processes and SLURM; for an array with a dot and the array's number.
            links: a folder in which link `<task>` leads to the run directory of that task.
            name: of all tasks in SLURM.
            count: number of tasks.
            at_once: maximum number of tasks that run at the same time, 0 for no limit.
            after: id of a job that must end first, empty for none.
        """
        array = f"--array=0-{count - 1}{f'%{at_once}' if at_once else ''}"
        output = f"--output={str(links).replace('%', '%%')}/%a/submit/slurm-%A_%a.out"
        resolve = f'run=$(readlink {shlex.quote(str(links))}/"$SLURM_ARRAY_TASK_ID")'
        return self._text(name, tag, after, [array, output], '"$run"', resolve)

    def _text(self, name: str, tag: str, after: str, own: Sequence[str], run_dir: str, *first: str) -> str:
        waits = [f"afterany:{after}", *(o.partition("=")[2] for o in self.extra if o.startswith("--dependency="))]
        comments = ["--comment=", *(o for o in (*self.resources, *self.extra) if o.startswith("--comment="))]
        options = [
            f"--job-name={name}",
            *self.resources,
            *own,
            f"--chdir={self.folder}",
            "--open-mode=append",
            "--requeue",
            "--no-kill",
            f"--signal=B:USR1@{self.margin_s}",
            *self.extra,
            *([f"--dependency={','.join(waits)}"] if after else []),  # of two options sbatch takes the last
            f"{comments[-1]} fsdp_jobs:{tag}".replace("--comment= ", "--comment="),
        ]
        # The last save may be requested during `setup`: it would end this shell, and with it the job.
        lines = [
            "#!/bin/bash",
            *(f"#SBATCH {_quote_option(o)}" for o in options),
            *("set -e", "early=", "trap early=SIGUSR1 USR1"),
            *self.setup,
            *first,
            f"export {SUBMISSION_ENV}={tag.partition('.')[0]}",
            *([f"export PYTHONSAFEPATH=1 PYTHONPATH={run_dir}/code${{PYTHONPATH:+:$PYTHONPATH}}"] * self.brings_code),
            "trap '' USR1",  # until the batch step handles it: Python takes seconds to start
            f"exec {shlex.quote(self.python)} -m {_BATCH} {run_dir} $early",
        ]
        return "\n".join(lines) + "\n"


def script(job: Job, site: Site, topology: Topology | None, margin_s: int) -> Script:
    """Render the parts of a batch script that do not depend on the run; `margin_s` is from the function `margin_s`."""
    cluster = cluster_of(job.config)
    trainer = job.role("trainer")
    low, high = node_range(job.config.nodes)
    # With a range of nodes SLURM would apply --ntasks-per-node to the minimum.
    nodes = [f"--nodes={high}", "--ntasks-per-node=1"] if low == high else [f"--nodes={low}-{high}"]
    return Script(
        resources=(*nodes, *_resources(cluster, trainer, site), *_switches(cluster, job.plan, high, topology)),
        extra=tuple(map(long_form, cluster.extra)),
        setup=tuple(cluster.setup),
        python=container.python_outside(cluster, site.python),
        folder=str(as_written(".")),
        brings_code=bool(cluster.snapshot_mb),
        margin_s=margin_s,
    )


def _resources(cluster: SlurmClusterConfig, trainer: Role, site: Site) -> Iterator[str]:
    """Yield the options for each node's resources and for the account that requests them."""
    for key in _OPTIONS:
        value = asked(cluster, key)[0] if key == "comment" else getattr(cluster, key)  # we set the comment, too
        if value is not None:
            yield f"--{key.replace('_', '-')}={value}"
    gpus = cluster.gpus_per_node or trainer.resource.gpu
    if gpus and site.gpu_option:
        yield site.gpu_option.replace("{}", str(gpus))
    if cluster.exclusive:
        yield "--exclusive"
    by_gpu = any(option.startswith("--cpus-per-gpu") for option in map(long_form, cluster.extra))
    if cluster.cpus_per_task is not None or not (cluster.exclusive or by_gpu):
        yield f"--cpus-per-task={cluster.cpus_per_task or trainer.resource.cpu}"


def _switches(cluster: SlurmClusterConfig, plan: Plan, nodes: int, topology: Topology | None) -> Iterator[str]:
    """Request the fewest leaf switches that hold the job, if a shard group spans nodes.

    SLURM waits for them as long as its administrator allows (max_switch_wait, 300 s by default).
    """
    if cluster.switches is not None:
        yield f"--switches={cluster.switches}"
    elif topology is not None and plan.layout.shard_group > plan.ranks_per_node:
        leaves = sorted(Counter(node.switch_path for node in topology.nodes).values(), reverse=True)
        yield f"--switches={sum(held < nodes for held in accumulate(leaves, initial=0))}"


def _quote_option(option: str) -> str:
    """Quote the value of an option for a line of a script: sbatch reads it as a shell does, but for backslashes."""
    key, equals, value = option.partition("=")
    quoted = f"{key}{equals}{shlex.quote(value)}" if equals else shlex.quote(option)
    return quoted.replace("\\", r"\\")  # they escape within quotes, too


def margin_s(save_s: float, step_s: float, grace_s: float) -> int:
    """Return how many seconds before the time limit the last save is requested.

    Args:
        save_s: the slowest save that this run has measured; 0 before the first.
        step_s: the slowest step; 0 before the first.
        grace_s: `elastic.stop_grace_s`, which bounds a save.

    It is twice the measured time, or the whole grace before the first save, plus 10 s to requeue. SLURM may signal a
    minute early.
    """
    return math.ceil(10 + (min(grace_s, 2 * (save_s + step_s)) if save_s else grace_s))
