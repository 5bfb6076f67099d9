"""The one adapter that makes each launcher a TorchX scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from torchx.schedulers.api import DescribeAppResponse, ListAppResponse, Scheduler, Stream, filter_regex
from torchx.specs import AppDef, AppDryRunInfo, AppState, RoleStatus, make_app_handle

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.launchers.base import Launcher
from fsdp_jobs.run.state import State

_TORCHX_STATES = {
    State.QUEUED: AppState.PENDING,
    State.RUNNING: AppState.RUNNING,
    State.DONE: AppState.SUCCEEDED,
    State.STOPPED: AppState.CANCELLED,
    State.FAILED: AppState.FAILED,
    State.UNKNOWN: AppState.UNKNOWN,
    State.SILENT: AppState.UNKNOWN,
}


class _Listed(ListAppResponse):  # type: ignore[misc]
    """A line of `torchx list` that keeps its handle: TorchX's runner would replace it by one with its own session."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in vars(self):
            super().__setattr__(name, value)


class TorchxScheduler(Scheduler[dict[str, Any]]):  # type: ignore[misc]
    """A launcher as `torchx status`, `log`, `cancel` and `list` use it; `torchx run` is refused."""

    def __init__(self, launcher: Launcher, session_name: str):
        super().__init__(launcher.name, session_name)
        self.launcher = launcher

    def _submit_dryrun(self, app: AppDef, cfg: dict[str, Any]) -> AppDryRunInfo[Any]:
        cure = "fsdp-jobs submits jobs: fsdp-jobs help; torchx status, log, cancel and list know them"
        raise BadInput.at("torchx run", "writes no run directory, and a job has all that it needs in one", cure)

    def schedule(self, dryrun_info: AppDryRunInfo[Any]) -> str:
        raise NotImplementedError

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        (job,) = self.launcher.describe([app_id])
        if job is None:
            return None
        run, roles = self.launcher.run_of(app_id), job.roles or [RoleStatus("trainer", [])]
        restarts = 0 if run is None else max(0, run.last_attempt() - run.first_attempt())
        return DescribeAppResponse(app_id, _TORCHX_STATES[job.state], restarts, job.message, roles_statuses=roles)

    def list(self) -> list[ListAppResponse]:
        known, listed = self.launcher.known(), []
        for app_id, job in zip(known, self.launcher.describe(known), strict=True):
            if job is not None:
                handle = make_app_handle(self.backend, self.launcher.cluster_of(app_id), app_id)
                listed.append(_Listed(app_id, _TORCHX_STATES[job.state], handle))
        return listed

    def _cancel_existing(self, app_id: str) -> None:
        self.launcher.cancel([app_id])

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
        lines = self.launcher.logs(app_id, role_name, k, should_tail)
        return filter_regex(regex, lines) if regex else lines
