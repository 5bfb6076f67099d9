"""The sbatch script of a job, and the commands that its batch step runs: an AppDef in SLURM's words. No I/O."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from torchx.specs import AppDef, Role, macros

from fsdp_jobs.config.clusters import SlurmClusterConfig
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.app import RUN_DIR_KEY
from fsdp_jobs.plan.plan import Plan

BATCH = "fsdp_jobs.launchers.slurm.batch"
PREFLIGHT = "fsdp_jobs.launchers.slurm.preflight"


@dataclass(frozen=True)
class Site:
    """What a script depends on and only the cluster knows."""

    gpu_option: str = "--gpus-per-node={}"  # with the number of GPUs a node; empty: the cluster does not count GPUs
    leaf_size: int = 0  # most nodes under one leaf switch; 0: the cluster does not say
    margin_s: int = 120  # before the time limit or a preemption: time to save in


@dataclass
class Steps:
    """What the batch step starts. `{node}` in the agent's arguments stands for the node's number."""

    run_dir: str
    coordinator: list[str]
    agent: list[str]
    env: dict[str, str]
    ranks_per_node: int
    accelerator: str  # cpu | cuda
    max_nodes: int
    regrow: bool
    preflight: list[str]  # empty: none
    exclude: list[str]  # hostlists that the user will not have
    submit: list[str]  # options of sbatch for one more node

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Steps:
        return cls(**json.loads(text))


def steps(app: AppDef, config: JobConfig, site: Site) -> Steps:
    """The commands of the batch step."""
    cluster = config.cluster
    assert isinstance(cluster, SlurmClusterConfig)
    roles = {role.name: role for role in app.roles}
    trainer, run_dir = roles["trainer"], app.metadata[RUN_DIR_KEY]
    return Steps(
        run_dir=run_dir,
        coordinator=_argv(roles["coordinator"], cluster),
        agent=[*_container(cluster, run_dir), *_argv(trainer, cluster)],
        env=trainer.env,
        ranks_per_node=trainer.resource.cpu,
        accelerator="cuda" if trainer.resource.gpu else "cpu",
        max_nodes=trainer.num_replicas,
        regrow=cluster.regrow,
        preflight=_preflight(trainer, cluster, run_dir) if cluster.preflight else [],
        exclude=[cluster.exclude] if cluster.exclude else [],
        submit=[o for o in _resources(cluster, trainer, site) if not o.startswith(("--exclude=", "--nodelist="))],
    )


def _argv(role: Role, cluster: SlurmClusterConfig) -> list[str]:
    values = macros.Values(img_root="", app_id="", replica_id="{node}", rank0_env="")
    inside = cluster.container is not None and role.name == "trainer"
    python = cluster.python or ("python3" if inside else role.entrypoint)
    return [python, *values.apply(role).args]


def _preflight(trainer: Role, cluster: SlurmClusterConfig, run_dir: str) -> list[str]:
    """The test of a node, as far as it is known now; in the agent's environment."""
    python = _argv(trainer, cluster)[0]
    return [*_container(cluster, run_dir), python, "-m", PREFLIGHT]


def _container(cluster: SlurmClusterConfig, run_dir: str) -> list[str]:
    """What stands before the agent: options of srun for pyxis, a command for Apptainer."""
    if cluster.container is None:
        return []
    mounts = ",".join([f"{run_dir}:{run_dir}", *cluster.container_mounts])
    if cluster.container_runtime == "pyxis":
        return [f"--container-image={cluster.container}", f"--container-mounts={mounts}"]
    gpus = ["--nv"] if cluster.accelerator != "cpu" else []
    return ["apptainer", "exec", *gpus, f"--bind={mounts}", cluster.container]


@dataclass(frozen=True)
class Script:
    """What a batch script says, whosever it is: jobs with equal ones can be the tasks of one array.

    Nothing that a user wrote reaches a shell unquoted but the lines of `setup`.
    """

    resources: tuple[str, ...]  # options of sbatch
    extra: tuple[str, ...]  # likewise, the user's own; they come last
    setup: tuple[str, ...]  # lines of shell
    python: str
    brings_code: bool  # there is a copy of the code in the run directory
    margin_s: int = field(compare=False)

    def of_run(self, run_dir: str, name: str) -> str:
        """For one job."""
        output = f"--output={_literal(run_dir)}/submit/slurm-%j.out"
        return self._text(name, [output], shlex.quote(run_dir))

    def of_array(self, links: Path, name: str, count: int, at_once: int, after: str, margin_s: int) -> str:
        """For an array of jobs.

        Args:
            links: a folder in which link `<task>` leads to the run directory of that task.
            name: SLURM's for all of them.
            count: of tasks.
            at_once: most tasks that run at the same time, 0 for no limit.
            after: id of a job that has to end first, empty for none.
            margin_s: the longest of theirs.
        """
        options = [
            f"--array=0-{count - 1}{f'%{at_once}' if at_once else ''}",
            f"--output={_literal(str(links))}/%a/submit/slurm-%A_%a.out",
            *([f"--dependency=afterany:{after}"] if after else []),
        ]
        find = f'run=$(readlink -e {shlex.quote(str(links))}/"$SLURM_ARRAY_TASK_ID")'
        return replace(self, margin_s=margin_s)._text(name, options, '"$run"', find)

    def _text(self, name: str, own: Sequence[str], run_dir: str, *first: str) -> str:
        options = [
            f"--job-name={name}",
            *self.resources,
            *own,
            "--open-mode=append",
            "--requeue",
            "--no-kill",
            f"--signal=B:USR1@{self.margin_s}",
            *self.extra,
        ]
        lines = ["#!/bin/bash", *(f"#SBATCH {_quote_option(o)}" for o in options), "set -e", *self.setup, *first]
        if self.brings_code:
            lines += [f"export PYTHONSAFEPATH=1 PYTHONPATH={run_dir}/code${{PYTHONPATH:+:$PYTHONPATH}}"]
        return "\n".join([*lines, f"exec {shlex.quote(self.python)} -m {BATCH} {run_dir}", ""])


def script(app: AppDef, config: JobConfig, plan: Plan, site: Site) -> Script:
    """The batch script of a job."""
    cluster = config.cluster
    assert isinstance(cluster, SlurmClusterConfig)
    trainer = next(role for role in app.roles if role.name == "trainer")
    low, high = trainer.min_replicas or trainer.num_replicas, trainer.num_replicas
    resources = [
        f"--nodes={high}" if low == high else f"--nodes={low}-{high}",
        *(["--ntasks-per-node=1"] if low == high else []),  # with a range SLURM would take this for its least
        *_resources(cluster, trainer, site),
        *_switches(cluster, plan, high, site),
    ]
    return Script(
        resources=tuple(resources),
        extra=tuple(cluster.extra),
        setup=tuple(cluster.setup),
        python=cluster.python or trainer.entrypoint,
        brings_code=bool(cluster.snapshot_mb),
        margin_s=site.margin_s,
    )


def _literal(path: str) -> str:
    """A path in a pattern of sbatch's."""
    return path.replace("%", "%%")


def _resources(cluster: SlurmClusterConfig, trainer: Role, site: Site) -> Iterator[str]:
    """What each node must have, and who asks for it."""
    for key in ("partition", "account", "qos", "time", "mem", "constraint", "nodelist", "exclude", "reservation"):
        if getattr(cluster, key) is not None:
            yield f"--{key}={getattr(cluster, key)}"
    for key in ("comment", "mail_user", "mail_type"):
        if getattr(cluster, key) is not None:
            yield f"--{key.replace('_', '-')}={getattr(cluster, key)}"
    gpus = cluster.gpus_per_node or trainer.resource.gpu
    if gpus and site.gpu_option:
        yield site.gpu_option.format(gpus)
    if cluster.exclusive:
        yield "--exclusive"
    if cluster.cpus_per_task is not None or not cluster.exclusive:
        yield f"--cpus-per-task={cluster.cpus_per_task or trainer.resource.cpu}"


def _switches(cluster: SlurmClusterConfig, plan: Plan, nodes: int, site: Site) -> Iterator[str]:
    """As few leaf switches as hold the job, when what a step sends inside a shard group crosses nodes.

    SLURM waits for them as long as its administrator allows (max_switch_wait, 300 s by default).
    """
    if cluster.switches is not None:
        yield f"--switches={cluster.switches}"
    elif site.leaf_size and plan.layout.shard_group > plan.ranks_per_node:
        yield f"--switches={math.ceil(nodes / site.leaf_size)}"


def _quote_option(option: str) -> str:
    """An option as sbatch reads it in a script: its value quoted as for a shell, on one line."""
    key, equals, value = option.partition("=")
    return f"{key}{equals}{shlex.quote(value)}" if equals else shlex.quote(option)


def margin_s(save_s: float, step_s: float, grace_s: float) -> int:
    """How long before the time limit to ask for the last save.

    Args:
        save_s: the slowest save that this run has measured; 0 when there is none yet.
        step_s: its newest step; 0 likewise.
        grace_s: `elastic.stop_grace_s`, which bounds a save.

    Twice what was measured, the whole grace as long as nothing was, and 10 s to requeue. SLURM may be a minute early.
    """
    return math.ceil(10 + (min(grace_s, 2 * (save_s + step_s)) if save_s else grace_s))
