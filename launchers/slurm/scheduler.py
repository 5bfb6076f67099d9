"""The TorchX scheduler `slurm_fsdp`: submit, describe, cancel, logs. An app's id is SLURM's job id."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fsdp_jobs.config.clusters import SlurmClusterConfig
from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.base import (
    WRITES_AT_ONCE,
    Description,
    Finding,
    Job,
    Launcher,
    TorchxScheduler,
    log_lines,
    remember,
    run_of,
)
from fsdp_jobs.launchers.slurm import client, submission, validate
from fsdp_jobs.launchers.slurm.doctor import examine
from fsdp_jobs.launchers.slurm.script import Script, commands, script
from fsdp_jobs.launchers.slurm.site import cluster_topology, probe
from fsdp_jobs.launchers.slurm.steps import Commands
from fsdp_jobs.launchers.state import State
from fsdp_jobs.plan.topology import Topology
from fsdp_jobs.run.directory import RunDir
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


class SlurmLauncher(Launcher):
    """Runs a job as one SLURM job, and a sweep's as the tasks of arrays."""

    name = "slurm_fsdp"

    def topology(self, config: JobConfig) -> Topology | None:
        return cluster_topology(config)

    def examine(self, config: JobConfig) -> Iterator[Finding]:
        return examine(config)

    def prepare(self, jobs: Sequence[Job]) -> list[SlurmRequest]:
        requests: list[SlurmRequest] = []
        problems: list[Problem] = []
        take_once = cache(take)
        for job in jobs:
            config, run, app = job.config, job.run, job.app
            cluster = config.cluster
            assert isinstance(cluster, SlurmClusterConfig)
            if found := validate.check(config, run):
                problems += found
                continue
            try:
                code = take_once(Path.cwd(), run.path.parent, cluster.snapshot_mb) if cluster.snapshot_mb else None
                site = probe(config, run)
            except BadInput as e:
                problems += e.problems
                continue
            parts = script(app, config, job.plan, site), commands(app, config, site)
            requests.append(SlurmRequest(run, app.name, *parts, code, cluster.container is not None))
        problems = problems or validate.check_count(len(requests))
        for group in submission.group_equal([r.script for r in requests]) if not problems else []:
            first, config = requests[group[0]], jobs[group[0]].config
            problems += validate.check_with_slurm(config, first.text, first.script.margin_s, len(group))
        if problems:
            raise BadInput(problems)
        return requests

    def submit(self, requests: Sequence[SlurmRequest], parallelism: int, folder: Path | None) -> list[str]:
        with ThreadPoolExecutor(WRITES_AT_ONCE) as threads:
            list(threads.map(lambda request: request.commands.write(request.run), requests))
        if folder is None:
            ids = [_submit_one(request) for request in requests]
        else:
            place = submission.new_folder(folder.resolve() / "slurm")
            _write_code(place, requests)
            scripts, runs = [r.script for r in requests], [r.run for r in requests]
            ids = submission.submit_arrays(place, folder.name, scripts, runs, parallelism)
        for job_id, request in zip(ids, requests, strict=True):
            remember(self.name, job_id, request.run)
        return ids

    def describe(self, app_ids: Sequence[str]) -> list[Description | None]:
        try:
            return [_described(app_id, job) for app_id, job in zip(app_ids, client.jobs(app_ids), strict=True)]
        except client.SlurmError as e:
            named = app_ids[0] if len(app_ids) == 1 else f"{app_ids[0]} and {len(app_ids) - 1} more"
            raise BadInput([Problem(f"slurm_fsdp job {named}", str(e), "ask on a login node of its cluster")]) from e

    def known(self) -> list[str]:
        return list(client.queue())

    def cancel(self, app_ids: Sequence[str]) -> None:
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

    def logs(self, app_id: str, role: str, node: int, follow: bool) -> Iterator[str]:
        run = run_of("slurm", app_id)
        if run is None:
            raise BadInput([Problem(f"slurm_fsdp job {app_id}", "was not submitted by you from here")])

        def running() -> bool:
            (job,) = self.describe([app_id]) if follow else (None,)
            return job is not None and job.state.is_active

        return log_lines(run, role, node, running)


def _submit_one(request: SlurmRequest) -> str:
    if request.code is not None:
        request.code.write(request.run.path / "code")
    return submission.sbatch(request.run.submit / "slurm", request.text)


def _write_code(place: Path, requests: Sequence[SlurmRequest]) -> None:
    """Copy each snapshot once and link the runs' code to it; a container sees its run directory alone."""
    written: dict[int, Path] = {}  # a snapshot -> where it is
    for request in requests:
        if request.code is not None and request.in_container:
            request.code.write(request.run.path / "code")
        elif request.code is not None:
            if id(request.code) not in written:
                written[id(request.code)] = place / f"code-{len(written)}"
                request.code.write(written[id(request.code)])
            link(request.run.path / "code", written[id(request.code)])


def create_scheduler(session_name: str, **_kwargs: object) -> TorchxScheduler:
    return TorchxScheduler(SlurmLauncher(), session_name)


def _described(app_id: str, job: client.QueuedJob | None) -> Description | None:
    """What SLURM and the run directory know of a job together."""
    run = run_of("slurm", app_id)
    if job is None and run is None:
        return None
    state = job.state if job is not None else State.FAILED
    message = _describe(job, state) if job is not None else "SLURM has forgotten the job"
    if not state.is_active and run is not None:
        state, message = _last_word(run, job, state, message)
    restarts = max(0, run.last_attempt() - run.first_attempt()) if run is not None else 0
    return Description(app_id, state, message, restarts)


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
    if attempt < run.first_attempt() or (verdict is not None and verdict.decision == "requeue"):
        reason = "cancelled while it waited in the queue"
        record_event(run, "attempt_ended", attempt, verdict="preempted", decision="stop", reason=reason)
    elif verdict is None:
        Verdict("preempted", "stop", "killed on request, without a checkpoint").close(run, attempt)


def _describe(job: client.QueuedJob, state: State) -> str:
    if state is State.QUEUED:
        when = f"starts about {job.start.replace('T', ' ')}" if job.start not in ("", "N/A") else "start not known yet"
        why = f" ({job.reason})" if job.reason != "None" else ""  # SLURM has not looked at it yet
        return f"SLURM job {job.id} waits{why}; {when}"
    where = f" on {job.nodes}" if job.nodes else ""
    return f"SLURM job {job.id} is {job.word}{where}"


def _last_word(run: RunDir, job: client.QueuedJob | None, state: State, message: str) -> tuple[State, str]:
    """The run's own record of a job that has ended, where there is one; it knows more than an exit code."""
    if run.last_attempt() < run.first_attempt():
        if state is State.FAILED and job is not None:
            message = f"SLURM job {job.id} {job.word} before its first line: do the nodes see {run.path}?"
        return state, message
    verdict = Verdict.read(run, run.last_attempt())
    if verdict is None or state is State.STOPPED:
        return state, message
    if verdict.decision == "requeue":
        return State.FAILED, f"{message}, and not back in the queue; {verdict.reason}"
    return State.from_verdict(verdict), verdict.reason
