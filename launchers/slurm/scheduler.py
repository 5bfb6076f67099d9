"""The TorchX scheduler `slurm_fsdp`: submit, describe, cancel, logs. An app's id is SLURM's job id."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
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
from fsdp_jobs.launchers.slurm import client, submission, validate
from fsdp_jobs.launchers.slurm.script import Script, commands, script
from fsdp_jobs.launchers.slurm.site import probe
from fsdp_jobs.launchers.slurm.steps import Commands
from fsdp_jobs.run.directory import RunDir, write_atomic
from fsdp_jobs.run.events import record_event
from fsdp_jobs.run.verdict import Verdict
from fsdp_jobs.submit.snapshot import Snapshot, link, take

_CANCEL_S = 15.0  # for SLURM to do as it is told


@dataclass
class SlurmRequest:
    """What is submitted: the script, what its batch step starts, and the code that goes with it."""

    run: RunDir
    name: str
    script: Script
    commands: Commands
    code: Snapshot | None
    in_container: bool  # agents see the run directory and nothing beside it

    def __str__(self) -> str:
        return f"{self.text}\n# submit/steps.json\n{self.commands.to_json()}\n"

    @property
    def text(self) -> str:
        """Of the script for this job alone."""
        return self.script.of_run(str(self.run.path), self.name)


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
            if found := validate.check(config, run):
                problems += found
                continue
            try:
                code = take_once(Path.cwd(), run.path.parent, cluster.snapshot_mb) if cluster.snapshot_mb else None
                site = probe(config, run)
            except BadInput as e:
                problems += e.problems
                continue
            parts = script(app, config, cfg["plan"], site), commands(app, config, site)
            request = SlurmRequest(run, app.name, *parts, code, cluster.container is not None)
            requests.append(AppDryRunInfo(request, str))
        problems = problems or validate.check_count(len(requests))
        for group in submission.group_equal([r.request.script for r in requests]) if not problems else []:
            request = requests[group[0]].request
            config = configs[group[0]]
            problems += validate.check_with_slurm(config, request.text, request.script.margin_s, len(group))
        if problems:
            raise BadInput(problems)
        return requests

    def schedule(self, dryrun_info: AppDryRunInfo[SlurmRequest]) -> str:
        request = dryrun_info.request
        run = _lay_out(request)
        if request.code is not None:
            request.code.write(run.path / "code")
        job_id = submission.sbatch(run.submit / "slurm", request.text)
        remember("slurm", job_id, run)
        return job_id

    def schedule_many(
        self, requests: Sequence[AppDryRunInfo[SlurmRequest]], parallelism: int, folder: Path
    ) -> list[str]:
        jobs = [info.request for info in requests]
        with ThreadPoolExecutor(WRITES_AT_ONCE) as threads:
            runs = list(threads.map(_lay_out, jobs))
        place = submission.new_folder(folder.resolve() / "slurm")
        written: dict[int, Path] = {}  # a snapshot -> where it is
        for job, run in zip(jobs, runs, strict=True):
            if job.code is not None and job.in_container:
                job.code.write(run.path / "code")
            elif job.code is not None:
                if id(job.code) not in written:
                    written[id(job.code)] = place / f"code-{len(written)}"
                    job.code.write(written[id(job.code)])
                link(run.path / "code", written[id(job.code)])
        ids = submission.submit_arrays(place, folder.name, [job.script for job in jobs], runs, parallelism)
        for job_id, run in zip(ids, runs, strict=True):
            remember("slurm", job_id, run)
        return ids

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        return self.describe_many([app_id])[0]

    def describe_many(self, app_ids: Sequence[str]) -> list[DescribeAppResponse | None]:
        try:
            return [_described(app_id, job) for app_id, job in zip(app_ids, client.jobs(app_ids), strict=True)]
        except client.SlurmError as e:
            told = app_ids[0] if len(app_ids) == 1 else f"{app_ids[0]} and {len(app_ids) - 1} more"
            raise BadInput([Problem(f"slurm_fsdp job {told}", str(e), "ask on a login node of its cluster")]) from e

    def list(self) -> list[ListAppResponse]:
        return [ListAppResponse(job.id, job.state) for job in client.queue().values()]

    def _cancel_existing(self, app_id: str) -> None:
        self.cancel_many([app_id])

    def cancel_many(self, app_ids: Sequence[str]) -> None:
        queue = client.queue(fresh=True)
        jobs = [queue[id] for id in app_ids if id in queue and not queue[id].ended]
        running = [job for job in jobs if job.word == "RUNNING"]
        if running:  # without its batch step nobody can ask the ranks to save
            client.call("scancel", "--signal=KILL", "--batch", *(job.signal_id for job in running))
            _wait_while(running, lambda job: job.word == "RUNNING")
        if jobs:
            client.call("scancel", "--quiet", *(job.id for job in jobs))
            _wait_while(jobs, lambda job: not job.ended)
        for job in jobs:
            if (run := run_of("slurm", job.id)) is not None:
                _record_cancel(run)

    def lines(self, app_id: str, role: str, node: int, follow: bool) -> Iterator[str]:
        run = run_of("slurm", app_id)
        if run is None:
            raise BadInput([Problem(f"slurm_fsdp job {app_id}", "was not submitted by you from here")])

        def running() -> bool:
            description = self.describe(app_id) if follow else None
            return description is not None and description.state not in client.ENDED

        return log_lines(run, role, node, running)


def _lay_out(request: SlurmRequest) -> RunDir:
    """Write what the batch step reads."""
    run = request.run
    request.commands.write(run)
    write_atomic(run.submit / "first_attempt", str(run.last_attempt() + 1))
    return run


def create_scheduler(session_name: str, **_kwargs: object) -> SlurmScheduler:
    return SlurmScheduler(session_name)


def _described(app_id: str, job: client.QueuedJob | None) -> DescribeAppResponse | None:
    """What SLURM and the run directory know of a job together."""
    run = run_of("slurm", app_id)
    if job is None and run is None:
        return None
    state = job.state if job is not None else AppState.FAILED
    message = _describe(job, state) if job is not None else "SLURM has forgotten the job"
    if state in client.ENDED and run is not None:
        state, message = _last_word(run, job, state, message)
    return DescribeAppResponse(
        app_id=app_id,
        state=state,
        num_restarts=max(0, run.last_attempt() - _first_attempt(run)) if run is not None else -1,
        msg=message,
        roles_statuses=[RoleStatus("trainer", [])],
    )


def _wait_while(jobs: Sequence[client.QueuedJob], unchanged: Callable[[client.QueuedJob], bool]) -> None:
    """Wait until the controller has changed each of these jobs."""
    deadline = time.monotonic() + _CANCEL_S
    while time.monotonic() < deadline:
        queue = client.queue(fresh=True)
        if not any(job.id in queue and unchanged(queue[job.id]) for job in jobs):
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
    return f"SLURM job {job.id} is {job.word}{where}"


def _last_word(run: RunDir, job: client.QueuedJob | None, state: AppState, message: str) -> tuple[AppState, str]:
    """The run's own record of a job that has ended, where there is one; it knows more than an exit code."""
    if run.last_attempt() < _first_attempt(run):
        if state is AppState.FAILED and job is not None:
            message = f"SLURM job {job.id} {job.word} before its first line: do the nodes see {run.path}?"
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
