"""What a rank and its agent tell each other without a system call: a 64-byte shared memory map a rank. No torch."""

from __future__ import annotations

import mmap
import os
import struct
import time
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

_REPORT = struct.Struct("<dqqi")  # time of writing, step, committed step, phase
_REQUEST = struct.Struct("<i")
_REQUEST_AT = 48
_SIZE = 64


class Phase(IntEnum):
    STARTING = 0
    TRAINING = 1
    SAVING = 2
    PARKED = 3  # saved, and waiting to be stopped so that the world can change
    DONE = 4
    LEAVING = 5  # a program has seen that it is to leave: when it ends, it has not finished


class Request(IntEnum):
    """What the coordinator asks of the ranks. They agree on the highest at a step boundary."""

    NONE = 0
    SAVE = 1  # save and go on
    PARK = 2  # save and wait: nodes want to join
    STOP = 3  # save and exit with 75


class Report(NamedTuple):
    time: float  # seconds since 1970, 0.0 before the first report
    step: int  # steps done
    committed: int  # step of the newest checkpoint this life knows, -1 for none
    phase: int


class Board:
    """One rank's map. The rank writes reports and reads requests; the agent the other way round."""

    def __init__(self, folder: Path | str, local_rank: int):
        path = Path(folder) / str(local_rank)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, _SIZE)
            self._map = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)

    def report(self, step: int, committed: int, phase: Phase) -> None:
        _REPORT.pack_into(self._map, 0, time.time(), step, committed, phase)

    def read(self) -> Report:
        return Report(*_REPORT.unpack_from(self._map, 0))

    def ask(self, request: Request) -> None:
        _REQUEST.pack_into(self._map, _REQUEST_AT, request)

    def asked(self) -> Request:
        return Request(_REQUEST.unpack_from(self._map, _REQUEST_AT)[0])

    def clear(self) -> None:
        """For a new life of the rank: no report, no request."""
        self._map[:] = bytes(_SIZE)
