"""The detached process that stands in for a cluster's scheduler on this machine: started, found, ended. No torch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.launchers.base import Description, Launcher, log_lines, remember, run_of
from fsdp_jobs.launchers.state import State
from fsdp_jobs.launchers.waiting import Entry, Pool, forget, waiting_of, withdraw
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.processes import recorded_process, start_detached
from fsdp_jobs.run.verdict import Verdict

_STARTS_S = 60.0  # most that a job takes from the end of its wait to its supervisor
_CANCELS_AT_ONCE = 16


class DetachedLauncher(Launcher):
    """A launcher of this machine: what is known of an app is in its run directory, and whether a process runs."""

    def stage(self, request: Any, app_id: str) -> None:
        """Write what `start` needs into the run directory."""
        raise NotImplementedError

    def gpus_of(self, run: RunDir) -> list[str]:
        """Return ids of the GPUs that what was staged last uses, or will use."""
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

    def submit(self, requests: Sequence[Any], parallelism: int, folder: Path | None) -> list[str]:
        """Start jobs; those of a sweep are queued, one at a time for `parallelism` 0: all share the machine."""
        entries = []
        for request in requests:
            run = RunDir(Path(request.run_dir).resolve())
            entries.append(Entry(self.name, str(run.path), _new_app(run)))
            self.stage(request, entries[-1].app_id)
            forget(run)
            remember(self.name, entries[-1].app_id, run)
        if folder is None:
            for entry in entries:
                self.start(RunDir(entry.run_dir), entry.app_id)
            return [entry.app_id for entry in entries]
        pool = Pool.read(folder.resolve())
        with pool.locked():
            pool = Pool.read(pool.folder)
            pool.enter(entries, parallelism or 1)
            if recorded_process(pool.process_file) is None:
                start_detached("fsdp_jobs.launchers.queue", pool.folder, pool.process_file, pool.folder / "pool.log")
        return [entry.app_id for entry in entries]

    def is_alive(self, run: RunDir, app_id: str) -> bool:
        """Whether a process of this app runs."""
        return supervisor_of(run) is not None

    def describe(self, app_ids: Sequence[str]) -> list[Description | None]:
        return [self._describe(app_id) for app_id in app_ids]

    def _describe(self, app_id: str) -> Description | None:
        run = run_of(self.name, app_id)
        if run is None:
            return None
        attempt = run.last_attempt()
        if (waiting := waiting_of(run, app_id)) is not None:
            why = waiting.why()
            state, message = (State.FAILED, waiting.lost) if why is None else (State.QUEUED, why)
        else:
            verdict = Verdict.read(run, attempt)
            state = State.RUNNING if self.is_alive(run, app_id) else State.from_verdict(verdict)
            message = verdict.reason if verdict is not None else ""
        return Description(app_id, state, message, max(0, attempt - run.first_attempt()))

    def cancel(self, app_ids: Sequence[str]) -> None:
        with ThreadPoolExecutor(_CANCELS_AT_ONCE) as threads:
            list(threads.map(self._cancel, app_ids))

    def _cancel(self, app_id: str) -> None:
        run = run_of(self.name, app_id)
        if run is None:
            return
        if withdraw(run, app_id) is not None:
            WITHDRAWN.close(run, run.first_attempt())
            return
        deadline = time.monotonic() + _STARTS_S
        while waiting_of(run, app_id) is not None and time.monotonic() < deadline:
            time.sleep(0.1)
        self.kill(run, app_id)

    def logs(self, app_id: str, role: str, node: int, follow: bool) -> Iterator[str]:
        run = run_of(self.name, app_id)
        if run is None:
            raise BadInput([Problem(f"{self.name} app {app_id}", "was not submitted from this machine")])
        return log_lines(run, role, node, lambda: follow and self.is_alive(run, app_id))


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
