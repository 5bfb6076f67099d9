"""Fencing: only processes of the newest round may write for a run. No torch.

A writer needs a current term and a lease. *Term*: every round of a run has a number that only grows, over all attempts
and submissions. It is claimed in the folder of the checkpoints before the round begins; writers of older rounds may
then no longer write there. *Lease*: an agent without an answer from the coordinator for `elastic.lease_s` stops its
ranks, and the next round does not begin before that (C. Gray, D. Cheriton: Leases, SOSP 1989).
"""

from __future__ import annotations

import math
import mmap
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fsdp_jobs.run.env import RANK_STATE_ENV, TERM_ENV
from fsdp_jobs.run.files import listing

TERMS = "terms"  # the folder of the claims, in the folder of the checkpoints
LOOK_S = 0.1  # between two checks of a lease
ROUND, COORDINATOR = "round", "coordinator"  # kinds of numbers: rounds fence writers, coordinators fence each other
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # also counts while the machine is suspended


class Fenced(RuntimeError):
    """This process belongs to a round that is over, and must not write any more."""


def newest(home: Path, kind: str) -> int:
    """Return the newest number claimed under a folder of checkpoints, 0 before the first."""
    return max(_markers(home, kind), default=0)


def claim(
    home: Path, kind: str, owner: str, last: int = 0, above: int = 0, check: Callable[[], object] = lambda: None
) -> int:
    """Claim the next number; no other process gets the same.

    Args:
        home: the folder of the run's checkpoints; a UPath for an object store, which must support conditional puts.
        owner: a line that no other claimant writes.
        last: the newest number that the caller knows, 0 if it has claimed none.
        above: a number that others have used. The claimed one is above it and `last` even if the markers are gone,
            as after a purge of a scratch file system.
        check: called after each look for the newest number; raises Fenced if another process claims in place of this
            one. Whoever takes over later finds a number that is not lower.

    Raises:
        Fenced: another process has claimed a number after `last`, or the check raised it.
        OSError: the folder cannot be read or written.
    """
    while True:
        known = max(newest(home, kind), last)
        if last and known > last:
            raise Fenced(f"{kind} {known} of this run has begun elsewhere, after {last}")
        check()
        number = max(known, above) + 1
        marker = home / TERMS / f"{kind}-{number:08d}"
        if is_mine := _create(marker, owner):
            markers = _markers(home, kind)
            if max(markers) == number:
                for older in sorted(markers)[:-1]:
                    with suppress(OSError):
                        markers[older].unlink()
                return number
        if is_mine is None:
            last = number  # whoever has it, the next is nobody's


def _markers(home: Path, kind: str) -> dict[int, Path]:
    """Return existing markers by number. Lists the folder, because NFS clients cache failed lookups."""
    named = ((re.fullmatch(rf"{kind}-(\d+)", f.name), f) for f in listing(home / TERMS))
    return {int(name[1]): f for name, f in named if name}


def _create(marker: Path, owner: str) -> bool | None:
    """Create a marker. Returns False if another process has created it, None if this one or another has."""
    try:
        if isinstance(marker, Path):
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch(exist_ok=False)  # its name is the claim, which fits even on a full disk
        else:
            marker.fs.pipe_file(marker.path, owner.encode(), mode="create")
    except OSError as e:
        try:
            text = marker.read_text()  # after an answer that was lost: the owner in a store, nothing in a file
            return text == owner or (False if text or isinstance(e, FileExistsError) else None)
        except FileNotFoundError:
            if isinstance(e, FileExistsError):
                return False  # another process created it, and has removed it for a newer one
            raise e from None
    return True


def shared_memory(file: Path, size: int) -> mmap.mmap:
    """Map a file that a node's processes share into memory; the first process creates it."""
    with open(os.open(file, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as f:
        try:
            os.posix_fallocate(f.fileno(), 0, size)  # else a write without room is a SIGBUS
        except OSError as e:
            e.filename = str(file)
            raise
        return mmap.mmap(f.fileno(), size)


class Lease:
    """How long this node's ranks may run and write, and the time by the coordinator's clock.

    It is three numbers in shared memory; the agent writes them and its ranks read them.
    """

    def __init__(self, folder: Path | str | None):
        """`folder` is the folder of the node's rank states; None outside a job: this lease is never renewed."""
        shared = shared_memory(Path(folder) / "lease", 24) if folder else bytearray(24)
        self._numbers = memoryview(shared).cast("d")  # until, fresh until, ahead

    @staticmethod
    def now() -> float:
        """Return this machine's seconds, on a clock that cannot be set."""
        return time.clock_gettime(_CLOCK)

    def renew(self, until: float, fresh_until: float) -> None:
        """Let the ranks run until a time of `now`, and write without checking their term until an earlier one."""
        self._numbers[0], self._numbers[1] = until, fresh_until

    def set_clock(self, theirs: float, asked_at: float) -> None:
        """Adjust to the coordinator's time (seconds since 1970) in an answer to a message sent at `asked_at`.

        The answer was written between then and now, so the known difference is kept if it lies within these bounds.
        """
        most = theirs - time.time() + (self.now() - asked_at)
        self._numbers[2] = min(max(self.ahead_s(), theirs - time.time()), most)

    def ahead_s(self) -> float:
        """Return by how many seconds the coordinator's clock is ahead of this machine's."""
        return self._numbers[2]

    def left_s(self) -> float:
        """Return how many seconds the lease lasts, negative once it has expired, infinity before any `renew`."""
        until = self._numbers[0]
        return until - self.now() if until else math.inf

    def is_fresh(self) -> bool:
        """Whether the coordinator has just answered, so that no other round can have begun."""
        fresh_until = self._numbers[1]
        return not fresh_until or self.now() < fresh_until


@cache
def _lease_of_node() -> Lease:
    return Lease(os.environ.get(RANK_STATE_ENV))


def job_time() -> float:
    """Return seconds since 1970, by the coordinator's clock on a node of a job, else by this machine's."""
    return time.time() + _lease_of_node().ahead_s()


@dataclass(frozen=True)
class Term:
    """The term that a rank writes in. It can be pickled for the rank's save process."""

    home: Path  # the folder of the run's checkpoints
    number: int  # 0: outside a job, where nothing is newer

    @classmethod
    def of_rank(cls, home: Path) -> Term:
        """Return the term that the agent passed to this rank. From now on it also fences the rank's records."""
        global _term_of_rank
        _term_of_rank = cls(home, int(os.environ.get(TERM_ENV, "0")))
        return _term_of_rank

    def check(self) -> None:
        """Raise if this round is over. Lists a folder: for commits, prunes and uploads, not for every step.

        Raises:
            Fenced: a newer round has begun, or this node's lease has run out.
            OSError: the folder of the checkpoints cannot be read.
        """
        if (left := _lease_of_node().left_s()) < 0:
            raise Fenced(f"this node has had no answer from the coordinator: its lease ran out {-left:.1f} s ago")
        if self.number and (other := newest(self.home, ROUND)) > self.number:
            raise Fenced(f"round {other} of this run has begun elsewhere: nothing more is written for {self.number}")


_term_of_rank = Term(Path(), 0)


def is_answered() -> bool:
    """Whether the coordinator has just answered this node, so that no other round can have begun."""
    return _lease_of_node().is_fresh()


def check_may_record() -> None:
    """Raise if this round is over. Does no input or output while the coordinator answers this node.

    Raises:
        Fenced, OSError: as in `Term.check`.
    """
    if not is_answered():
        try:
            _term_of_rank.check()
        except (Fenced, OSError):
            raise
        except Exception as e:  # from a store's client
            raise OSError(f"{_term_of_rank.home}: {e}") from e
