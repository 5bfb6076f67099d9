"""Jobs of a sweep that wait on this machine for one of its places: who waits, and who starts them. No torch.

A sweep's folder holds `pool.json`, all jobs that were handed to its pool, and `pool-process.json`, the process
that starts them (`pool.py`). A job that waits has `submit/waiting.json` in its run directory, which the pool
renames when the job's turn comes: whoever moves or removes that file decides, the pool or a `cancel`.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fsdp_jobs.run.directory import RunDir, write_atomic
from fsdp_jobs.run.processes import recorded_process


@dataclass
class Entry:
    """A job that was handed to a pool."""

    launcher: str  # TorchX scheduler
    run_dir: str
    app_id: str


@dataclass
class Pool:
    """A sweep's jobs on this machine, in the order they are started in."""

    folder: Path  # of the sweep
    places: int = 1  # jobs at once
    jobs: list[Entry] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Pool:
        file = folder / "pool.json"
        if not file.exists():
            return cls(folder)
        content = json.loads(file.read_text())
        return cls(folder, content["places"], [Entry(**entry) for entry in content["jobs"]])

    def write(self) -> None:
        content = {"places": self.places, "jobs": [asdict(entry) for entry in self.jobs]}
        write_atomic(self.folder / "pool.json", json.dumps(content, indent=1))

    def enter(self, entries: Sequence[Entry], places: int) -> None:
        """Let jobs wait behind those that do already. Call it under `locked`."""
        for entry in entries:
            run = RunDir(entry.run_dir)
            waiting = Waiting(entry.app_id, str(self.folder.resolve()))
            write_atomic(_waits(run), json.dumps(asdict(waiting)))
        self.places = places
        again = {entry.run_dir for entry in entries}
        self.jobs = [entry for entry in self.jobs if entry.run_dir not in again] + list(entries)
        self.write()

    @property
    def process_file(self) -> Path:
        return self.folder / "pool-process.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone with this pool's files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "pool.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


@dataclass(frozen=True)
class Waiting:
    """What a run directory says of a job that waits for its place."""

    app_id: str
    folder: str  # of the sweep

    def why(self) -> str | None:
        """What it waits for; None when there is nobody who would start it."""
        folder = Path(self.folder)
        if recorded_process(folder / "pool-process.json") is None:
            return None
        places = Pool.read(folder).places
        if places == 1:
            return f"waits for its turn: sweep {folder.name} runs one job at a time here"
        return f"waits for one of {places} places of sweep {folder.name}"

    @property
    def lost(self) -> str:
        name = Path(self.folder).name
        return f"was never started, and the process that would start it has gone: fsdp-jobs sweep resume {name}"


def waiting_of(run: RunDir, app_id: str) -> Waiting | None:
    """What a job waits for, which was handed to a pool and does not run yet."""
    for file in (_waits(run), _starts(run)):
        try:
            found = Waiting(**json.loads(file.read_text()))
        except FileNotFoundError:
            continue
        return found if found.app_id == app_id else None
    return None


def take(run: RunDir, app_id: str) -> bool:
    """Claim a job that waits, to start it; False when it no longer waits."""
    found = waiting_of(run, app_id)
    if found is None:
        return False
    try:
        _waits(run).rename(_starts(run))
    except FileNotFoundError:
        return False
    return True


def started(run: RunDir) -> None:
    """Say that a claimed job has been started."""
    _starts(run).unlink(missing_ok=True)


def withdraw(run: RunDir, app_id: str) -> Waiting | None:
    """Take a job that waits out of the queue; None when it no longer waits."""
    found = waiting_of(run, app_id)
    if found is None:
        return None
    try:
        _waits(run).unlink()
    except FileNotFoundError:
        return None
    return found


def forget(run: RunDir) -> None:
    """Let no pool start a run, which is started by other means."""
    _waits(run).unlink(missing_ok=True)
    _starts(run).unlink(missing_ok=True)


def _waits(run: RunDir) -> Path:
    return run.submit / "waiting.json"


def _starts(run: RunDir) -> Path:
    return run.submit / "starting.json"
