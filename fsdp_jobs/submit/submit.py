"""From a checked configuration to a submitted job: plan, run directory, AppDef, launcher. No torch."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchx.schedulers import get_scheduler_factories
from torchx.schedulers.api import DescribeAppResponse
from torchx.specs import AppDryRunInfo, AppState, make_app_handle, parse_app_handle

from fsdp_jobs.checkpoints.catalog import find_checkpoints, home_of
from fsdp_jobs.config.clusters import SlurmClusterConfig
from fsdp_jobs.config.errors import BadInput, JobFailed, Problem
from fsdp_jobs.config.resolve import node_range, ranks_per_node
from fsdp_jobs.config.schema import CustomModelConfig, HfConfig, JobConfig, dump_config
from fsdp_jobs.config.validate import check, check_existing_run
from fsdp_jobs.launchers.app import to_app
from fsdp_jobs.launchers.base import WRITES_AT_ONCE, RunScheduler
from fsdp_jobs.plan.plan import Plan, make_plan
from fsdp_jobs.plan.shape_client import check_initial_weights, probe
from fsdp_jobs.plan.shapes import ModelShape
from fsdp_jobs.plan.sources import from_yaml
from fsdp_jobs.run.directory import RunDir, run_dir_of, write_atomic
from fsdp_jobs.run.events import record_event
from fsdp_jobs.run.status import RunStatus
from fsdp_jobs.run.verdict import Verdict

SESSION = "fsdp_jobs"
SILENT = "its launcher does not answer"
_LEAVES_S = 30.0  # most that a launcher takes to let go of a job that has ended
ACTIVE = (AppState.SUBMITTED, AppState.PENDING, AppState.RUNNING)


@dataclass
class Prepared:
    """A job that could be submitted, with everything known about it. Nothing is written yet."""

    config: JobConfig
    run: RunDir
    plan: Plan
    shape: ModelShape | None  # of a custom model
    scheduler: RunScheduler
    request: AppDryRunInfo[Any]


def scheduler_of(launcher: str) -> RunScheduler:
    """The TorchX scheduler of a name.

    Raises:
        BadInput: there is none of this name.
    """
    factories = get_scheduler_factories()
    if launcher not in factories:
        known = sorted(factories)
        what = f"no launcher of this name is installed; there are {', '.join(known)}"
        raise BadInput([Problem(f"cluster.launcher={launcher}", what, "cluster=local runs on this machine")])
    scheduler: RunScheduler = factories[launcher](SESSION)
    return scheduler


def plan_of(config: JobConfig) -> tuple[Plan, ModelShape | None]:
    """The plan for a configuration, and the shape that a custom model was found to have.

    Raises:
        BadInput: a custom model that cannot be built, a bad topology file, or a sharding that cannot be.
    """
    shape = probe(config) if isinstance(config.model, CustomModelConfig | HfConfig) else None
    topology = None
    if config.cluster.topology is not None:
        text = _read_topology(config.cluster.topology)
        topology = from_yaml(text, gpus=ranks_per_node(config))
        if len(topology.nodes) < node_range(config.nodes)[1]:
            what = f"names {len(topology.nodes)} nodes, the job wants {config.nodes}"
            raise BadInput([Problem(f"cluster.topology={config.cluster.topology}", what)])
    elif isinstance(config.cluster, SlurmClusterConfig):
        from fsdp_jobs.launchers.slurm.site import cluster_topology

        topology = cluster_topology(config)
    return make_plan(config, topology, None if topology is None else node_range(config.nodes)[1], shape), shape


def _read_topology(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as e:
        raise BadInput([Problem(f"cluster.topology={path}", str(e.strerror))]) from e


def prepare(config: JobConfig) -> Prepared:
    """Check and plan a job, and let its launcher say what it would submit. Writes and starts nothing.

    Raises:
        BadInput: whatever is wrong with the configuration, the run's name, or its run directory.
    """
    return prepare_many([config])[0]


def prepare_many(configs: Sequence[JobConfig]) -> list[Prepared]:
    """The same for jobs that are submitted together.

    Raises:
        BadInput: whatever is wrong with any of them; what is wrong with several is said once.
    """
    planned: list[tuple[JobConfig, RunDir, Plan, ModelShape | None]] = []
    problems: list[Problem] = []
    for config in configs:
        try:
            planned.append((config, *_checked(config, [run for _, run, *_ in planned])))
        except BadInput as e:
            problems += e.problems
    jobs: dict[Path, Prepared] = {}
    for launcher in dict.fromkeys(config.cluster.launcher for config, *_ in planned):
        mine = [p for p in planned if p[0].cluster.launcher == launcher]
        apps = [to_app(config, run, ranks_per_node(config)) for config, run, *_ in mine]
        try:
            scheduler = scheduler_of(launcher)
            requests = scheduler.dryrun_many(apps, [{"config": config, "plan": plan} for config, _, plan, _ in mine])
            for (config, run, plan, shape), request in zip(mine, requests, strict=True):
                jobs[run.path] = Prepared(config, run, plan, shape, scheduler, request)
        except BadInput as e:
            problems += e.problems
    if problems:
        raise BadInput(dict.fromkeys(problems))
    return [jobs[run.path] for _, run, *_ in planned]


def _checked(config: JobConfig, taken: Sequence[RunDir]) -> tuple[RunDir, Plan, ModelShape | None]:
    """Run directory, plan and shape of a job, where all but the launcher has nothing against it."""
    check(config)
    run = run_dir_of(config)
    if any(run.path == other.path for other in taken):
        raise BadInput([Problem(f"name={run.name}", "is the name of two jobs that are submitted together")])
    check_existing_run(config, run)
    if _is_live(run):
        what = f"is in use by the live job {run.read_job()['handle']}"
        instead = f"fsdp-jobs cancel {run.name}, or wait for it: fsdp-jobs logs -f {run.name}"
        raise BadInput([Problem(f"run directory {run.path}", what, instead)])
    can_look = config.init_from is not None and config.cluster.shares_files
    if can_look and not find_checkpoints(home_of(config.checkpoint, run)):
        check_initial_weights(config)
    return run, *plan_of(config)


def _is_live(run: RunDir) -> bool:
    """Whether a launcher has a job with this run directory; one that was judged is given the time to leave."""
    job = run.read_job()
    deadline = time.monotonic() + _LEAVES_S
    while job and state_of(job["handle"]) in ACTIVE:
        attempt = run.last_attempt()
        verdict = Verdict.read(run, attempt)
        has_ended = verdict is not None and verdict.decision == "stop"
        if not has_ended or run.verdict(attempt).stat().st_mtime < job["submitted"] or time.monotonic() > deadline:
            return True
        time.sleep(0.2)
    return False


def submit(job: Prepared, overrides: Sequence[str]) -> str:
    """Write the run directory and hand the job to its launcher. Returns its handle, `scheduler://session/id`."""
    _write(job)
    return _record(job, job.scheduler.schedule(job.request), overrides)


def submit_many(
    jobs: Sequence[Prepared], overrides: Sequence[Sequence[str]], parallelism: int, folder: Path
) -> list[str]:
    """The same for jobs that run at most `parallelism` at once, 0 for no limit. Returns their handles, in order.

    Args:
        folder: of the sweep, for launchers' files.
    """
    app_ids: dict[Path, str] = {}
    submitted: list[tuple[RunScheduler, list[str]]] = []
    with ThreadPoolExecutor(WRITES_AT_ONCE) as threads:
        list(threads.map(_write, jobs))
        try:
            for scheduler in {id(job.scheduler): job.scheduler for job in jobs}.values():
                mine = [job for job in jobs if job.scheduler is scheduler]
                ids = scheduler.schedule_many([job.request for job in mine], parallelism, folder)
                submitted.append((scheduler, ids))
                app_ids |= {job.run.path: app_id for job, app_id in zip(mine, ids, strict=True)}
        except BaseException:  # all or none
            for scheduler, ids in submitted:
                scheduler.cancel_many(ids)
            raise
        return list(threads.map(_record, jobs, [app_ids[job.run.path] for job in jobs], overrides))


def _write(job: Prepared) -> None:
    """All of a run directory that says what the job is."""
    run = job.run
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    job.config.name = run.name
    write_atomic(run.config, dump_config(job.config))
    write_atomic(run.plan, job.plan.to_json())
    if job.config.cluster.topology is not None:
        write_atomic(run.topology, _read_topology(job.config.cluster.topology))
    if job.shape is not None:
        write_atomic(run.shape, job.shape.to_json())
    write_atomic(run.token, secrets.token_hex(16), mode=0o600)
    write_atomic(run.submit / "request.txt", f"{job.request}\n")
    run.stop_request.unlink(missing_ok=True)


def _record(job: Prepared, app_id: str, overrides: Sequence[str]) -> str:
    """What was submitted and when, in the run directory. Returns the handle."""
    handle = str(make_app_handle(job.scheduler.backend, SESSION, app_id))
    content = {"handle": handle, "overrides": list(overrides), "submitted": time.time()}
    content |= {"nodes": str(job.config.nodes), "steps": job.config.steps}  # for tables of many runs
    write_atomic(job.run.job, json.dumps(content, indent=2))
    kind = {"program": True} if job.config.is_program else {}
    record_event(job.run, "submitted", job.run.last_attempt(), handle=handle, **kind)
    return handle


def describe_many(handles: Sequence[str]) -> list[DescribeAppResponse]:
    """What launchers say of jobs, in their order, each launcher asked once.

    The state is UNKNOWN when the launcher knows no job of that id, or when it does not answer: then the message is why.
    """
    found: dict[str, DescribeAppResponse] = {}
    by_launcher: dict[str, list[str]] = {}
    for handle in handles:
        by_launcher.setdefault(parse_app_handle(handle)[0], []).append(handle)
    for launcher, mine in by_launcher.items():
        ids = [str(parse_app_handle(handle)[2]) for handle in mine]
        missing = "its launcher no longer knows the job: resume it"
        answers: Sequence[DescribeAppResponse | None] = [None] * len(ids)
        try:
            answers = scheduler_of(launcher).describe_many(ids)
        except (BadInput, JobFailed) as e:
            if len(by_launcher) == 1:
                raise
            missing = f"{SILENT}: {e}"
        for handle, app_id, answer in zip(mine, ids, answers, strict=True):
            found[handle] = answer or DescribeAppResponse(app_id, AppState.UNKNOWN, msg=missing)
    return [found[handle] for handle in handles]


def describe(handle: str) -> DescribeAppResponse:
    """What the launcher says of a job; state UNKNOWN when it knows none of that id."""
    return describe_many([handle])[0]


def state_of(handle: str) -> AppState:
    state: AppState = describe(handle).state
    return state


def statuses_of(runs: Sequence[RunDir]) -> list[RunStatus]:
    """What submitted runs are doing, at a glance: each launcher is asked once."""
    statuses = [RunStatus(run) for run in runs]
    for status in statuses:
        status.glance()
    for status, words in zip(statuses, launchers_words(statuses), strict=True):
        status.state, status.reason = words
    return statuses


def launchers_words(statuses: Sequence[RunStatus]) -> list[tuple[str, str]]:
    """State and reason of runs, read to the end; launchers are asked about those whose own record tells of no end."""
    for status in statuses:
        status.update()
    asked = [status for status in statuses if not status.ended]
    jobs = dict(zip(map(id, asked), describe_many([s.run.read_job()["handle"] for s in asked]), strict=True))
    words = []
    for status in statuses:
        status.update()  # the launcher may have fetched more of the record
        job = None if status.ended else jobs[id(status)]
        if job is None:
            words.append((status.state, status.reason))
        elif job.msg.startswith(SILENT):
            words.append((status.state, job.msg))
        elif job.state not in ACTIVE:
            state = "stopped" if job.state is AppState.CANCELLED else "failed"
            words.append((state, job.msg or "its launcher no longer runs it: resume it"))
        elif job.state is AppState.PENDING:
            words.append(("queued", job.msg))
        else:
            words.append((status.state, status.reason))
    return words


def kill(handle: str) -> None:
    """End a job at once, without a checkpoint."""
    kill_many([handle])


def kill_many(handles: Sequence[str]) -> None:
    """The same for several, each launcher told once."""
    by_launcher: dict[str, list[str]] = {}
    for handle in handles:
        backend, _, app_id = parse_app_handle(handle)
        by_launcher.setdefault(backend, []).append(app_id)
    for launcher, app_ids in by_launcher.items():
        scheduler_of(launcher).cancel_many(app_ids)
