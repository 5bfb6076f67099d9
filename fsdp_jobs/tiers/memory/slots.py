"""The files of snapshots in a node's memory, which outlive the ranks. No torch.

An agent keeps a folder in a file system in memory. Each of its ranks writes its shards into one of two slots there,
always over the older snapshot:

    <term>-<rank>-<slot>.data      tensors, one after the other
    <term>-<rank>-<slot>.json      their description, a `Snapshot`; the rank writes it last, when the data is whole
    <term>-<rank>-<slot>.sums      their checksums, written by the agent: the snapshot is sealed
    <term>-<rank>-<slot>.copied    another node has a copy of the tensors that no replica of this rank holds

`copies/` has snapshots that the agents of other nodes have sent, in the same form.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.run import folders
from fsdp_jobs.run.checksum import checksum, checksum_of_part
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import write_whole
from fsdp_jobs.run.record import Record
from fsdp_jobs.run.table import listed
from fsdp_jobs.run.verdict import Verdict

COPIES = "copies"
_RUN = "run"  # file with the path of the run directory
_NAME = re.compile(r"(\d+)-(\d+)-(\d+)")  # term, rank, slot
_ALIGNED = 64  # bytes; each tensor begins at a multiple of it
_FREE = 0.5  # of the file system: while less is free, snapshots of waiting jobs are removed, oldest first


class Entry(NamedTuple):
    """One tensor of a snapshot: this rank's part of it, or all of it if it is not sharded."""

    name: str
    dtype: str
    shape: list[int]  # of the whole tensor
    offsets: list[int]  # of this part in it
    sizes: list[int]
    bytes: int
    is_alone: bool  # no replica on another node has it
    begin: int = 0  # in the data
    is_replicated: bool = False  # replicas must hold the same bits


@dataclass(frozen=True)
class Snapshot(Record):
    """The snapshot of one rank."""

    term: int  # the number of the round over all attempts of the run
    rank: int
    slot: int
    step: int  # optimizer steps done
    samples: int
    world_size: int
    shard_group: int
    entries: list[Entry]
    is_whole: bool = True  # False: only its `is_alone` entries
    stream: dict[str, Any] | None = None  # where a stream continues

    @property
    def name(self) -> str:
        """The name of its files, without their suffixes."""
        return f"{self.term}-{self.rank}-{self.slot}"

    @property
    def size(self) -> int:
        """Bytes of the data."""
        return max((e.begin + e.bytes for e in self.entries), default=0)

    def placed(self) -> Snapshot:
        """Return it with its tensors placed one after the other."""
        at, entries = 0, []
        for entry in self.entries:
            entries.append(entry._replace(begin=at))
            at += -(-entry.bytes // _ALIGNED) * _ALIGNED
        return replace(self, entries=entries)

    def alone(self) -> Snapshot:
        """Return the part that another node must get a copy of."""
        entries = [e for e in self.entries if e.is_alone]
        return replace(self, entries=entries, is_whole=len(entries) == len(self.entries)).placed()

    def described(self) -> str:
        """Return its description with a checksum, as stored in a slot."""
        text = self.to_json()
        return f"{checksum(text.encode())}\n{text}"


class Slot:
    """The files of one snapshot."""

    def __init__(self, path: Path):
        """`path` is that of the files, without their suffixes."""
        self.data, self.about, self.sums, self.copied = map(path.with_suffix, (".data", ".json", ".sums", ".copied"))

    def withdraw(self) -> None:
        """Invalidate the snapshot here, before its data is overwritten."""
        for file in (self.about, self.copied, self.sums):
            file.unlink(missing_ok=True)

    def map(self, size: int) -> mmap.mmap:
        """Map the data into memory, with `size` writable bytes.

        Raises:
            OSError: there is no room for them.
        """
        with self.data.open("a+b") as f:
            os.posix_fallocate(f.fileno(), 0, max(size, 1))  # else a write without room is a SIGBUS
            return mmap.mmap(f.fileno(), max(size, 1))

    def publish(self, snapshot: Snapshot) -> None:
        """Mark the data as whole."""
        write_whole(self.about, snapshot.described())

    def snapshot(self) -> Snapshot | None:
        """Return the snapshot here, if its data is whole; None if its description is damaged, or another version's."""
        try:
            expected, _, text = self.about.read_text().partition("\n")
            if checksum(text.encode()) != expected:
                return None
            snapshot = Snapshot.from_json(text)
        except (FileNotFoundError, ValueError):
            return None
        return snapshot if snapshot.name == self.about.stem else None

    def seal(self, snapshot: Snapshot, threads: int = 1) -> dict[str, str] | None:
        """Write and return the checksums of the snapshot here; None if it was withdrawn meanwhile."""
        with suppress(FileNotFoundError):
            sums = self._checksums(snapshot, threads)
            if self.about.read_text() == snapshot.described():
                write_whole(self.sums, json.dumps(sums))
                return sums
        return None

    def verify(self, threads: int = 1) -> list[str]:
        """Return the names of tensors that differ from their sealed checksums, or another fault; empty if whole.

        A snapshot that its agent had not sealed when it died is sealed now.
        """
        try:
            snapshot = self.snapshot()
            if snapshot is None:
                return ["it was never whole"]
            if not self.sums.exists():
                self.seal(snapshot, threads)
            expected, sums = json.loads(self.sums.read_text()), self._checksums(snapshot, threads)
            return [name for name in expected.keys() | sums.keys() if expected.get(name) != sums.get(name)]
        except (OSError, ValueError, TypeError, AttributeError) as e:
            return [f"{type(e).__name__}: {e}"]

    def _checksums(self, snapshot: Snapshot, threads: int) -> dict[str, str]:
        """Return the checksum of each tensor, and of the description."""
        with self.data.open("rb") as data, ThreadPoolExecutor(threads) as several:
            sums = several.map(lambda e: checksum_of_part(data.fileno(), e.begin, e.bytes), snapshot.entries)
            by_name = dict(zip((e.name for e in snapshot.entries), sums, strict=True))
        return {**by_name, "": checksum(snapshot.to_json().encode())}


def slots_in(folder: Path) -> Iterator[Slot]:
    """Yield the slots of a folder that hold a snapshot."""
    for file in folder.glob("*.json"):
        if _NAME.fullmatch(file.stem):
            yield Slot(file)


def snapshots_in(folder: Path) -> Iterator[tuple[Snapshot, bool]]:
    """Yield the whole snapshots in a node's folder, each with whether it is a copy of another node's."""
    for where in (folder, folder / COPIES):
        for slot in slots_in(where):
            if (snapshot := slot.snapshot()) is not None:
                yield snapshot, where != folder


def newest_in(folder: Path) -> tuple[int, int]:
    """Return term and step of the newest snapshot in a node's folder, copies included; (-1, -1) for none."""
    return max(((snapshot.term, snapshot.step) for snapshot, _ in snapshots_in(folder)), default=(-1, -1))


def forget_before(folder: Path, term: int, but: Collection[str] = ()) -> None:
    """Remove snapshots of older rounds, copies of other nodes' included, except those named in `but`."""
    for where in (folder, folder / COPIES):
        for file in where.glob("*"):  # none, if the folder was removed
            stem = file.name.lstrip(".").partition(".")[0]  # a file that was being written is hidden
            name, is_kept = _NAME.fullmatch(stem), f"{f'{COPIES}/' if where != folder else ''}{stem}" in but
            if name and int(name[1]) < term and not is_kept:
                file.unlink(missing_ok=True)


def adopt_folder(memory: Path, run: RunDir) -> tuple[Path, IO[str]]:
    """Return this node's folder of a submission, with the lock that marks it as in use.

    The folder of an agent that has died is adopted; otherwise `remove_left` makes room for a new one.

    Raises:
        OSError: no folder can be made there.
    """
    if not memory.is_dir():
        raise NotADirectoryError(f"checkpoint.memory.dir={memory} is not a folder on this machine")
    for folder in sorted(folders.owned(memory, _name(run)), key=newest_in, reverse=True):
        if (lock := folders.take(folder, folders.DYING_S)) is not None:
            break
    else:
        remove_left(memory, run)
        folder, lock = folders.make(memory, _name(run))
        _furnish(folder, run)
    return folder, lock


def restore_folder(folder: Path, run: RunDir) -> IO[str] | None:
    """Make a node's folder again if it was removed, as a cleanup of /dev/shm does. Returns its new lock.

    Raises:
        OSError: no folder can be made there.
    """
    lock = folders.make_at(folder) if not folder.exists() else None
    _furnish(folder, run)
    return lock


def _furnish(folder: Path, run: RunDir) -> None:
    (folder / COPIES).mkdir(mode=0o700, exist_ok=True)
    if not (folder / _RUN).exists():  # each round comes here: on a full disk, writing it again would empty it
        (folder / _RUN).write_text(str(run.path))


def remove_left(memory: Path, run: RunDir) -> None:
    """Remove a node's snapshots of any run that no job will restart from; if room is short, also those of waiting jobs.

    A job may wait in a queue for days, so age is no criterion.
    """
    mine = folders.owned(memory, _name(run))
    others = [folder for folder in folders.owned(memory, "memory") if folder not in mine]
    left = [(_may_be_needed(f), f.stat().st_mtime, f, lock) for f in others if (lock := folders.take(f)) is not None]
    for may_be_needed, _, folder, lock in sorted(left):
        total, _, free = shutil.disk_usage(memory)
        if not may_be_needed or free < _FREE * total:
            shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def _name(run: RunDir) -> str:
    """Return the prefix of the folder names of a run's newest submission."""
    return f"{folders.snapshots_of(run)}-{run.submission}"


def _may_be_needed(folder: Path) -> bool:
    """Whether a job may restart from a folder: not if its run was removed, is over, or was submitted again."""
    try:
        run = RunDir((folder / _RUN).read_text())
        is_gone = run.path not in run.path.parent.iterdir()  # `exists` says no for errors, since Python 3.14
        is_of_another = bool(run.submission) and not folder.name.startswith(folders.prefix(_name(run)))
        return not (is_gone or is_of_another or Verdict.final(run) is not None)
    except (OSError, ValueError, BadInput):  # its run directory cannot be read now
        return newest_in(folder) > (-1, -1)


class Found(NamedTuple):
    """A snapshot that a node holds."""

    term: int
    rank: int  # that took it
    slot: int
    step: int
    world_size: int
    shard_group: int
    is_whole: bool
    is_copy: bool
    holder: int  # the rank that leads the node now
    samples: int

    @classmethod
    def of(cls, snapshot: Snapshot, is_copy: bool, holder: int) -> Found:
        own = {name: value for name, value in vars(snapshot).items() if name in cls._fields}
        return cls(**own, is_copy=is_copy, holder=holder)

    @property
    def name(self) -> str:
        """Return the path of its files in the node's folder, without their suffixes."""
        return f"{COPIES}/" * self.is_copy + f"{self.term}-{self.rank}-{self.slot}"


def newest_complete(found: Iterable[Found]) -> list[Found]:
    """Choose the newest step whose shards the nodes all hold, of the newest round with one; empty if there is none.

    Ranks at the same place of their shard groups are replicas and have the same shards.
    """
    by_step: dict[tuple[int, int], list[Found]] = {}
    for one in found:
        by_step.setdefault((one.term, one.step), []).append(one)
    for _, candidates in sorted(by_step.items(), reverse=True):
        whole = {one.rank % one.shard_group for one in candidates if one.is_whole}
        if len(whole) == candidates[0].shard_group:
            return candidates
    return []


def lost_shards(found: Collection[Found], after: int, safe: int) -> tuple[int, str] | None:
    """Return the newest step after `after` that was in memory, and what is lost of it; None if there is none.

    Args:
        safe: the newest step that was safe when the last round ended. If no node has any part of a step, only this
            is known of it.
    """
    instead = "an older checkpoint is read" if after > 0 else "there is no older checkpoint"
    newest = max((one for one in found if one.step > after), key=lambda one: (one.term, one.step), default=None)
    if newest is None:
        lost = f"step {safe} was in the nodes' memory, but no node has any of it now: {instead}"
        return (safe, lost) if safe > after else None
    same = [one for one in found if (one.term, one.step) == (newest.term, newest.step) and one.is_whole]
    missing = sorted({*range(newest.shard_group)} - {one.rank % newest.shard_group for one in same})
    shards = listed([*map(str, missing)], most=8)
    what = f"no node has its shards {shards} of {newest.shard_group} whole in memory"
    return newest.step, f"the snapshot of step {newest.step} is not complete: {what}; {instead}"
