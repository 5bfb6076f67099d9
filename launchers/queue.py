"""The queue of a sweep on this machine: which jobs wait, and the process that starts them. No torch.

    python -m fsdp_jobs.launchers.queue FOLDER

A waiting job has `submit/queued.json` in its run directory. Only the holder of the queue's lock starts a job or takes
it from the queue, and then removes that file. The process outlives the terminal, and is not the jobs' parent.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from fsdp_jobs.config.errors import BadInput, JobFailed
from fsdp_jobs.launchers.base import launcher_of
from fsdp_jobs.launchers.supervisor import StorageErrors
from fsdp_jobs.run import log
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import lock, read_json, write_json
from fsdp_jobs.run.processes import record_process, recorded_process, start_detached
from fsdp_jobs.run.verdict import Verdict, judge

if TYPE_CHECKING:
    from fsdp_jobs.launchers.detached import DetachedLauncher

_POLL_S = 0.2

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class QueuedJob:
    """A job that was handed to a queue."""

    launcher: str
    run_dir: str
    app_id: str

    @property
    def run(self) -> RunDir:
        return RunDir(self.run_dir)


class Queue:
    """The jobs of one sweep, in the order in which they are started."""

    def __init__(self, folder: Path):
        """`folder` is the sweep's."""
        self.folder, self.process_file = folder, folder / "queue-process.json"

    def read(self) -> tuple[int, list[QueuedJob]]:
        """Return how many jobs run at once, and all jobs, including started ones."""
        content = read_json(self.folder / "queue.json")
        return content.get("parallelism", 1), [QueuedJob(**job) for job in content.get("jobs", [])]

    def add(self, jobs: Sequence[QueuedJob], parallelism: int) -> None:
        """Append jobs to those that wait, and start the process that starts them."""
        with self.locked():
            again = {job.run.path.resolve() for job in jobs}
            known = [job for job in self.read()[1] if job.run.path.resolve() not in again] + list(jobs)
            content = {"parallelism": parallelism, "jobs": [asdict(job) for job in known]}
            write_json(self.folder / "queue.json", content)
            for job in jobs:  # after the list, because jobs of the list that have a marker are started
                write_json(_marker(job.run), {"app_id": job.app_id, "folder": str(self.folder)})
            self.start()

    def start(self) -> None:
        """Start the process that starts the jobs, unless it is running."""
        start_detached("fsdp_jobs.launchers.queue", self.folder, self.process_file, self.folder / "queue.log")

    def why_waiting(self) -> str | None:
        """Return what a job waits for; None when the process that would start it has ended."""
        if recorded_process(self.process_file) is None:
            return None
        parallelism, _ = self.read()
        if parallelism == 1:
            return f"waits for its turn: sweep {self.folder.name} runs one job at a time here"
        return f"waits until fewer than {parallelism} jobs of sweep {self.folder.name} run"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude every other process from changing this queue."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "queue.lock").open("w") as file:
            lock(file)
            yield


def queue_of(run: RunDir, app_id: str) -> Queue | None:
    """Return the queue in which a job waits."""
    marker = read_json(_marker(run))
    return Queue(Path(marker["folder"])) if marker.get("app_id") == app_id else None


def withdraw(run: RunDir, app_id: str) -> bool:
    """Take a job from its queue; False when it does not wait, or has just been started."""
    queue = queue_of(run, app_id)
    if queue is None:
        return False
    with queue.locked():
        if queue_of(run, app_id) is None:
            return False
        leave(run)
        return True


def leave(run: RunDir) -> None:
    """Record that a run does not wait."""
    _marker(run).unlink(missing_ok=True)


def _marker(run: RunDir) -> Path:
    return run.submit / "queued.json"


def serve(folder: Path) -> None:
    """Start jobs as others end, until none waits. After an error of the storage it tries again."""
    queue, storage_errors = Queue(folder), StorageErrors()
    ended: set[str] = set()
    while True:
        with storage_errors:
            if not _start_next(queue, ended):
                return
        time.sleep(_POLL_S)


def _start_next(queue: Queue, ended: set[str]) -> bool:
    """Start the jobs that may run now; False if none waits. `ended` collects the ids of jobs that have ended."""
    with queue.locked():
        parallelism, jobs = queue.read()
        queued = [job for job in jobs if queue_of(job.run, job.app_id) is not None]
        if not queued:
            queue.process_file.unlink(missing_ok=True)
            return False
        started = [job for job in jobs if job not in queued and job.app_id not in ended]
        running = [job for job in started if _may_run(job)]
        ended |= {job.app_id for job in started if job not in running}
        for job in queued:
            if len(running) < parallelism:
                _start(job, running)
                running.append(job)
    return True


def _may_run(job: QueuedJob) -> bool:
    try:
        return _launcher(job).is_alive(job.run)
    except (BadInput, JobFailed):  # Docker's daemon does not answer now, and containers outlive it
        return True


def _start(job: QueuedJob, running: Sequence[QueuedJob]) -> None:
    """Start a job, unless an earlier queue process started it and was killed before it removed the marker."""
    run, launcher = job.run, _launcher(job)
    try:
        if not launcher.is_alive(run):
            launcher.choose_gpus(run, [other.run for other in running])
            launcher.start(run)
    except Exception as e:  # the machine has changed since submission
        logger.exception("%s could not be started", run.path)
        judge(run, Verdict("infrastructure", "stop", f"could not be started: {e}"))
    leave(run)


def _launcher(job: QueuedJob) -> DetachedLauncher:
    return cast("DetachedLauncher", launcher_of(job.launcher))


if __name__ == "__main__":
    log.configure()
    record_process(Queue(Path(sys.argv[1])).process_file)
    serve(Path(sys.argv[1]))
