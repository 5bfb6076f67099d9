"""The TorchX scheduler `docker_fsdp`: submit, describe, cancel, logs. An app's id is its run's and the time."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from torchx.schedulers.api import DescribeAppResponse, ListAppResponse, Scheduler, Stream, filter_regex
from torchx.specs import AppDef, AppDryRunInfo, AppState, RoleStatus

from fsdp_jobs.app import RUN_DIR_KEY
from fsdp_jobs.config import JobConfig
from fsdp_jobs.events import Verdict
from fsdp_jobs.launchers.detached import (
    KILLED,
    judge,
    kill_supervisor,
    remember,
    start_supervisor,
    state_dir,
    supervisor_of,
)
from fsdp_jobs.launchers.docker import containers, refusals
from fsdp_jobs.launchers.docker.containers import DockerRequest, Submission
from fsdp_jobs.launchers.local import visible_gpus
from fsdp_jobs.launchers.record import final_state, log_lines
from fsdp_jobs.planning.plan import Plan
from fsdp_jobs.run_dir import RunDir


class DockerScheduler(Scheduler[dict[str, Any]]):  # type: ignore[misc]
    """Runs an AppDef as containers on a network of their own."""

    def __init__(self, session_name: str):
        super().__init__("docker_fsdp", session_name)

    def _submit_dryrun(self, app: AppDef, cfg: dict[str, Any]) -> AppDryRunInfo[DockerRequest]:
        config: JobConfig = cfg["config"]
        plan: Plan = cfg["plan"]
        run = RunDir(app.metadata[RUN_DIR_KEY])
        api = containers.connect()
        daemon = api.info()
        gpus = visible_gpus() if plan.backend != "gloo" else []
        refusals.check(api, config, plan, run, daemon, gpus)
        return AppDryRunInfo(containers.translate(app, config, plan, daemon, gpus), str)

    def schedule(self, dryrun_info: AppDryRunInfo[DockerRequest]) -> str:
        request = dryrun_info.request
        run = RunDir(request.run_dir)
        if request.code is not None:
            request.code.write(run.path / "code")
        submission = containers.create(containers.connect(), request)
        remember("docker", submission.app_id, run)
        start_supervisor(run, "fsdp_jobs.launchers.docker.supervisor")
        return submission.app_id

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        link = state_dir("docker") / app_id
        if not link.is_dir():
            return None
        run = RunDir(link.resolve())
        attempt = run.last_attempt()
        verdict = Verdict.read(run, attempt)
        return DescribeAppResponse(
            app_id=app_id,
            state=AppState.RUNNING if _is_alive(run, app_id) else final_state(run),
            num_restarts=max(0, attempt),
            msg=verdict.reason if verdict is not None else "",
            roles_statuses=[RoleStatus("trainer", [])],
        )

    def list(self) -> list[ListAppResponse]:
        found = [(link.name, self.describe(link.name)) for link in sorted(state_dir("docker").glob("*"))]
        return [ListAppResponse(name, d.state) for name, d in found if d is not None]

    def _cancel_existing(self, app_id: str) -> None:
        """End a job at once, without a checkpoint, and remove what it had in Docker."""
        run = RunDir((state_dir("docker") / app_id).resolve())
        submission = Submission.read(run)
        if submission.app_id != app_id:
            return  # the run has been submitted again since
        if _is_alive(run, app_id):
            kill_supervisor(run)
            containers.remove(containers.connect(), str(run.path))
            judge(run, submission.first, KILLED)

    def log_iter(
        self,
        app_id: str,
        role_name: str,
        k: int = 0,
        regex: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        should_tail: bool = False,
        streams: Stream | None = None,
    ) -> Iterable[str]:
        """Lines of a node's ranks in the newest attempt, or the coordinator's own."""
        run = RunDir((state_dir("docker") / app_id).resolve())
        lines = log_lines(run, role_name, k, lambda: should_tail and _is_alive(run, app_id))
        return filter_regex(regex, lines) if regex else lines


def create_scheduler(session_name: str, **_kwargs: object) -> DockerScheduler:
    return DockerScheduler(session_name)


def _is_alive(run: RunDir, app_id: str) -> bool:
    """Whether this submission is the run's newest, and something of it runs."""
    if Submission.read(run).app_id != app_id:
        return False
    if supervisor_of(run) is not None:
        return True
    return any(c["State"]["Running"] for c in containers.containers_of(containers.connect(), str(run.path)))
