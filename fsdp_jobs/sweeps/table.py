"""Read the jobs of a sweep from their run directories: each job.json has its sweep's settings. No torch."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fsdp_jobs.config.errors import BadInput, nearest
from fsdp_jobs.config.hydra import key_of
from fsdp_jobs.config.terminal import say
from fsdp_jobs.run.directory import RunDir, find_run, recorded_in
from fsdp_jobs.run.files import lock, try_lock
from fsdp_jobs.run.record import JsonObject
from fsdp_jobs.run.status import OVER
from fsdp_jobs.sweeps.identity import identity

NEW = "new"  # not submitted yet
_TRIES = 1000  # to take a lock in a folder that other commands remove meanwhile
_KEPT = ("fixed", "objective", "direction", "parallelism")  # settings in the job.json of each job


@dataclass(eq=False)
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
        """Whether the job runs or is queued."""
        return self.state not in (*OVER, NEW)

    @property
    def is_measured(self) -> bool:
        return self.objective is not None and math.isfinite(self.objective)

    @property
    def values(self) -> dict[str, str]:
        """Key -> value of its overrides, as written."""
        return {key_of(o): o.partition("=")[2] for o in self.overrides}


@dataclass
class Sweep:
    """All jobs of a sweep, and their common settings."""

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

    def record(self, row: Row) -> JsonObject:
        """Return the sweep's settings for the job.json of a row."""
        return {"name": self.name, "overrides": row.overrides, **{key: getattr(self, key) for key in _KEPT}}

    def rows_for(self, jobs: Sequence[Sequence[str]]) -> list[Row]:
        """Return the row of each job, given by its overrides, in their order; add rows for new jobs."""
        known = {identity(row.overrides): row for row in self.jobs}
        taken = [job.parent.name for job in Path(self.runs_dir).glob(f"{self.name}-*/job.json")]
        numbers = [run.removeprefix(f"{self.name}-") for run in taken + [row.run for row in self.jobs]]
        following = itertools.count(1 + max((int(number) for number in numbers if number.isdecimal()), default=-1))
        for overrides in jobs:
            if identity(overrides) not in known:
                known[identity(overrides)] = row = Row(f"{self.name}-{next(following):03d}", list(overrides))
                self.jobs.append(row)
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

    def content(self) -> JsonObject:
        """Return the sweep's content for pages, the best job first; an objective that is not finite is None."""
        about = {"objective": self.objective, "direction": self.direction, "keys": self.keys, "fixed": self.fixed}
        rows = [
            {**asdict(row), "values": row.values, "objective": row.objective if row.is_measured else None}
            for row in sorted(self.jobs, key=self.rank)
        ]
        return {**about, "rows": rows}


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a sweep's lock, so that no other command changes it between reading and submitting.

    Afterwards the folder is removed if it is empty.
    """
    path = folder / "lock"
    for tried in itertools.count():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = path.open("w")
        except FileNotFoundError:  # another command has just removed the folder, or none can be made there
            if tried == _TRIES:
                raise
            continue
        with file:
            if not try_lock(file):
                say(f"waiting for another command that works on sweep {folder.name}")
                lock(file)
            if not path.exists() or path.stat().st_ino != os.fstat(file.fileno()).st_ino:
                continue
            try:
                yield
            finally:
                path.unlink()
                with suppress(OSError):  # the folder is not empty
                    folder.rmdir()
                    folder.parent.rmdir()
            return


def sweeps_in(runs_dir: str) -> dict[str, Sweep]:
    """Return name -> sweep of the runs under a folder, with the newest submission's settings and without states."""
    found: dict[str, Sweep] = {}
    for run in recorded_in(runs_dir):
        about = None if run.is_damaged else run.read_job().get("sweep")
        if about is not None and re.fullmatch(rf"{re.escape(about['name'])}-\d+", run.name):  # not a copy of a run
            sweep = found.setdefault(about["name"], Sweep(about["name"], runs_dir))
            sweep.jobs.append(Row(run.name, about["overrides"]))
            for key in _KEPT:
                setattr(sweep, key, about[key])
    for sweep in found.values():
        sweep.jobs.sort(key=lambda row: (len(row.run), row.run))
    return found


def find_sweep(name: str, runs_dir: str) -> Sweep:
    """Return a sweep.

    Raises:
        BadInput: there is no sweep of this name.
    """
    sweeps = sweeps_in(runs_dir)
    if name not in sweeps:
        known = f"one of {', '.join(sweeps)}" if sweeps else "fsdp-jobs --multirun ... makes one"
        raise BadInput.at(name, f"no run under {runs_dir}/ belongs to such a sweep", nearest(name, sweeps) or known)
    return sweeps[name]
