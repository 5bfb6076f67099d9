"""Validate a job before submission: its configuration, its sharding, and the run that it continues. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from fsdp_jobs.checkpoints.catalog import answering, find_checkpoints, step_of
from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.hydra import compose_jobs
from fsdp_jobs.config.resolve import node_range, ranks_per_node
from fsdp_jobs.config.schema import JobConfig, load_config, training_values
from fsdp_jobs.config.validate import config_problems
from fsdp_jobs.plan.plan import sharding_problems
from fsdp_jobs.plan.topology import Topology
from fsdp_jobs.run.directory import RunDir, checkpoints_of
from fsdp_jobs.run.files import exists
from fsdp_jobs.run.identity import identity_of
from fsdp_jobs.run.table import listed
from fsdp_jobs.run.tail import newest_json_lines
from fsdp_jobs.run.verdict import Verdict

_MOST_CHANGES = 8  # with more, it is another job


def validate(config: JobConfig, files: bool = True, is_offline: bool = False) -> None:
    """Validate everything that does not depend on the run directory; `files` and `is_offline` as in `config_problems`.

    Raises:
        BadInput: all problems.
    """
    if problems := [*config_problems(config, files, is_offline), *_sharding_problems(config)]:
        raise BadInput(problems)


def composed(jobs: Sequence[Sequence[str]], files: bool = True) -> list[JobConfig]:
    """Compose the configuration of each list of overrides; if all overrides fit, validate nothing further.

    Raises:
        BadInput: all overrides that do not fit, and all problems of the configurations without those overrides.
    """
    configs = compose_jobs(jobs)
    problems = [p for config in configs if isinstance(config, BadInput) for p in config.problems]
    if not problems:
        return [config for config in configs if isinstance(config, JobConfig)]
    bad = {p.where for p in problems}
    for config in compose_jobs([[o for o in job if o not in bad] for job in jobs]):
        try:
            if isinstance(config, BadInput):
                raise config
            validate(config, files)
        except BadInput as e:
            problems += e.problems
    raise BadInput(dict.fromkeys(problems))


def job_without_files(overrides: Sequence[str]) -> JobConfig:
    """Compose and validate a configuration, except its data: it will be planned, not submitted.

    Raises:
        BadInput: all overrides that do not fit, and all problems of the configuration without those overrides.
    """
    (config,) = composed([overrides], files=False)
    validate(config, files=False)
    return config


def check_existing_run(config: JobConfig, run: RunDir) -> None:
    """Check that a configuration continues the training of an existing run.

    Raises:
        BadInput: the checkpoints belong to another run or cannot be read, or the run already has more steps or was
            started with another training configuration.
    """
    home = checkpoints_of(config.checkpoint, run)
    with answering(home):
        identity_of(run, config).check(home / run.identity.name)
        newest = next(iter(find_checkpoints(home)), None)
    if newest is not None and not config.is_program and config.steps < (done := step_of(newest)):
        what = f"run {run.name} is at step {done} already"
        raise BadInput.at(f"steps={config.steps}", what, f"steps above {done}")
    has_trained = newest is not None or _has_trained(run)
    if has_trained and (problems := training_changes(config, run)):
        raise BadInput(problems)


def training_changes(config: JobConfig, run: RunDir) -> list[Problem]:
    """List what a configuration would change in the training of an existing run."""
    if not exists(run.config) or config.allow_config_change:
        return []
    before, now = training_values(load_config(run.config)), training_values(config)
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    what, cure = f"run {run.name} was trained with", "another name=..., or allow_config_change=true if you mean it"
    if len(changed) > _MOST_CHANGES:
        return [Problem(f"name={run.name}", f"names another job: {listed(changed, of='settings')} differ", cure)]
    return [
        Problem(f"{key}={now.get(key)}", f"{what} {before.get(key)}", cure if key == changed[-1] else "")
        for key in changed
    ]


def _has_trained(run: RunDir) -> bool:
    """Whether an attempt has begun; not if the run ended with an error of its user before a recorded step."""
    if run.last_attempt() < 0:
        return False
    verdict = Verdict.final(run)
    return verdict is None or verdict.verdict != "user_error" or any(newest_json_lines(run.metrics))


def _sharding_problems(config: JobConfig) -> Iterator[Problem]:
    """Check the sharding on the fewest and on the most nodes; report each key once."""
    try:
        sizes, per_node = node_range(config.nodes), ranks_per_node(config)
    except BadInput:
        return  # `config_problems` reports it
    found = (sharding_problems(config, Topology.flat(nodes, per_node)) for nodes in reversed(sizes))
    yield from {problem.where: problem for problem in chain.from_iterable(found)}.values()
