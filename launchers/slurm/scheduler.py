"""The TorchX scheduler `slurm_fsdp`: submit, describe, cancel, logs. An app's id is SLURM's job id."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torchx.schedulers.api import DescribeAppResponse, ListAppResponse
from torchx.specs import AppDef, AppDryRunInfo, AppState, RoleStatus

from fsdp_jobs.config.clusters import SlurmClusterConfig
from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.app import RUN_DIR_KEY
from fsdp_jobs.launchers.base import WRITES_AT_ONCE, RunScheduler, final_state, log_lines, remember, run_of
from fsdp_jobs.launchers.slurm import arrays, client, refusals
from fsdp_jobs.launchers.slurm.script import Script, Steps, script, steps
from fsdp_jobs.launchers.slurm.site import probe
from fsdp_jobs.run.directory import RunDir, write_atomic
from fsdp_jobs.run.events import record_event
from fsdp_jobs.run.verdict import Verdict
from fsdp_jobs.submit.snapshot import Snapshot, link, take

# SLURM's words. One that is not here belongs to a job that is still in the queue.
_STATES = {
    "PENDING": AppState.PENDING,
    "REQUEUED": AppState.PENDING,
    "REQUEUE_HOLD": AppState.PENDING,
    "SPECIAL_EXIT": AppState.PENDING,
    "RESV_DEL_HOLD": AppState.PENDING,
    "COMPLETED": AppState.SUCCEEDED,
    "CANCELLED": AppState.CANCELLED,
    "REVOKED": AppState.CANCELLED,
    "FAILED": AppState.FAILED,
    "TIMEOUT": AppState.FAILED,
    "NODE_FAIL": AppState.FAILED,
    "PREEMPTED": AppState.FAILED,
    "OUT_OF_MEMORY": AppState.FAILED,
    "BOOT_FAIL": AppState.FAILED,
    "DEADLINE": AppState.FAILED,
}
_ENDED = (AppState.SUCCEEDED, AppState.CANCELLED, AppState.FAILED)
_LIVE = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING", "REQUEUE_HOLD", "REQUEUED")
_CANCEL_S = 15.0  # for SLURM to do as it is told


@dataclass
class SlurmRequest:
    """What is submitted: the script, what its batch step starts, and the code that goes with it."""

    name: str
    script: Script
    steps: Steps
    code: Snapshot | None
    in_container: bool  # agents see the run directory and nothing beside it

    def __str__(self) -> str:
        return f"{self.script.of_run(self.steps.run_dir, self.name)}\n# submit/steps.json\n{self.steps.to_json()}\n"


class SlurmScheduler(RunScheduler):
    """Runs an AppDef as one SLURM job, and several as the tasks of arrays."""

    def __init__(self, session_name: str):
        super().__init__("slurm_fsdp", session_name)

    def _submit_dryrun(self, app: AppDef, cfg: dict[str, Any]) -> AppDryRunInfo[SlurmRequest]:
        return self.dryrun_many([app], [cfg])[0]

    def dryrun_many(self, apps: Sequence[AppDef], cfgs: Sequence[dict[str, Any]]) -> list[AppDryRunInfo[SlurmRequest]]:
        requests: list[AppDryRunInfo[SlurmRequest]] = []
        configs: list[JobConfig] = [cfg["config"] for cfg in cfgs]
        problems: list[Problem] = []
        take_once = cache(take)
        for app, config, cfg in zip(apps, configs, cfgs, strict=True):
            cluster = config.cluster
            assert isinstance(cluster, SlurmClusterConfig)
            run = RunDir(app.metadata[RUN_DIR_KEY])
            try:
                refusals.check(config, run)
                code = take_once(Path.cwd(), run.path.parent, cluster.snapshot_mb) if cluster.snapshot_mb else None
                site = probe(config, run)
            except BadInput as e:
                problems += e.problems
                continue
            request = SlurmRequest(
                app.name,
                script(app, config, cfg["plan"], site),
                steps(app, config, site),
                code,
                cluster.container is not None,
            )
            requests.append(AppDryRunInfo(request, str))
        if not problems:
            refusals.check_count(len(requests))
        for group in arrays.groups([r.request.script for r in requests]) if not problems else []:
            request = requests[group[0]].request
            text = request.script.of_run(request.steps.run_dir, request.name)
            try:
                refusals.ask_slurm(configs[group[0]], text, request.script.margin_s, len(group))
            except BadInput as e:
                problems += e.problems
        if problems:
            raise BadInput(problems)
        return requests

    def schedule(self, dryrun_info: AppDryRunInfo[SlurmRequest]) -> str:
        from fsdp_jobs.launchers.slurm.executor import submit

        request = dryrun_info.request
        run = _lay_out(request)
        if request.code is not None:
            request.code.write(run.path / "code")
        job_id = submit(run.submit / "slurm", request.script.of_run(request.steps.run_dir, request.name))
        remember("slurm", job_id, run)
        return job_id

    def schedule_many(
        self, requests: Sequence[AppDryRunInfo[SlurmRequest]], parallelism: int, folder: Path
    ) -> list[str]:
        jobs = [info.request for info in requests]
        with ThreadPoolExecutor(WRITES_AT_ONCE) as threads:
            runs = list(threads.map(_lay_out, jobs))
        place = arrays.new_folder(folder.resolve() / "slurm")
        written: dict[int, Path] = {}  # a snapshot -> where it is
        for job, run in zip(jobs, runs, strict=True):
            if job.code is not None and job.in_container:
                job.code.write(run.path / "code")
            elif job.code is not None:
                if id(job.code) not in written:
                    written[id(job.code)] = place / f"code-{len(written)}"
                    job.code.write(written[id(job.code)])
                link(run.path / "code", written[id(job.code)])
        ids = arrays.submit_arrays(place, folder.name, [job.script for job in jobs], runs, parallelism)
        for job_id, run in zip(ids, runs, strict=True):
            remember("slurm", job_id, run)
        return ids

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        return self.describe_many([app_id])[0]

    def describe_many(self, app_ids: Sequence[str]) -> list[DescribeAppResponse | None]:
        try:
            queue = client.my_jobs()
            return [_described(app_id, client.job(app_id, queue)) for app_id in app_ids]
        except client.SlurmError as e:
            told = app_ids[0] if len(app_ids) == 1 else f"{app_ids[0]} and {len(app_ids) - 1} more"
            raise BadInput([Problem(f"slurm_fsdp job {told}", str(e), "ask on a login node of its cluster")]) from e

    def list(self) -> list[ListAppResponse]:
        jobs = client.my_jobs()
        return [ListAppResponse(id, _STATES.get(job.state, AppState.RUNNING)) for id, job in jobs.items()]

    def _cancel_existing(self, app_id: str) -> None:
        self.cancel_many([app_id])

    def cancel_many(self, app_ids: Sequence[str]) -> None:
        queue = client.my_jobs(fresh=True)
        jobs = [queue[id] for id in app_ids if id in queue and queue[id].state in _LIVE]
        running = [job for job in jobs if job.state == "RUNNING"]
        if running:  # without its batch step nobody can ask the ranks to save
            client.call("scancel", "--signal=KILL", "--batch", *(job.for_signals for job in running))
            _wait_while([job.id for job in running], ("RUNNING",))
        if jobs:
            client.call("scancel", "--quiet", *(job.id for job in jobs))
            _wait_while([job.id for job in jobs], _LIVE)
        for job in jobs:
            if (run := run_of("slurm", job.id)) is not None:
                _record_cancel(run)

    def lines(self, app_id: str, role: str, node: int, follow: bool) -> Iterator[str]:
        run = run_of("slurm", app_id)
        if run is None:
            raise BadInput([Problem(f"slurm_fsdp job {app_id}", "was not submitted by you from here")])

        def running() -> bool:
            description = self.describe(app_id) if follow else None
            return description is not None and description.state not in _ENDED

        return log_lines(run, role, node, running)


def _lay_out(request: SlurmRequest) -> RunDir:
    """Write what the batch step reads."""
    run = RunDir(request.steps.run_dir)
    write_atomic(run.submit / "steps.json", request.steps.to_json())
    write_atomic(run.submit / "first_attempt", str(run.last_attempt() + 1))
    return run


def create_scheduler(session_name: str, **_kwargs: object) -> SlurmScheduler:
    return SlurmScheduler(session_name)


def _described(app_id: str, job: client.QueuedJob | None) -> DescribeAppResponse | None:
    """What SLURM and the run directory know of a job together."""
    run = run_of("slurm", app_id)
    if job is None and run is None:
        return None
    state = _STATES.get(job.state, AppState.RUNNING) if job is not None else AppState.FAILED
    message = _describe(job, state) if job is not None else "SLURM has forgotten the job"
    if state in _ENDED and run is not None:
        state, message = _last_word(run, job, state, message)
    return DescribeAppResponse(
        app_id=app_id,
        state=state,
        num_restarts=max(0, run.last_attempt() - _first_attempt(run)) if run is not None else -1,
        msg=message,
        roles_statuses=[RoleStatus("trainer", [])],
    )


def _wait_while(app_ids: Sequence[str], words: Collection[str]) -> None:
    """Until the controller has another word for each of these jobs."""
    deadline = time.monotonic() + _CANCEL_S
    while time.monotonic() < deadline:
        queue = client.my_jobs(fresh=True)
        if not any(id in queue and queue[id].state in words for id in app_ids):
            break
        time.sleep(0.2)


def _record_cancel(run: RunDir) -> None:
    """That a job was ended from outside, unless it has said how it ended."""
    attempt = run.last_attempt()
    verdict = Verdict.read(run, attempt) if attempt >= 0 else None
    if attempt < _first_attempt(run) or (verdict is not None and verdict.decision == "requeue"):
        reason = "cancelled while it waited in the queue"
        record_event(run, "attempt_ended", attempt, verdict="preempted", decision="stop", reason=reason)
    elif verdict is None:
        Verdict("preempted", "stop", "killed on request, without a checkpoint").close(run, attempt)


def _describe(job: client.QueuedJob, state: AppState) -> str:
    if state is AppState.PENDING:
        when = f"starts about {job.start.replace('T', ' ')}" if job.start not in ("", "N/A") else "start not known yet"
        why = f" ({job.reason})" if job.reason != "None" else ""  # SLURM has not looked at it yet
        return f"SLURM job {job.id} waits{why}; {when}"
    where = f" on {job.nodes}" if job.nodes else ""
    return f"SLURM job {job.id} is {job.state}{where}"


def _last_word(run: RunDir, job: client.QueuedJob | None, state: AppState, message: str) -> tuple[AppState, str]:
    """The run's own record of a job that has ended, where there is one; it knows more than an exit code."""
    if run.last_attempt() < _first_attempt(run):
        if state is AppState.FAILED and job is not None:
            message = f"SLURM job {job.id} {job.state} before its first line: do the nodes see {run.path}?"
        return state, message
    verdict = Verdict.read(run, run.last_attempt())
    if verdict is None or state is AppState.CANCELLED:
        return state, message
    if verdict.decision == "requeue":
        return AppState.FAILED, f"{message}, and not back in the queue; {verdict.reason}"
    return final_state(run), verdict.reason


def _first_attempt(run: RunDir) -> int:
    """Of the newest submission."""
    file = run.submit / "first_attempt"
    return int(file.read_text()) if file.exists() else 0
