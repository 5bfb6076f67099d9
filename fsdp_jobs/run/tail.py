"""Reading the logs of a run while they are written. No torch."""

from __future__ import annotations

import heapq
import itertools
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fsdp_jobs.run.directory import lines_backwards

TIMES = "log-times.jsonl"  # beside ranks' logs: {rank: [bytes, by when they were written]}, when they have grown
_BLOCK = 1 << 16  # bytes read at once
_LONGEST_LINE = 1 << 20  # longer ones come in parts
_ERROR = re.compile(r"Error\b|Exception|CRITICAL|FATAL|WARNING|Killed|Segmentation fault")


class _Log:
    """A file that grows, read in blocks."""

    def __init__(self, file: Path):
        self.file, self.place, self.rest = file, 0, b""

    def lines(self, until: float = math.inf) -> Iterator[bytes]:
        """Whole lines from where the last call stopped, in the first `until` bytes of the file."""
        while self.place < until:
            with self.file.open("rb") as f:  # not kept open: there may be thousands
                f.seek(self.place)
                block = f.read(int(min(_BLOCK, until - self.place)))
            if not block:
                return
            self.place += len(block)
            *lines, self.rest = (self.rest + block).split(b"\n")
            if len(self.rest) > _LONGEST_LINE:
                lines, self.rest = [*lines, self.rest], b""
            yield from lines

    def timed_lines(self, until: int) -> Iterator[tuple[float, Path, bytes]]:
        """The same with the time by which each had been written, as its agent noted; else the file's last."""
        late = (self.file.stat().st_mtime, math.inf)
        times = self._times()
        now, size = next(times, late)
        offset = 0
        for line in self.lines(until):
            offset += len(line) + 1
            while size < offset:
                now, size = next(times, late)
            yield now, self.file, line

    def _times(self) -> Iterator[tuple[float, float]]:
        rank, noted = self.file.stem.removeprefix("rank-"), self.file.parent / TIMES
        for line in _Log(noted).lines() if noted.exists() else ():
            if (written := json.loads(line).get(rank)) is not None:
                size, when = written
                yield when, size


def follow_files(folder: Path, pattern: str, running: Callable[[], bool]) -> Iterator[tuple[Path, str]]:
    """Lines of all files that match, with the file they are from: what is there, by time to about a second, then what
    comes while `running()`.

    New files are taken up as they appear. A line still being written is given when it is complete, or at the end.
    """
    logs = {file: _Log(file) for file in sorted(folder.glob(pattern))}
    backlog = [log.timed_lines(file.stat().st_size) for file, log in logs.items()]
    for _, file, line in heapq.merge(*backlog, key=lambda timed: timed[0]):
        yield file, line.decode(errors="replace")
    while True:
        still = running()
        for file in sorted(folder.glob(pattern)):
            log = logs.setdefault(file, _Log(file))
            for line in log.lines():
                yield file, line.decode(errors="replace")
        if not still:
            break
        time.sleep(0.2)
    for file, log in logs.items():
        if log.rest:
            yield file, log.rest.decode(errors="replace")


def label(file: Path) -> str:
    """`node-1/rank-3` of a rank's log."""
    return f"{file.parent.name}/{file.stem}"


def looks_like_error(line: str) -> bool:
    return bool(_ERROR.search(line))


def tail(file: Path, lines: int) -> str:
    """The last lines of a file, empty when there is none. Only its end is read, however long it is."""
    last = list(itertools.islice(lines_backwards(file), lines))
    return "\n".join(line.decode(errors="replace").rstrip("\r") for line in reversed(last))
