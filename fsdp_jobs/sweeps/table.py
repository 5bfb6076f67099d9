"""The list of a sweep's jobs, `sweeps/<name>/sweep.yaml`: found, read, matched, written whole. No torch."""

from __future__ import annotations

import fcntl
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from fsdp_jobs.config.errors import BadInput, Problem, nearest
from fsdp_jobs.run.directory import RunDir, find_run, write_atomic
from fsdp_jobs.sweeps.identity import identity

ENDED = ("done", "stopped", "failed")
NEW = "new"  # not submitted yet


@dataclass
class Row:
    """One job."""

    run: str  # name of its run directory
    overrides: list[str]  # in which it differs from the others
    handle: str | None = None
    state: str = NEW  # or a word of RunStatus.state
    step: int = 0
    objective: float | None = None
    reason: str = ""  # of its state, for the user

    @property
    def is_active(self) -> bool:
        """Whether its launcher has it: it runs, or waits."""
        return self.state not in (*ENDED, NEW)


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

    def write(self) -> None:
        content = {key: value for key, value in asdict(self).items() if key != "folder"}
        told = (
            "# Written by fsdp-jobs. States and objectives are those of the last command that submitted or stopped.\n"
        )
        write_atomic(self.file, told + yaml.safe_dump(content, sort_keys=False, width=1000))

    def rows_for(self, jobs: Sequence[Sequence[str]]) -> list[Row]:
        """The row of each job, in their order; a job that has none gets one."""
        known = {identity(row.overrides): row for row in self.jobs}
        highest = max((int(row.run.rpartition("-")[2]) for row in self.jobs), default=-1)
        found = []
        for overrides in jobs:
            told = identity(overrides)
            if told not in known:
                highest += 1
                known[told] = Row(f"{self.name}-{highest:03d}", list(overrides))
                self.jobs.append(known[told])
            found.append(known[told])
        return found

    def overrides_of(self, row: Row) -> list[str]:
        """Everything that makes a row's job."""
        return [*self.fixed, *row.overrides, f"name={row.run}", f"runs_dir={self.runs_dir}"]

    def run_of(self, row: Row) -> RunDir:
        return find_run(self.runs_dir, row.run)

    def best(self) -> Row | None:
        """The row with the best objective: of those that are done, else of all; None while none has one."""
        measured = [r for r in self.jobs if r.objective is not None and math.isfinite(r.objective)]
        rows = [r for r in measured if r.state == "done"] or measured
        sign = 1 if self.direction == "minimize" else -1
        return min(rows, key=lambda r: sign * (r.objective or 0.0), default=None)


@contextmanager
def locked(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Alone with a sweep, among all commands and people. What is read, decided and written within holds together.

    A folder that was made for the lock, and in which nothing was written, is removed again.
    """
    place = folder / "lock"
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = place.open("w")
        except FileNotFoundError:  # another command has removed it in between
            continue
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another command works on sweep {folder.name}: waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
            if not place.exists() or place.stat().st_ino != os.fstat(file.fileno()).st_ino:
                continue
            try:
                yield
            finally:
                if not (folder / "sweep.yaml").exists():
                    place.unlink()
                    with suppress(OSError):  # something else is in it
                        folder.rmdir()
                        folder.parent.rmdir()
            return


def existing_sweep(name: str, sweeps_dir: str) -> Sweep:
    """A sweep by its name.

    Raises:
        BadInput: there is none, or its list was damaged.
    """
    folder = find_run(sweeps_dir, name).path  # a sweep's name is its runs' first part
    if not (folder / "sweep.yaml").exists():
        names = sorted(f.parent.name for f in Path(sweeps_dir).glob("*/sweep.yaml"))
        known = f"there are {', '.join(names)}" if names else "python -m fsdp_jobs --multirun ... makes one"
        what = f"there is no such sweep under {sweeps_dir}/"
        raise BadInput([Problem(name, what, nearest(name, names) or known)])
    return read_sweep(folder)


def read_sweep(folder: Path) -> Sweep:
    """What `Sweep.write` wrote; a sweep without jobs when it has not.

    Raises:
        BadInput: somebody else has written it, and wrongly.
    """
    file = folder / "sweep.yaml"
    if not file.exists():
        return Sweep(folder, "runs")
    try:
        content = yaml.load(file.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        jobs = [_row(entry) for entry in content.pop("jobs")]
        sweep = Sweep(folder=folder, jobs=jobs, **_typed(Sweep, content))
        names = [row.run for row in sweep.jobs]
        if twice := next((n for n in names if names.count(n) > 1), None):
            raise ValueError(f"run {twice} stands in two rows")
        for name in names:
            if not re.fullmatch(r"\d{3,}", name.removeprefix(f"{sweep.name}-")):
                raise ValueError(
                    f"run {name} is none of this sweep's, which are {sweep.name}-000, {sweep.name}-001 ..."
                )
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError, BadInput) as e:
        why = re.sub(r"\s+", " ", f"missing {e}" if isinstance(e, KeyError) else str(e))
        instead = "mend it; or move it away and repeat the command: its runs are kept and found again"
        raise BadInput([Problem(str(file), f"cannot be read: {why}", instead)]) from e
    return sweep


def _row(entry: Any) -> Row:
    return Row(**_typed(Row, entry))


# Type of a field, as written here -> types that YAML may give it.
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "list[str]": (list,),
    "str | None": (str, type(None)),
    "float | None": (int, float, type(None)),
}


def _typed(kind: type, entry: Any) -> dict[str, Any]:
    """The values of an entry, where each is of its field's type.

    Raises:
        ValueError: one is not, or there is no such field.
    """
    if not isinstance(entry, dict):
        raise ValueError(f"`{entry}` is no {kind.__name__.lower()}")
    types = {f.name: _TYPES[str(f.type)] for f in fields(kind) if str(f.type) in _TYPES}
    for key, value in entry.items():
        if key not in types or isinstance(value, bool) or not isinstance(value, types[key]):
            raise ValueError(f"{key}: {value!r}")
        if isinstance(value, list) and not all(isinstance(v, str) for v in value):
            raise ValueError(f"{key}: {value!r}")
    return entry
