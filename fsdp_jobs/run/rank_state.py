"""The state that a rank and its agent share: a small memory map per rank, without a system call. No torch."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import shutil
import struct
import tempfile
import time
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import IO, NamedTuple

from fsdp_jobs.run import folders
from fsdp_jobs.run.term import shared_memory

SAVES_NOTHING = -2  # in place of the newest checkpoint's step: the rank has nothing to save with

_REPORT = struct.Struct("<dqqi")  # time of writing, step, committed step, phase
_REQUEST = struct.Struct("<i")
_REQUEST_AT = 48
_TIMES = struct.Struct("<9d")
_TIMES_AT = 64
_SIZE = _TIMES_AT + _TIMES.size


class Phase(IntEnum):
    STARTING = 0
    TRAINING = 1
    PARKED = 2  # saved, and waiting to be stopped so that the world can change
    DONE = 3
    LEAVING = 4  # about to end because of a request: exit code 0 does not mean that it has finished
    SAVING = 5  # waiting for a checkpoint to be written, between two steps or after the last


class Request(IntEnum):
    """What the coordinator requests of the ranks. They agree on the highest at a step boundary."""

    NONE = 0
    SAVE = 1  # save and continue
    PARK = 2  # save and wait: nodes want to join
    STOP = 3  # save and exit with 75


class Report(NamedTuple):
    time: float  # seconds since 1970, 0.0 before the first report
    step: int  # steps done, -1 before the first report
    committed: int  # step of the newest checkpoint that the rank knows, -1 for none, or SAVES_NOTHING
    phase: int


class Times(NamedTuple):
    """Sums over the steps of a rank's round, without its first ones; seconds."""

    steps: float = 0.0
    step: float = 0.0  # what the steps took: for all ranks the same
    data: float = 0.0  # that the rank waited for data
    checkpoint: float = 0.0  # that it waited for checkpoints
    compute: float = 0.0  # of its blocks' forward passes, without collectives
    host: float = 0.0  # of the same on the host, which a GPU follows
    work: float = 0.0  # elements that were put into the blocks that are measured
    slowest: float = 0.0  # `compute` of the slowest rank, step by step
    attention: float = 0.0  # `work`, each element times the length of its sequence


class RankState:
    """One rank's map. The rank writes reports and reads requests; the agent does the reverse."""

    def __init__(self, folder: Path | str, local_rank: int):
        self._map = shared_memory(Path(folder) / str(local_rank), _SIZE)

    def report(self, step: int, committed: int, phase: Phase) -> None:
        _REPORT.pack_into(self._map, 0, time.time(), step, committed, phase)

    def read(self) -> Report:
        return Report(*_REPORT.unpack_from(self._map, 0))

    def report_times(self, times: Times) -> None:
        _TIMES.pack_into(self._map, _TIMES_AT, *times)

    def times(self) -> Times:
        return Times(*_TIMES.unpack_from(self._map, _TIMES_AT))

    def request(self, request: Request) -> None:
        _REQUEST.pack_into(self._map, _REQUEST_AT, request)

    def requested(self) -> Request:
        return Request(_REQUEST.unpack_from(self._map, _REQUEST_AT)[0])

    def clear(self) -> None:
        """Forget report and request, for a new process of the rank."""
        self._map[:] = _REPORT.pack(0.0, -1, SAVES_NOTHING, Phase.STARTING).ljust(_SIZE, b"\0")


def make_folder() -> Path:
    """Make a folder for a node's rank states, in memory where possible; this process removes it at its end."""
    remove_what_is_left()
    folder, lock = folders.make(_base(), folders.RANKS)
    multiprocessing.util.Finalize(None, _remove, (folder, lock), exitpriority=-100)  # after this process's semaphores
    return folder


def remove_what_is_left() -> None:
    """Remove the folders of this user's agents that were killed, and semaphores of agents and ranks without one."""
    base = _base()
    folders.remove(base, folders.RANKS)
    for semaphore in base.glob(f"sem.{folders.prefix(folders.RANKS)}*"):
        if not (base / semaphore.name.removeprefix("sem.").rpartition("-")[0]).exists():
            with suppress(OSError):
                semaphore.unlink()


def _base() -> Path:
    shm = Path("/dev/shm")
    return shm if shm.is_dir() else Path(tempfile.gettempdir())


def _remove(folder: Path, lock: IO[str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    lock.close()


def keep_temporaries_in(folder: Path) -> None:
    """Let multiprocessing keep sockets in an agent's folder, and name semaphores after it, also in its ranks.

    Both outlive a process that is killed; here the next agent finds them.
    """
    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    settings |= {"tempdir": str(folder), "semprefix": f"/{folder.name}"}
