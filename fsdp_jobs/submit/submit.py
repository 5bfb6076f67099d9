"""From a configuration to a submitted job: validate, open the run, plan, prepare, submit. No torch, no cluster by name.

Every function takes many jobs: their launchers are asked once for all of them.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torchx.specs import make_app_handle, parse_app_handle

from fsdp_jobs.checkpoints.catalog import find_checkpoints
from fsdp_jobs.config.errors import BadInput, JobFailed, Problem
from fsdp_jobs.config.resolve import node_range, ranks_per_node
from fsdp_jobs.config.schema import CustomModelConfig, HfConfig, JobConfig, dump_config
from fsdp_jobs.launchers.base import SESSION, WRITES_AT_ONCE, Description, Job, Launcher, launcher_of
from fsdp_jobs.launchers.state import State
from fsdp_jobs.plan.plan import Plan, make_plan
from fsdp_jobs.plan.shape_client import check_initial_weights, probe
from fsdp_jobs.plan.shapes import ModelShape
from fsdp_jobs.plan.sources import from_yaml
from fsdp_jobs.plan.topology import Topology
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir, checkpoints_of, run_dir_of, write_atomic
from fsdp_jobs.run.status import RunStatus
from fsdp_jobs.run.verdict import Verdict
from fsdp_jobs.submit.validate import check_existing_run, validate

_Item = TypeVar("_Item")

_ASK_EVERY_S = 2.0  # between two questions to a launcher about the same job
_LEAVES_S = 30.0  # most that a launcher takes to see that a job has ended


@dataclass(kw_only=True)
class Prepared(Job):
    """A job that can be submitted, and what its launcher would submit. Nothing is written yet."""

    launcher: Launcher
    request: Any


def plan_of(config: JobConfig) -> tuple[Plan, ModelShape | None]:
    """Plan a configuration; also return the shape that a custom model was measured to have.

    Raises:
        BadInput: a custom model that cannot be built, a bad topology file, an impossible sharding, no such launcher.
    """
    shape = probe(config) if isinstance(config.model, CustomModelConfig | HfConfig) else None
    topology = _topology(config)
    return make_plan(config, topology, None if topology is None else node_range(config.nodes)[1], shape), shape


def _topology(config: JobConfig) -> Topology | None:
    """Return where the nodes are: by the user's file, or else by the launcher, which may not know."""
    path = config.cluster.topology
    if path is None:
        return launcher_of(config.cluster.launcher).topology(config)
    try:
        return from_yaml(Path(path).read_text(), gpus=ranks_per_node(config))
    except OSError as e:
        raise BadInput([Problem(f"cluster.topology={path}", str(e.strerror))]) from e


def prepare(configs: Sequence[JobConfig]) -> list[Prepared]:
    """Validate and plan jobs, and let their launchers say what they would submit. Writes and starts nothing.

    Raises:
        BadInput: all problems of all configurations, names and run directories; those of several jobs once.
    """
    planned: list[Job] = []
    problems: list[Problem] = []
    for config in configs:
        try:
            run = _open(config, [job.run for job in planned])
            planned.append(Job(config, run, *plan_of(config)))
        except BadInput as e:
            problems += e.problems
    prepared: dict[Path, Prepared] = {}
    for name, group in _grouped(planned, lambda job: job.config.cluster.launcher).items():
        try:
            launcher = launcher_of(name)
            for job, request in zip(group, launcher.prepare(group), strict=True):
                given = (job.config, job.run, job.plan, job.shape)
                prepared[job.run.path] = Prepared(*given, launcher=launcher, request=request)
        except BadInput as e:
            problems += e.problems
    if problems:
        raise BadInput(dict.fromkeys(problems))
    return [prepared[job.run.path] for job in planned]


def _grouped(items: Iterable[_Item], launcher: Callable[[_Item], str]) -> dict[str, list[_Item]]:
    """Return name of a launcher -> the items that it gives, in order."""
    groups: dict[str, list[_Item]] = {}
    for item in items:
        groups.setdefault(launcher(item), []).append(item)
    return groups


def _open(config: JobConfig, taken: Sequence[RunDir]) -> RunDir:
    """Validate a configuration and return its run directory, which no other job may be using."""
    validate(config)
    run = run_dir_of(config)
    if any(run.path == other.path for other in taken):
        raise BadInput([Problem(f"name={run.name}", "names two jobs of the same submission")])
    check_existing_run(config, run)
    if _is_live(run):
        what = f"is in use by the live job {run.read_job()['handle']}"
        cure = f"fsdp-jobs cancel {run.name}, or wait for it: fsdp-jobs logs -f {run.name}"
        raise BadInput([Problem(f"run directory {run.path}", what, cure)])
    can_look = config.init_from is not None and config.cluster.shares_files
    if can_look and not find_checkpoints(checkpoints_of(config.checkpoint, run)):
        check_initial_weights(config)
    return run


def _is_live(run: RunDir) -> bool:
    """Return whether a launcher has a job with this run directory, which is given time to exit after its verdict."""
    job = run.read_job()
    deadline = time.monotonic() + _LEAVES_S
    while run.is_submitted and is_active(job["handle"]):
        attempt = run.last_attempt()
        verdict = Verdict.read(run, attempt)
        has_ended = verdict is not None and verdict.decision == "stop"
        if not has_ended or attempt < run.first_attempt() or time.monotonic() > deadline:
            return True
        time.sleep(0.2)
    return False


def submit(
    jobs: Sequence[Prepared], overrides: Sequence[Sequence[str]], parallelism: int = 0, folder: Path | None = None
) -> list[str]:
    """Write run directories and hand the jobs to their launchers, all or none.

    Args:
        jobs: of `prepare`.
        overrides: what each was composed from; `resume` composes it again.
        parallelism: how many may run at once, 0 for no limit.
        folder: of the sweep, for launchers' files; None for a job by itself.

    Returns:
        Handles, `scheduler://session/id`, in order.
    """
    with ThreadPoolExecutor(WRITES_AT_ONCE) as threads:
        before = [job.run.job.read_text() if job.run.job.exists() else None for job in jobs]
        submitted: list[tuple[Launcher, list[str]]] = []
        app_ids: dict[Path, str] = {}
        try:
            list(threads.map(_write, jobs, overrides))
            for group in _grouped(jobs, lambda job: job.launcher.name).values():
                launcher = group[0].launcher
                ids = launcher.submit([job.request for job in group], parallelism, folder)
                submitted.append((launcher, ids))
                app_ids |= {job.run.path: app_id for job, app_id in zip(group, ids, strict=True)}
        except BaseException:
            for launcher, ids in submitted:
                launcher.cancel(ids)
            for job, text in zip(jobs, before, strict=True):
                _write_or_remove(job.run.job, text)
            raise
        return list(threads.map(_record, jobs, [app_ids[job.run.path] for job in jobs]))


def _write(job: Prepared, overrides: Sequence[str]) -> None:
    """Write what describes the job into its run directory; job.json gets the handle of this submission later."""
    run = job.run
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    job.config.name = run.name
    write_atomic(run.config, dump_config(job.config))
    write_atomic(run.plan, job.plan.to_json())
    topology = job.config.cluster.topology
    _write_or_remove(run.topology, None if topology is None else Path(topology).read_text())
    _write_or_remove(run.shape, None if job.shape is None else job.shape.to_json())
    write_atomic(run.token, secrets.token_hex(16), mode=0o600)
    write_atomic(run.request, f"{job.request}\n")
    run.stop_request.unlink(missing_ok=True)
    record = {**run.read_job(), "overrides": list(overrides), "first_attempt": run.last_attempt() + 1}
    steps = None if job.config.is_program else job.config.steps  # only the program knows how many it will do
    record |= {"nodes": str(job.config.nodes), "steps": steps}
    write_atomic(run.job, json.dumps(record, indent=2))


def _write_or_remove(path: Path, text: str | None) -> None:
    """Write a file, or for None remove the one that an earlier submission left."""
    if text is not None:
        write_atomic(path, text)
    else:
        path.unlink(missing_ok=True)


def _record(job: Prepared, app_id: str) -> str:
    """Add the handle to what was submitted, and return it."""
    handle = str(make_app_handle(job.launcher.name, SESSION, app_id))
    write_atomic(job.run.job, json.dumps({**job.run.read_job(), "handle": handle, "submitted": time.time()}, indent=2))
    events.record(job.run, job.run.last_attempt(), events.Submitted(handle))
    return handle


def describe(handles: Sequence[str]) -> list[Description]:
    """Describe jobs, in order, with one question to each launcher.

    The state is UNKNOWN when the launcher has no job of that id, and SILENT when one of several launchers does not
    answer; the message says why.

    Raises:
        BadInput, JobFailed: the only launcher that was asked does not answer.
    """
    described: dict[str, Description] = {}
    groups = _grouped(handles, _launcher_in)
    for name, group in groups.items():
        state, message = State.UNKNOWN, "its launcher no longer knows the job: resume it"
        answers: Sequence[Description | None] = [None] * len(group)
        try:
            answers = launcher_of(name).describe([_app_id_in(handle) for handle in group])
        except (BadInput, JobFailed) as e:
            if len(groups) == 1:
                raise
            state, message = State.SILENT, f"its launcher does not answer: {e}"
        for handle, answer in zip(group, answers, strict=True):
            described[handle] = answer or Description(_app_id_in(handle), state, message)
    return [described[handle] for handle in handles]


def _launcher_in(handle: str) -> str:
    return str(parse_app_handle(handle)[0])


def _app_id_in(handle: str) -> str:
    return str(parse_app_handle(handle)[2])


def is_active(handle: str) -> bool:
    """Return whether a job runs or is queued."""
    return describe([handle])[0].state.is_active


def activity_of(handle: str, said_at: float = -math.inf) -> Callable[[], bool]:
    """Return a function that says whether a job is active, by what its launcher said in the last 2 seconds.

    Args:
        handle: of a job that was active.
        said_at: when its launcher said so, on the monotonic clock.
    """
    active = True

    def ask() -> bool:
        nonlocal said_at, active
        if active and time.monotonic() - said_at > _ASK_EVERY_S:
            active, said_at = is_active(handle), time.monotonic()
        return active

    return ask


def kill(handles: Sequence[str]) -> None:
    """End jobs at once, without checkpoints."""
    for name, group in _grouped(handles, _launcher_in).items():
        launcher_of(name).cancel([_app_id_in(handle) for handle in group])


def ask_launchers(statuses: Sequence[RunStatus]) -> dict[str, Description]:
    """Return handle -> description of runs, with one question to each launcher."""
    handles = [str(status.run.read_job()["handle"]) for status in statuses]
    return dict(zip(handles, describe(handles), strict=True))


def state_of(status: RunStatus, job: Description | None) -> tuple[str, str]:
    """Return state and reason of a run by its own record and its launcher's description; None if it was not asked."""
    status.update()  # the launcher may have fetched more of the record
    if status.ended or job is None or job.state is State.RUNNING:
        return status.state, status.reason
    if job.state is State.SILENT:
        return status.state, job.message
    if job.state is State.QUEUED:
        return State.QUEUED.value, job.message
    state = State.STOPPED if job.state is State.STOPPED else State.FAILED
    return state.value, job.message or "its launcher no longer runs it: resume it"
