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
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torchx.specs import make_app_handle, parse_app_handle

from fsdp_jobs.checkpoints.catalog import find_checkpoints
from fsdp_jobs.config.errors import BadInput, JobFailed, Problem
from fsdp_jobs.config.resolve import node_range, ranks_per_node
from fsdp_jobs.config.schema import CustomModelConfig, HfConfig, JobConfig, dump_config
from fsdp_jobs.launchers.base import (
    SESSION,
    WRITES_AT_ONCE,
    Description,
    Job,
    Launcher,
    launcher_of,
    new_submission,
)
from fsdp_jobs.launchers.state import State
from fsdp_jobs.plan.plan import Plan, make_plan
from fsdp_jobs.plan.shape_client import check_initial_weights, probe
from fsdp_jobs.plan.shapes import ModelShape
from fsdp_jobs.plan.sources import from_yaml
from fsdp_jobs.plan.topology import Topology
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir, checkpoints_of, run_dir_of, write_atomic
from fsdp_jobs.run.goodput import costs_of
from fsdp_jobs.run.identity import check_may_act, claim, identity_of, owner_of
from fsdp_jobs.run.processes import raise_file_limit
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
    record: dict[str, Any]  # what job.json said when it was validated


def plan_of(config: JobConfig, run: RunDir | None = None) -> tuple[Plan, ModelShape | None]:
    """Plan a configuration; also return the shape that a custom model was measured to have.

    What checkpoints and restarts have cost on `run`, the run that it continues, is in the predicted goodput.

    Raises:
        BadInput: a custom model that cannot be built, a bad topology file, an impossible sharding, no such launcher.
    """
    shape = probe(config) if isinstance(config.model, CustomModelConfig | HfConfig) else None
    topology = _topology(config)
    nodes = None if topology is None else node_range(config.nodes)[1]
    return make_plan(config, topology, nodes, shape, costs=None if run is None else costs_of(run)), shape


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
    records: dict[Path, dict[str, Any]] = {}
    submission = new_submission()
    for config in configs:
        try:
            run = _open(config, [job.run for job in planned])
            records[run.path] = run.read_job()
            _check_free(run)
            planned.append(Job(config, run, *plan_of(config, run), submission))
        except BadInput as e:
            problems += e.problems
    prepared: dict[Path, Prepared] = {}
    for name, group in _grouped(planned, lambda job: job.config.cluster.launcher).items():
        try:
            launcher = launcher_of(name)
            for job, request in zip(group, launcher.prepare(group), strict=True):
                given = (job.config, job.run, job.plan, job.shape, job.submission)
                record = records[job.run.path]
                prepared[job.run.path] = Prepared(*given, launcher=launcher, request=request, record=record)
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
    """Validate a configuration and return its run directory, which has to be this user's."""
    validate(config)
    run = run_dir_of(config)
    if any(run.path == other.path for other in taken):
        raise BadInput([Problem(f"name={run.name}", "names two jobs of the same submission")])
    check_may_act(run)
    check_existing_run(config, run)
    can_look = config.init_from is not None and config.cluster.shares_files
    if can_look and not find_checkpoints(checkpoints_of(config.checkpoint, run)):
        check_initial_weights(config)
    return run


def _check_free(run: RunDir) -> None:
    """Check that no launcher has a job with this run directory; one is given time to exit after its verdict.

    Raises:
        BadInput: a job has it, or its launcher does not say.
    """
    handle = run.read_job().get("handle")
    deadline = time.monotonic() + _LEAVES_S
    while handle is not None and not has_ended(run, job := describe([handle])[0]):
        if Verdict.final(run) is None or time.monotonic() > deadline:
            what = f"is in use by the live job {handle}"
            cure = f"fsdp-jobs cancel {run.name}, or wait for it: fsdp-jobs logs -f {run.name}"
            if job.state is State.SILENT:
                what = f"may be in use by the job {handle}: {job.message}"
                cure = f"ask there; if that job is gone for good: rm {run.job}, and submit with all overrides"
            raise BadInput([Problem(f"run directory {run.path}", what, cure)])
        time.sleep(0.2)


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
        Handles, `scheduler://cluster/id`, in order.

    Raises:
        BadInput, JobFailed: another command was faster, or a launcher refuses; nothing of these jobs is left.
    """
    with ExitStack() as locks, ThreadPoolExecutor(WRITES_AT_ONCE) as threads:
        raise_file_limit()  # each run of a sweep has a lock
        for job in sorted(jobs, key=lambda job: job.run.path):  # in one order: two commands cannot wait for each other
            locks.enter_context(job.run.locked())
            _adopt(job.run)
            if job.run.read_job() != job.record:  # another command was faster
                check_existing_run(job.config, job.run)
                _check_free(job.run)
        before = [job.run.job.read_text() if job.run.job.exists() else None for job in jobs]
        app_ids: dict[Path, str] = {}
        try:
            list(threads.map(_write, jobs, overrides))
            for group in _grouped(jobs, lambda job: job.launcher.name).values():
                ids = group[0].launcher.submit([job.request for job in group], parallelism, folder)
                app_ids |= {job.run.path: app_id for job, app_id in zip(group, ids, strict=True)}
        except BaseException:
            for job in jobs:
                with suppress(BadInput, JobFailed):  # if it got there nevertheless, it leaves when it starts
                    if (app_id := app_ids.get(job.run.path) or job.launcher.find(job.run)) is not None:
                        job.launcher.cancel([app_id])
            for job, text in zip(jobs, before, strict=True):
                _write_or_remove(job.run.job, text)
            raise
        return list(threads.map(lambda job: _record(job.run, job.launcher, app_ids[job.run.path]), jobs))


def settle(runs: Iterable[RunDir]) -> None:
    """Find out what became of submissions whose commands died before they could record it."""
    for run in runs:
        if run.pending_launcher is not None:
            with suppress(BadInput, JobFailed), run.locked(wait_s=0):  # another command is at it, or nobody answers
                _adopt(run)


def _adopt(run: RunDir) -> None:
    """Record the job that a command left behind when it died, if its launcher has it. The run must be locked.

    Raises:
        BadInput, JobFailed: the launcher does not answer.
    """
    if (name := run.pending_launcher) is None:
        return
    launcher = launcher_of(name)
    if (app_id := launcher.find(run)) is not None:
        _record(run, launcher, app_id)
    else:
        record = {key: value for key, value in run.read_job().items() if key != "pending"}
        write_atomic(run.job, json.dumps(record, indent=2))


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
    identity = identity_of(run, job.config)
    claim(run.identity, identity)
    if (elsewhere := job.config.checkpoint.dir) is not None and ("://" in elsewhere or Path(elsewhere).is_dir()):
        with suppress(OSError):  # it may be for the nodes alone
            claim(checkpoints_of(job.config.checkpoint, run) / run.identity.name, identity)
    steps = None if job.config.is_program else job.config.steps  # only the program knows how many it will do
    record = {**run.read_job(), "overrides": list(overrides), "first_attempt": run.last_attempt() + 1}
    record |= {"nodes": str(job.config.nodes), "steps": steps}
    record |= {"submission": job.submission, "pending": job.launcher.name}  # until `_record`
    write_atomic(run.job, json.dumps(record, indent=2))


def _write_or_remove(path: Path, text: str | None) -> None:
    """Write a file, or for None remove the one that an earlier submission left."""
    if text is not None:
        write_atomic(path, text)
    else:
        path.unlink(missing_ok=True)


def _record(run: RunDir, launcher: Launcher, app_id: str) -> str:
    """Add the handle to what was submitted, and return it."""
    handle = str(make_app_handle(launcher.name, launcher.cluster_of(app_id), app_id))
    record = {key: value for key, value in run.read_job().items() if key != "pending"}
    write_atomic(run.job, json.dumps({**record, "handle": handle, "submitted": time.time()}, indent=2))
    events.record(run, run.last_attempt(), events.Submitted(handle))
    return handle


def describe(handles: Sequence[str]) -> list[Description]:
    """Describe jobs, in order, with one question to each launcher.

    The state is UNKNOWN when the launcher has no job of that id, and SILENT when it cannot be asked here and now; the
    message says why. This never fails: what run directories tell is told in any case.
    """
    described: dict[str, Description] = {}
    for name, group in _grouped(handles, _launcher_in).items():
        try:
            launcher = launcher_of(name)
            elsewhere = {handle: _elsewhere(launcher, handle) for handle in group}
            here = [handle for handle in group if elsewhere[handle] is None]
            answers = dict(zip(here, launcher.describe([_app_id_in(handle) for handle in here]), strict=True))
            for handle in group:
                state, why = State.UNKNOWN, elsewhere[handle] or "its launcher no longer knows the job: resume it"
                state = state if handle in answers else State.SILENT
                described[handle] = answers.get(handle) or Description(_app_id_in(handle), state, why)
        except (BadInput, JobFailed) as e:
            why = f"its launcher does not answer: {' '.join(str(e).split())}"
            described |= {handle: Description(_app_id_in(handle), State.SILENT, why) for handle in group}
    return [described[handle] for handle in handles]


def _elsewhere(launcher: Launcher, handle: str) -> str | None:
    """Return why a job cannot be asked for here: it is on another cluster than a command here reaches."""
    _, session, app_id = parse_app_handle(handle)
    if session == SESSION or session == (here := launcher.cluster_of(app_id)):
        return None
    return f"{app_id} is on {session}, and this machine asks {here}: ask there"


def _launcher_in(handle: str) -> str:
    return str(parse_app_handle(handle)[0])


def _app_id_in(handle: str) -> str:
    return str(parse_app_handle(handle)[2])


def is_active(handle: str) -> bool:
    """Return whether a job runs or is queued."""
    return describe([handle])[0].state.is_active


def activity_of(run: RunDir, said_at: float = -math.inf) -> Callable[[], bool]:
    """Return a function that says whether a run's job is active, by what its launcher said in the last 2 seconds.

    Args:
        run: whose job was active.
        said_at: when its launcher said so, on the monotonic clock.
    """
    active = True

    def ask() -> bool:
        nonlocal said_at, active
        if active and time.monotonic() - said_at > _ASK_EVERY_S:
            active = not has_ended(run, *describe([run.read_job()["handle"]]))
            said_at = time.monotonic()
        return active

    return ask


def has_ended(run: RunDir, job: Description) -> bool:
    """Whether a run's newest submission has ended: by its launcher's description, else its verdict."""
    if _is_silent(run, job):
        return Verdict.final(run) is not None
    return not job.state.is_active


def _is_silent(run: RunDir, job: Description) -> bool:
    """Whether a launcher tells nothing of a job: it does not answer, or knows only jobs of this user."""
    return job.state is State.SILENT or (job.state is State.UNKNOWN and owner_of(run) is not None)


def kill(handles: Sequence[str]) -> None:
    """End jobs at once, without checkpoints.

    Raises:
        BadInput, JobFailed: a launcher does not answer, or the job is on another cluster.
    """
    for name, group in _grouped(handles, _launcher_in).items():
        launcher = launcher_of(name)
        if problems := [Problem(handle, why) for handle in group if (why := _elsewhere(launcher, handle))]:
            raise BadInput(problems)
        launcher.cancel([_app_id_in(handle) for handle in group])


def replace_lost(handle: str) -> str:
    """Replace what of a live job is lost and its cluster does not replace; say what. Empty: nothing is."""
    return launcher_of(_launcher_in(handle)).replace_lost(_app_id_in(handle))


def ask_launchers(statuses: Sequence[RunStatus]) -> dict[str, Description]:
    """Return handle -> description of runs, with one question to each launcher."""
    handles = [str(status.run.read_job()["handle"]) for status in statuses]
    return dict(zip(handles, describe(handles), strict=True))


def state_of(status: RunStatus, job: Description | None) -> tuple[str, str]:
    """Return state and reason of a run by its own record and its launcher's description; None if it was not asked."""
    status.update()  # the launcher may have fetched more of the record
    if status.ended or job is None or job.state is State.RUNNING:
        return status.state, status.reason
    if _is_silent(status.run, job):
        return status.state, job.message if job.state is State.SILENT else f"of {owner_of(status.run)}"
    if job.state is State.QUEUED:
        return State.QUEUED.value, job.message
    state = State.STOPPED if job.state is State.STOPPED else State.FAILED
    return state.value, job.message or "its launcher no longer runs it: resume it"
