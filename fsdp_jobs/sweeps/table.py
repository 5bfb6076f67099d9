"""The jobs of a sweep, read from their run directories: each job.json has its sweep's settings. No torch."""

from __future__ import annotations

import fcntl
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsdp_jobs.config.errors import BadInput, Problem, nearest
from fsdp_jobs.config.hydra import key_of
from fsdp_jobs.config.terminal import say
from fsdp_jobs.run.directory import RunDir, find_run
from fsdp_jobs.run.status import ENDED
from fsdp_jobs.sweeps.identity import identity

NEW = "new"  # not submitted yet


@dataclass
class Row:
    """One job of a sweep."""

    run: str  # name of its run directory
    overrides: list[str]  # that distinguish it from the other jobs
    handle: str | None = None
    state: str = NEW  # or a word of RunStatus.state
    step: int = 0
    objective: float | None = None
    reason: str = ""  # of its state, for the user

    @property
    def is_active(self) -> bool:
        """Whether its launcher has it: it runs or waits."""
        return self.state not in (*ENDED, NEW)

    @property
    def is_measured(self) -> bool:
        return self.objective is not None and math.isfinite(self.objective)

    @property
    def values(self) -> dict[str, str]:
        """Key -> value, as written, of its overrides."""
        return {key_of(o): o.partition("=")[2] for o in self.overrides}


@dataclass
class Sweep:
    """All jobs, and what they have in common."""

    name: str
    runs_dir: str
    fixed: list[str] = field(default_factory=list)  # overrides of every job
    objective: str = "loss"  # a key of metrics.jsonl
    direction: str = "minimize"
    parallelism: int = 0
    jobs: list[Row] = field(default_factory=list)

    @property
    def keys(self) -> list[str]:
        """Every key in which jobs differ, in the order of their appearance."""
        return list(dict.fromkeys(key for row in self.jobs for key in row.values))

    def record(self, row: Row) -> dict[str, Any]:
        """Return what the job.json of a row keeps of the sweep."""
        settings = {key: getattr(self, key) for key in ("name", "fixed", "objective", "direction", "parallelism")}
        return {**settings, "overrides": row.overrides}

    def rows_for(self, jobs: Sequence[Sequence[str]]) -> list[Row]:
        """Return the row of each job, given by its overrides, in their order; add rows for new jobs."""
        known = {identity(row.overrides): row for row in self.jobs}
        taken = [job.parent.name for job in Path(self.runs_dir).glob(f"{self.name}-*/job.json")]
        numbers = [run.removeprefix(f"{self.name}-") for run in taken + [row.run for row in self.jobs]]
        next_number = 1 + max((int(number) for number in numbers if number.isdecimal()), default=-1)
        for overrides in jobs:
            if identity(overrides) not in known:
                known[identity(overrides)] = row = Row(f"{self.name}-{next_number:03d}", list(overrides))
                self.jobs.append(row)
                next_number += 1
        return [known[identity(overrides)] for overrides in jobs]

    def overrides_of(self, row: Row) -> list[str]:
        """Return all overrides of a row's job."""
        throttle = [f"sweep.parallelism={self.parallelism}"] if self.parallelism else []  # launchers validate it
        return [*self.fixed, *row.overrides, *throttle, f"name={row.run}", f"runs_dir={self.runs_dir}"]

    def run_of(self, row: Row) -> RunDir:
        return find_run(self.runs_dir, row.run)

    def rank(self, row: Row) -> float:
        """Return a sort key: the best objective first, rows without one last."""
        sign = 1 if self.direction == "minimize" else -1
        return sign * (row.objective or 0.0) if row.is_measured else math.inf

    def best(self) -> Row | None:
        """Return the row with the best objective, of those that are done if any is; None without an objective."""
        measured = [row for row in self.jobs if row.is_measured]
        return min([row for row in measured if row.state == "done"] or measured, key=self.rank, default=None)

    def content(self) -> dict[str, Any]:
        """Return what pages show of it, the best job first; an objective that is not finite is None."""
        about = {"objective": self.objective, "direction": self.direction, "keys": self.keys, "fixed": self.fixed}
        rows = [
            {**asdict(row), "values": row.values, "objective": row.objective if row.is_measured else None}
            for row in sorted(self.jobs, key=self.rank)
        ]
        return {**about, "rows": rows}


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a sweep's lock, so that what a command reads, decides and submits is consistent.

    A folder in which nothing but the lock was made is removed again.
    """
    path = folder / "lock"
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = path.open("w")
        except FileNotFoundError:  # another command has removed the folder in between
            continue
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting for another command that works on sweep {folder.name}")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists() or path.stat().st_ino != os.fstat(lock.fileno()).st_ino:
                continue
            try:
                yield
            finally:
                path.unlink()
                with suppress(OSError):  # something else is in it
                    folder.rmdir()
                    folder.parent.rmdir()
            return


def sweeps_in(runs_dir: str) -> dict[str, Sweep]:
    """Return name -> sweep of the runs under a folder: settings of the newest submission, states not looked at."""
    found: dict[str, Sweep] = {}
    for job in sorted(Path(runs_dir).glob("*/job.json"), key=lambda file: file.stat().st_mtime):
        run = RunDir(job.parent)
        about = None if run.is_damaged else run.read_job().get("sweep")
        if about is not None and re.fullmatch(rf"{re.escape(about['name'])}-\d+", run.name):  # and no copy of its run
            sweep = found.setdefault(about["name"], Sweep(about["name"], runs_dir))
            sweep.jobs.append(Row(run.name, about["overrides"]))
            for key in ("fixed", "objective", "direction", "parallelism"):
                setattr(sweep, key, about[key])
    for sweep in found.values():
        sweep.jobs.sort(key=lambda row: (len(row.run), row.run))
    return found


def find_sweep(name: str, runs_dir: str) -> Sweep:
    """Return a sweep.

    Raises:
        BadInput: there is none of this name.
    """
    sweeps = sweeps_in(runs_dir)
    if name not in sweeps:
        known = f"one of {', '.join(sweeps)}" if sweeps else "python -m fsdp_jobs --multirun ... makes one"
        raise BadInput([Problem(name, f"no run under {runs_dir}/ is of such a sweep", nearest(name, sweeps) or known)])
    return sweeps[name]
