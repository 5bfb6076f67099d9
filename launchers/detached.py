"""Launchers of this machine: a detached process, the supervisor, stands in for a cluster's scheduler. No torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.launchers.base import Description, QueueableLauncher, log_lines, remember, run_of
from fsdp_jobs.launchers.queue import Queue, QueuedJob, leave, queue_of, withdraw
from fsdp_jobs.launchers.state import State
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.processes import recorded_process, start_detached
from fsdp_jobs.run.verdict import KILLED, WITHDRAWN, Verdict, judge

_CANCELS_AT_ONCE = 16


class DetachedLauncher(QueueableLauncher):
    """A launcher of this machine. An app's id is its run's name and the submission's id."""

    @abstractmethod
    def stage(self, request: Any, app_id: str) -> None:
        """Write what `start` needs into the run directory."""

    @abstractmethod
    def kill(self, run: RunDir, app_id: str) -> bool:
        """End the processes of an app at once; False when it has none."""

    def is_alive(self, run: RunDir, app_id: str) -> bool:
        return supervisor_of(run) is not None

    def submit(self, requests: Sequence[Any], parallelism: int, folder: Path | None) -> list[str]:
        """Start jobs; those of a sweep wait in its queue, by default for one at a time: all share the machine."""
        jobs = []
        for request in requests:
            run = RunDir(Path(request.run_dir).resolve())
            jobs.append(QueuedJob(self.name, str(run.path), _app_id(run)))
            self.stage(request, jobs[-1].app_id)
            remember(self.name, jobs[-1].app_id, run)
        if folder is not None:
            Queue(folder.resolve()).add(jobs, parallelism or 1)
        for job in jobs if folder is None else ():
            leave(job.run)
            self.start(job.run, job.app_id)
        return [job.app_id for job in jobs]

    def find(self, run: RunDir) -> str | None:
        app_id = _app_id(run)
        if (queue := queue_of(run, app_id)) is not None:
            queue.start()
            return app_id
        return app_id if run.last_attempt() >= run.first_attempt() or self.is_alive(run, app_id) else None

    def describe(self, app_ids: Sequence[str]) -> list[Description | None]:
        return [self._describe(app_id) for app_id in app_ids]

    def _describe(self, app_id: str) -> Description | None:
        run = run_of(self.name, app_id)
        if run is None:
            return None
        if (queue := queue_of(run, app_id)) is not None:
            why = queue.why_waiting()
            lost = f"was never started, and its queue has ended: fsdp-jobs sweep resume {queue.folder.name}"
            return Description(app_id, State.FAILED, lost) if why is None else Description(app_id, State.QUEUED, why)
        attempt = run.last_attempt()
        verdict = Verdict.read(run, attempt)
        state = State.RUNNING if self.is_alive(run, app_id) else State.from_verdict(verdict)
        message = verdict.reason if verdict is not None else ""
        return Description(app_id, state, message, restarts=max(0, attempt - run.first_attempt()))

    def cancel(self, app_ids: Sequence[str]) -> None:
        with ThreadPoolExecutor(_CANCELS_AT_ONCE) as threads:
            list(threads.map(self._cancel, app_ids))

    def _cancel(self, app_id: str) -> None:
        run = run_of(self.name, app_id)
        if run is None:
            return
        if withdraw(run, app_id):
            judge(run, WITHDRAWN)
        elif self.kill(run, app_id):
            judge(run, KILLED)

    def logs(self, app_id: str, role: str, node: int, follow: bool) -> Iterator[str]:
        run = run_of(self.name, app_id)
        if run is None:
            raise BadInput([Problem(f"{self.name} app {app_id}", "was not submitted from this machine")])
        return log_lines(run, role, node, lambda: follow and self.is_alive(run, app_id))


def _app_id(run: RunDir) -> str:
    return f"{run.name}-{run.submission}"


def supervisor_record(run: RunDir) -> Path:
    """Return the file that says which process is the run's supervisor."""
    return run.submit / "supervisor.json"


def start_supervisor(run: RunDir, module: str) -> None:
    """Run `python -m MODULE RUN_DIR`, which outlives the terminal it is started from."""
    start_detached(module, run.path, supervisor_record(run), run.submit / "supervisor.log")


def supervisor_of(run: RunDir) -> psutil.Process | None:
    """Return the live supervisor of a run."""
    return recorded_process(supervisor_record(run))


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
