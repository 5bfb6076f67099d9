"""Launchers of this machine: a detached process, the supervisor, stands in for a cluster's scheduler. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from fsdp_jobs.launchers.base import Description, Launcher
from fsdp_jobs.launchers.queue import Queue, QueuedJob, leave, queue_of, withdraw
from fsdp_jobs.launchers.supervisor import record_file, staged, staged_file
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import as_written, write_json
from fsdp_jobs.run.processes import kill_families, recorded_process, start_detached, visible_gpus
from fsdp_jobs.run.state import State
from fsdp_jobs.run.verdict import KILLED, WITHDRAWN, Verdict


class DetachedLauncher(Launcher):
    """A launcher of this machine. An app's id is its run's name and the submission's id.

    A request has `run_dir`, and `gpus`: the ids of the GPUs that its nodes share. It is staged in the run directory
    for `start`, and for the queue, which may choose other GPUs.
    """

    supervisor: str  # module of the supervisor's program

    def stage(self, request: Any) -> None:
        """Write a request into its run directory."""
        write_json(staged_file(RunDir(request.run_dir)), vars(request))

    def choose_gpus(self, run: RunDir, others: Sequence[RunDir]) -> None:
        """Give a job that has not started those GPUs of this machine that the fewest of `others` use."""
        request = staged(run)
        if gpus := request["gpus"]:
            used = Counter(gpu for other in others for gpu in staged(other)["gpus"])
            free = sorted(visible_gpus(), key=lambda gpu: used[gpu])[: len(gpus)]
            request["gpus"] = [*free, *gpus[len(free) :]]
            write_json(staged_file(run), request)

    def start(self, run: RunDir) -> None:
        """Start a staged job."""
        start_detached(self.supervisor, run.path, record_file(run), run.submit / "supervisor.log")

    def is_alive(self, run: RunDir) -> bool:
        """Whether a process of a run's newest job is alive."""
        return supervisor_of(run) is not None

    def kill(self, run: RunDir) -> bool:
        """End all processes of a run's newest job at once; False when it has none."""
        supervisor = supervisor_of(run)
        if supervisor is None:
            return False
        family = [supervisor, *supervisor.children(recursive=True)]
        kill_families([supervisor.pid])
        psutil.wait_procs(family, timeout=10)
        return True

    def revive(self, run: RunDir) -> bool:
        """Continue a job that has lost its supervisor, if possible; return False if none of it was ever started."""
        return run.last_attempt() >= run.first_attempt()

    def submit(self, requests: Sequence[Any], parallelism: int, folder: Path | None) -> list[str]:
        """Start a job. Jobs of a sweep share the machine, so a queue starts them, by default one at a time."""
        jobs = []
        for request in requests:
            run = RunDir(request.run_dir)
            job = QueuedJob(self.name, request.run_dir, app_id_of(run))
            jobs.append(job)
            self.stage(request)
            self.remember(job.app_id, run)
            if folder is None:
                leave(run)
                self.start(run)
        if folder is not None:
            Queue(as_written(folder)).add(jobs, parallelism or 1)
        return [job.app_id for job in jobs]

    def find_one(self, run: RunDir) -> str | None:
        app_id = app_id_of(run)
        if (queue := queue_of(run, app_id)) is not None:
            queue.start()
            return app_id
        has_job = supervisor_of(run) is not None or Verdict.final(run) is not None
        return app_id if has_job or self.revive(run) else None

    def describe(self, app_ids: Sequence[str]) -> list[Description | None]:
        return [self._describe(app_id) for app_id in app_ids]

    def _describe(self, app_id: str) -> Description | None:
        run = self.run_of(app_id)
        if run is None:
            return None
        if (queue := queue_of(run, app_id)) is not None:
            why = queue.why_waiting()
            lost = f"was never started, and its queue has ended: fsdp-jobs sweep resume {queue.folder.name}"
            return Description(State.FAILED, lost) if why is None else Description(State.QUEUED, why)
        return Description.of_run(run, app_id == app_id_of(run) and self.is_alive(run))

    def end(self, app_id: str) -> Verdict | None:
        run = self.run_of(app_id)
        if run is None or app_id != app_id_of(run):
            return None
        if withdraw(run, app_id):
            return WITHDRAWN
        return KILLED if self.kill(run) else None


def app_id_of(run: RunDir) -> str:
    """Return the app id of a run's newest job."""
    return f"{run.name}-{run.submission}"


def supervisor_of(run: RunDir) -> psutil.Process | None:
    """Return the live supervisor of a run."""
    return recorded_process(record_file(run))
