"""The detached process that stands in for a cluster's scheduler on this machine: started, found, ended. No torch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from torchx.schedulers.api import DescribeAppResponse, ListAppResponse
from torchx.specs import AppDryRunInfo, AppState, RoleStatus

from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.launchers.base import RunScheduler, final_state, known_runs, log_lines, remember, run_of
from fsdp_jobs.launchers.waiting import Entry, Pool, forget, waiting_of, withdraw
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.processes import recorded_process, start_detached
from fsdp_jobs.run.verdict import Verdict

_STARTS_S = 60.0  # most that a job takes from the end of its wait to its supervisor


class DetachedScheduler(RunScheduler):
    """A scheduler of this machine: what is known of an app is in its run directory, and whether something runs."""

    def __init__(self, launcher: str, session_name: str):
        super().__init__(f"{launcher}_fsdp", session_name)
        self.launcher = launcher

    def stage(self, request: Any, app_id: str) -> None:
        """Write what `start` needs into the run directory."""
        raise NotImplementedError

    def gpus_of(self, run: RunDir) -> list[str]:
        """Ids of the GPUs that what was staged last will use, or uses."""
        raise NotImplementedError

    def move(self, run: RunDir, gpus: Mapping[str, str]) -> None:
        """Let what was staged use other GPUs: id before -> id now."""
        raise NotImplementedError

    def start(self, run: RunDir, app_id: str) -> None:
        """Start what was staged."""
        raise NotImplementedError

    def kill(self, run: RunDir, app_id: str) -> None:
        """End an app that was started, at once and without a checkpoint."""
        raise NotImplementedError

    def schedule(self, dryrun_info: AppDryRunInfo[Any]) -> str:
        run = RunDir(dryrun_info.request.run_dir)
        app_id = _new_app(run)
        self.stage(dryrun_info.request, app_id)
        forget(run)
        self.start(run, app_id)
        remember(self.launcher, app_id, run)
        return app_id

    def schedule_many(self, requests: Sequence[AppDryRunInfo[Any]], parallelism: int, folder: Path) -> list[str]:
        """Hand jobs to the sweep's pool, which starts so many at once; with 0 one, for all share the machine."""
        entries: list[Entry] = []
        for request in requests:
            run = RunDir(Path(request.request.run_dir).resolve())
            entries.append(Entry(self.backend, str(run.path), _new_app(run)))
            self.stage(request.request, entries[-1].app_id)
            remember(self.launcher, entries[-1].app_id, run)
        pool = Pool.read(folder.resolve())
        with pool.locked():
            pool = Pool.read(pool.folder)
            pool.enter(entries, parallelism or 1)
            if recorded_process(pool.process_file) is None:
                start_detached("fsdp_jobs.launchers.queue", pool.folder, pool.process_file, pool.folder / "pool.log")
        return [entry.app_id for entry in entries]

    def is_alive(self, run: RunDir, app_id: str) -> bool:
        """Whether something of this app runs."""
        return supervisor_of(run) is not None

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        run = run_of(self.launcher, app_id)
        if run is None:
            return None
        attempt = run.last_attempt()
        if (waiting := waiting_of(run, app_id)) is not None:
            why = waiting.why()
            state, message = (AppState.FAILED, waiting.lost) if why is None else (AppState.PENDING, why)
        else:
            verdict = Verdict.read(run, attempt)
            state = AppState.RUNNING if self.is_alive(run, app_id) else final_state(run)
            message = verdict.reason if verdict is not None else ""
        return DescribeAppResponse(
            app_id=app_id,
            state=state,
            num_restarts=max(0, attempt),
            msg=message,
            roles_statuses=[RoleStatus("trainer", [])],
        )

    def _cancel_existing(self, app_id: str) -> None:
        """Stop at once, without a checkpoint."""
        run = self.submitted(app_id)
        if (waited := withdraw(run, app_id)) is not None:
            WITHDRAWN.close(run, waited.first)
            return
        deadline = time.monotonic() + _STARTS_S
        while waiting_of(run, app_id) is not None and time.monotonic() < deadline:
            time.sleep(0.1)
        self.kill(run, app_id)

    def list(self) -> list[ListAppResponse]:
        found = [(link.name, self.describe(link.name)) for link in sorted(known_runs(self.launcher).glob("*"))]
        return [ListAppResponse(name, d.state) for name, d in found if d is not None]

    def lines(self, app_id: str, role: str, node: int, follow: bool) -> Iterator[str]:
        run = self.submitted(app_id)
        return log_lines(run, role, node, lambda: follow and self.is_alive(run, app_id))

    def submitted(self, app_id: str) -> RunDir:
        """The run directory of an app.

        Raises:
            BadInput: there is no such app here.
        """
        run = run_of(self.launcher, app_id)
        if run is None:
            raise BadInput([Problem(f"{self.backend} app {app_id}", "was not submitted from this machine")])
        return run


def _new_app(run: RunDir) -> str:
    return f"{run.name}-{time.strftime('%y%m%d%H%M%S')}-{os.getpid()}"


def start_supervisor(run: RunDir, module: str) -> None:
    """Run `python -m MODULE RUN_DIR`, which outlives the terminal it is started from."""
    start_detached(module, run.path, run.submit / "supervisor.json", run.submit / "supervisor.log")


def supervisor_of(run: RunDir) -> psutil.Process | None:
    """The live supervisor of a run."""
    return recorded_process(run.submit / "supervisor.json")


def kill_supervisor(run: RunDir) -> bool:
    """End a run's supervisor and all it has started; False when there was none."""
    supervisor = supervisor_of(run)
    if supervisor is None:
        return False
    family = [supervisor, *supervisor.children(recursive=True)]
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=10)
    return True


def judge(run: RunDir, first: int, verdict: Verdict) -> None:
    """End a job whose coordinator could not, in its newest attempt, at least `first`; a verdict that did so stays."""
    attempt = max(run.last_attempt(), first)
    before = Verdict.read(run, attempt)
    if before is None or before.decision == "requeue":  # what was to come next does not
        verdict.close(run, attempt)


KILLED = Verdict("preempted", "stop", "killed on request, without a checkpoint")
WITHDRAWN = Verdict("preempted", "stop", "cancelled while it waited")
