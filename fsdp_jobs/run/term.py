"""Fencing: who may write for a run. No torch.

Two things let a writer go on. *Its term*: every round of a run has a number that only grows, over all attempts and
submissions, and is claimed where the checkpoints are before the round begins; who belongs to an older round may not
write there any more. *Its node's lease*: an agent that has no answer from the coordinator for `elastic.lease_s`
stops its ranks, and the next round does not begin before (C. Gray, D. Cheriton: Leases, SOSP 1989).
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fsdp_jobs.run.env import RANK_STATE_ENV, TERM_ENV

TERMS = "terms"  # the folder of the claims, in that of the checkpoints
LOOK_S = 0.1  # between two looks at a lease
ROUND, COORDINATOR = "round", "coordinator"  # what is numbered: rounds fence writers, coordinators each other
_UNTIL = struct.Struct("<dd")
_AHEAD = struct.Struct("<d")
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # goes on while the machine is suspended


class Fenced(RuntimeError):
    """This process belongs to a round that is over: it must not write any more."""


def newest(home: Path, kind: str) -> int:
    """Return the newest number claimed under a folder of checkpoints, 0 before the first."""
    return max(_markers(home, kind), default=0)


def claim(home: Path, kind: str, owner: str, last: int | None = None, above: int = 0) -> int:
    """Claim the next number, which no one else gets.

    Args:
        home: the folder of the run's checkpoints; a UPath for an object store, which must know conditional puts.
        owner: a line that no other claimant writes.
        last: the newest number that the caller knows, if it has claimed before.
        above: a number that others were seen with. What follows `last` and this is above them also where the markers
            are gone, as after the purge of a scratch file system.

    Raises:
        Fenced: another process has claimed a number after `last`.
        OSError: the folder cannot be read or written.
    """
    while True:
        known = max(newest(home, kind), last or 0)
        if last is not None and known > last:
            raise Fenced(f"{kind} {known} of this run has begun elsewhere, after {last}")
        number = max(known, above) + 1
        marker = home / TERMS / f"{kind}-{number:08d}"
        if _create(marker, owner):
            markers = _markers(home, kind)
            if max(markers) == number:
                for older in sorted(markers)[:-1]:
                    with suppress(OSError):
                        markers[older].unlink()
                return number


def _markers(home: Path, kind: str) -> dict[int, Path]:
    """Return the markers that are there by number, from a listing: an NFS client remembers what it did not find."""
    try:
        found = list((home / TERMS).iterdir())
    except (FileNotFoundError, NotADirectoryError):  # the second in stores
        return {}
    return {int(f.name.rpartition("-")[2]): f for f in found if f.name.startswith(f"{kind}-")}


def _create(marker: Path, owner: str) -> bool:
    """Create a marker; False when another's is there already."""
    try:
        if isinstance(marker, Path):
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch(exist_ok=False)  # its name is the claim: a full disk has room for that, and not for a line
        else:
            marker.fs.pipe_file(marker.path, owner.encode(), mode="create")
    except OSError as e:
        try:
            return bool(marker.read_text() == owner)  # ours: the answer to the first request to a store was lost
        except FileNotFoundError:
            if isinstance(e, FileExistsError):
                return False  # it was another's, who has a newer one by now
            raise e from None
    return True


def shared_memory(file: Path, size: int) -> mmap.mmap:
    """Map a file of a node's processes into memory; the first of them creates it."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


class Lease:
    """Until when this node's ranks may run and write, and what time it is for the job's coordinator.

    24 bytes of memory, which the agent writes and its ranks read.
    """

    def __init__(self, folder: Path | str):
        """`folder` is that of the node's rank states."""
        self._map = shared_memory(Path(folder) / "lease", _UNTIL.size + _AHEAD.size)

    @staticmethod
    def now() -> float:
        """Return this machine's seconds, on a clock that nobody sets."""
        return time.clock_gettime(_CLOCK)

    def renew(self, until: float, fresh_until: float) -> None:
        """Let the ranks run until a time of `now`, and until an earlier one without a look whether they still may."""
        _UNTIL.pack_into(self._map, 0, until, fresh_until)

    def set_clock(self, theirs: float, asked_at: float) -> None:
        """Note the coordinator's time, in seconds since 1970, from its answer to what was sent at a time of `now`.

        It was written at some moment in between: what is known already is kept where that may have been so.
        """
        most = theirs - time.time() + (self.now() - asked_at)
        ahead = min(max(self.ahead_s(), theirs - time.time()), most)
        _AHEAD.pack_into(self._map, _UNTIL.size, ahead)

    def ahead_s(self) -> float:
        """Return by how many seconds the coordinator's clock is ahead of this machine's."""
        return float(_AHEAD.unpack_from(self._map, _UNTIL.size)[0])

    def left_s(self) -> float:
        """Return for how many seconds the ranks may go on, negative when they may not; before any `renew`, for ever."""
        until = float(_UNTIL.unpack_from(self._map)[0])
        return until - self.now() if until else math.inf

    def is_fresh(self) -> bool:
        """Whether the coordinator has just answered, so that no other round can have begun."""
        fresh_until = float(_UNTIL.unpack_from(self._map)[1])
        return not fresh_until or self.now() < fresh_until


@cache
def _lease_of_node() -> Lease | None:
    folder = os.environ.get(RANK_STATE_ENV)
    return Lease(folder) if folder else None


def job_time() -> float:
    """Return seconds since 1970 by the clock of the job's coordinator, on a node of it; elsewhere by this machine's."""
    lease = _lease_of_node()
    return time.time() + (lease.ahead_s() if lease is not None else 0.0)


@dataclass(frozen=True)
class Term:
    """The round that a rank writes for. Can be pickled for its save process."""

    home: Path  # the folder of the run's checkpoints
    number: int  # 0: of no job, so nothing can be newer

    @classmethod
    def of_rank(cls, home: Path) -> Term:
        """Return the term that this rank's agent was given. From now on it also fences the rank's records."""
        global _term_of_rank
        _term_of_rank = cls(home, int(os.environ.get(TERM_ENV, "0")))
        return _term_of_rank

    def check(self) -> None:
        """Refuse to go on when this round is over. Costs one listing: for commits, prunes and uploads, not for steps.

        Raises:
            Fenced: a newer round has begun, or this node's lease has run out.
            OSError: the folder of the checkpoints cannot be read.
        """
        lease = _lease_of_node()
        if lease is not None and (left := lease.left_s()) < 0:
            raise Fenced(f"this node has had no answer from the coordinator: its lease ran out {-left:.1f} s ago")
        if self.number and (other := newest(self.home, ROUND)) > self.number:
            raise Fenced(f"round {other} of this run has begun elsewhere: nothing more is written for {self.number}")


_term_of_rank = Term(Path(), 0)


def is_answered() -> bool:
    """Whether the coordinator has just answered this node, so that no other round can have begun."""
    lease = _lease_of_node()
    return lease is None or lease.is_fresh()


def check_may_record() -> None:
    """Refuse to go on when this round may be over. Costs no input or output while the coordinator answers this node.

    Raises:
        Fenced, OSError: as `Term.check`.
    """
    if not is_answered():
        try:
            _term_of_rank.check()
        except (Fenced, OSError):
            raise
        except Exception as e:  # of a store's client
            raise OSError(f"{_term_of_rank.home}: {e}") from e
