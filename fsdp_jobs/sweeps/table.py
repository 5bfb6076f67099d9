"""Find, read and write sweep tables: a sweep's list of jobs, `sweeps/<name>/sweep.yaml`. No torch."""

from __future__ import annotations

import fcntl
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from fsdp_jobs.config.errors import BadInput, Problem, nearest
from fsdp_jobs.config.hydra import key_of
from fsdp_jobs.run.directory import RunDir, find_run, write_atomic
from fsdp_jobs.run.status import ENDED
from fsdp_jobs.sweeps.identity import identity

NEW = "new"  # not submitted yet
_COMMENT = "# Written by fsdp-jobs. States and objectives are those that its last submission or cancellation saw.\n"


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

    folder: Path
    runs_dir: str
    fixed: list[str] = field(default_factory=list)  # overrides of every job
    objective: str = "loss"  # a key of metrics.jsonl
    direction: str = "minimize"
    parallelism: int = 0
    jobs: list[Row] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def file(self) -> Path:
        return self.folder / "sweep.yaml"

    @property
    def keys(self) -> list[str]:
        """Every key in which jobs differ, in the order of their appearance."""
        return list(dict.fromkeys(key for row in self.jobs for key in row.values))

    def write(self) -> None:
        """Replace the file."""
        content = {key: value for key, value in asdict(self).items() if key != "folder"}
        write_atomic(self.file, _COMMENT + yaml.safe_dump(content, sort_keys=False, width=1000))

    def rows_for(self, jobs: Sequence[Sequence[str]]) -> list[Row]:
        """Return the row of each job, given by its overrides, in their order; add rows for new jobs."""
        known = {identity(row.overrides): row for row in self.jobs}
        next_number = 1 + max((int(row.run.rpartition("-")[2]) for row in self.jobs), default=-1)
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
def locked(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold a sweep's lock, so that what a command reads, decides and writes is consistent.

    A folder that was made for the lock, and in which nothing was written, is removed again.
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
                if not (folder / "sweep.yaml").exists():
                    path.unlink()
                    with suppress(OSError):  # something else is in it
                        folder.rmdir()
                        folder.parent.rmdir()
            return


def sweep_names(sweeps_dir: str = "sweeps") -> list[str]:
    """Return the names of all sweeps in a folder."""
    return sorted(f.parent.name for f in Path(sweeps_dir).glob("*/sweep.yaml"))


def find_sweep(name: str, sweeps_dir: str) -> Path:
    """Return the folder of a sweep.

    Raises:
        BadInput: there is no sweep of this name.
    """
    folder = find_run(sweeps_dir, name).path  # a sweep's name is the first part of its runs' names
    if not (folder / "sweep.yaml").exists():
        names = sweep_names(sweeps_dir)
        known = f"one of {', '.join(names)}" if names else "python -m fsdp_jobs --multirun ... makes one"
        raise BadInput([Problem(name, f"there is no such sweep under {sweeps_dir}/", nearest(name, names) or known)])
    return folder


def read_sweep(folder: Path) -> Sweep:
    """Read what `Sweep.write` wrote; before that, return a sweep without jobs.

    Raises:
        BadInput: the file was edited, and is not a sweep table any more.
    """
    file = folder / "sweep.yaml"
    if not file.exists():
        return Sweep(folder, "runs")
    try:
        content = yaml.load(file.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        rows = [Row(**_checked(Row, entry)) for entry in content.pop("jobs")]
        sweep = Sweep(folder=folder, jobs=rows, **_checked(Sweep, content))
        for name, count in Counter(row.run for row in rows).items():
            if count > 1:
                raise ValueError(f"run {name} is in two rows")
            if not re.fullmatch(r"\d{3,}", name.removeprefix(f"{sweep.name}-")):
                raise ValueError(f"run {name} is not a run of this sweep: {sweep.name}-000, {sweep.name}-001 ...")
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as e:
        why = re.sub(r"\s+", " ", f"missing {e}" if isinstance(e, KeyError) else str(e))
        cure = "correct it; or move it away and repeat the command, which finds the runs again"
        raise BadInput([Problem(str(file), f"cannot be read: {why}", cure)]) from e
    return sweep


def _checked(kind: type, entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of the file whose keys and types are those of a class.

    Raises:
        ValueError: a key that is not a field, or a value that is not of its field's type.
    """
    types = get_type_hints(kind)
    for key, value in entry.items():
        if types.get(key) == list[str]:
            fits = isinstance(value, list) and all(isinstance(v, str) for v in value)
        else:
            fits = key in types and isinstance(value, types[key]) and not isinstance(value, bool)
        if not fits:
            raise ValueError(f"{key}: {value!r}")
    return entry
