"""The state that a rank and its agent share: a memory map per rank, without system calls. No torch."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import struct
import tempfile
import time
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from fsdp_jobs.run import folders
from fsdp_jobs.run.term import shared_memory

SAVES_NOTHING = -2  # as `committed`, if the rank cannot save

_MEMORY = Path("/dev/shm")

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
    LEAVING = 4  # about to exit because of a request, so exit code 0 does not mean finished
    SAVING = 5  # waiting for a checkpoint to be written
    ENDING = 6  # the same, and no step follows


class Request(IntEnum):
    """What the coordinator requests of the ranks. They agree on the highest at a step boundary."""

    NONE = 0
    SAVE = 1  # save and continue
    PARK = 2  # save and wait: nodes join or leave
    STOP = 3  # save and exit with 75


class Report(NamedTuple):
    time: float  # seconds since 1970, 0.0 before the first report
    step: int  # steps done, -1 before the first report
    committed: int  # newest step that survives the loss of a node, -1 for none, or SAVES_NOTHING
    phase: int


class Times(NamedTuple):
    """Sums over the steps of a rank's round, without its first steps. In seconds if not said otherwise."""

    steps: float = 0.0  # the number of steps
    step: float = 0.0  # duration of the steps, the same for all ranks
    data: float = 0.0  # time that the rank waited for data
    checkpoint: float = 0.0  # time that it waited for checkpoints
    compute: float = 0.0  # duration of its blocks' forward passes, without collectives
    host: float = 0.0  # the same on the host, which launches the GPU's work
    work: float = 0.0  # number of elements in the inputs of the measured blocks
    slowest: float = 0.0  # `compute` of the slowest rank, step by step
    attention: float = 0.0  # `work`, with each element times the length of its sequence


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
        """Reset report and request for a new process of the rank."""
        self._map[:] = _REPORT.pack(0.0, -1, SAVES_NOTHING, Phase.STARTING).ljust(_SIZE, b"\0")


def make_folder() -> Path:
    """Make a folder for a node's rank states, in memory; this process removes it at exit."""
    remove_leftovers()
    folder, lock = folders.make(_MEMORY, folders.RANKS)
    multiprocessing.util.Finalize(None, folders.discard, (folder, lock), exitpriority=-100)  # after semaphores
    return folder


def remove_leftovers() -> None:
    """Remove folders of this user's killed agents, and semaphores of agents and ranks without a folder."""
    folders.remove(_MEMORY, folders.RANKS)
    for semaphore in _MEMORY.glob(f"sem.{folders.prefix(folders.RANKS)}*"):
        if not (_MEMORY / semaphore.name.removeprefix("sem.").rpartition("-")[0]).exists():
            with suppress(OSError):
                semaphore.unlink()


def keep_temporaries_in(folder: Path) -> None:
    """Make multiprocessing put sockets in an agent's folder and name semaphores after it, also in ranks.

    Both outlive a killed process; with these names the next agent finds them.
    """
    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    settings |= {"tempdir": str(folder), "semprefix": f"/{folder.name}"}


def temporaries(folder: Path) -> dict[str, str]:
    """Return the variable that gives ranks the agent's folder for temporary files, if the usual one is gone.

    On SLURM a job's private /tmp (job_container/tmpfs) is removed on all its nodes when the job loses one.
    """
    try:
        tempfile.TemporaryFile().close()
    except OSError:
        tempfile.tempdir = str(folder)
    return {"TMPDIR": str(folder)} if tempfile.tempdir == str(folder) else {}
