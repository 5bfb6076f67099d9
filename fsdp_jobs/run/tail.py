"""Read files that grow: records and logs of a run, from either end, while they are written. No torch."""

from __future__ import annotations

import heapq
import itertools
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

TIMES = "log-times.jsonl"  # beside ranks' logs: {rank: [bytes, by when they were written]}, when they have grown
_BLOCK = 1 << 16  # bytes read at once
_LONGEST_LINE = 1 << 20  # bytes; longer lines come in parts
_SHORT_LINE = 1 << 9  # bytes of a line of metrics.jsonl, about
_ERROR = re.compile(r"Error\b|Exception|CRITICAL|FATAL|WARNING|Killed|Segmentation fault")

logger = logging.getLogger(__name__)


class Tail:
    """Whole lines of a growing file, each time from where the last call stopped.

    A file may come into being later; one that has become shorter has begun again.
    """

    def __init__(self, path: Path, offset: int = 0):
        self.path = path
        self.offset = offset  # bytes of the lines read so far

    def lines(self, until: float = math.inf) -> Iterator[bytes]:
        """Yield new lines without their ends, of the first `until` bytes of the file."""
        rest, position = b"", self._begin()
        while position < until and (block := self._block(position, until)):
            position += len(block)
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                self.offset += len(line) + 1
                yield line
            if len(rest) > _LONGEST_LINE:
                self.offset += len(rest)
                yield rest
                rest = b""

    def _begin(self) -> int:
        """Return where to read on."""
        with suppress(FileNotFoundError):
            if self.path.stat().st_size < self.offset:
                self.offset = 0
        return self.offset

    def _block(self, position: int, until: float) -> bytes:
        try:
            if self.path.stat().st_size <= position:
                return b""
            with self.path.open("rb") as f:  # not kept open: there may be thousands
                f.seek(position)
                return f.read(int(min(_BLOCK, until - position)))
        except FileNotFoundError:
            return b""

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the objects of new lines of a .jsonl file."""
        return json_objects(self.lines(), self.path)

    def unfinished(self) -> bytes:
        """Return the last line when its end has not been written."""
        with self.path.open("rb") as f:
            f.seek(self.offset)
            return f.readline().rstrip(b"\n")

    def skip(self, but: int = 0) -> None:
        """Leave out what is there now, except whole lines in about the last `but` bytes, and at least one if `but`."""
        size = self.path.stat().st_size if self.path.exists() else 0
        while size > self.offset + but:
            with self.path.open("rb") as f:
                f.seek(size - but)
                f.readline()
                if not but or f.tell() < size:
                    self.offset = f.tell()
                    return
            but *= 4  # the last line is longer


def json_objects(lines: Iterable[bytes], file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects that lines of a .jsonl file hold; lines that a crash has torn are skipped and counted."""
    bad = 0
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            yield record
        else:
            bad += 1
    if bad:
        logger.warning("%s: %d lines that hold no record are skipped", file, bad)


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a .jsonl file; a last line that is still being written is left out."""
    return Tail(path).records()


def lines_backwards(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, the last one first, without reading more than that takes.

    The last may still be being written. Lines longer than 1 MB come in parts.
    """
    if not path.exists():
        return
    with path.open("rb") as f:
        position, rest = f.seek(0, os.SEEK_END), b""
        while position > 0:
            size = min(_BLOCK, position)
            position -= size
            f.seek(position)
            first, *lines = (f.read(size) + rest).split(b"\n")
            yield from (line for line in reversed(lines) if line)
            if len(first) > _LONGEST_LINE:
                yield first
                first = b""
            rest = first
        if rest:
            yield rest


def newest_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a .jsonl file, the newest first; a last line that is still being written is left out."""
    return json_objects(lines_backwards(path), path)


def lacks_line(metrics: Path, step: int, every: int) -> bool:
    """Whether a step alone has no line yet: rank 0 was lost before it had recorded what replicas captured."""
    return step % every == 0 and next(newest_json_lines(metrics), {}).get("step") == step - every


def sampled_json_lines(path: Path, count: int) -> Iterator[dict[str, Any]]:
    """Yield the objects of a .jsonl file, the newest first; of a long one about `count`, evenly spread over its bytes.

    What is read is bounded, however long the file is.
    """
    size = path.stat().st_size if path.exists() else 0
    if size <= count * _SHORT_LINE:
        yield from newest_json_lines(path)
        return
    lines = [next(lines_backwards(path), b"")]
    with path.open("rb") as f:
        for i in reversed(range(count)):
            f.seek(i * (size // count))
            f.readline()
            lines.append(f.readline())
    yield from json_objects(filter(None, dict.fromkeys(lines)), path)


def last_lines(file: Path, count: int) -> str:
    """Return the last lines of a file, empty when there is none. Only its end is read, however long it is."""
    newest = list(itertools.islice(lines_backwards(file), count))
    return "\n".join(line.decode(errors="replace").rstrip("\r") for line in reversed(newest))


class Logs:
    """New lines of all files under a folder that match a pattern; files may come into being later."""

    def __init__(self, folder: Path, pattern: str):
        self.folder, self.pattern = folder, pattern
        self._tails: dict[Path, Tail] = {}

    def skip(self, but: int = 0) -> None:
        """Leave out what is there now, except whole lines in about the last `but` bytes of all files together."""
        tails = self._all()
        for tail in tails:
            tail.skip(but // len(tails))

    def backlog(self) -> Iterator[tuple[Path, str]]:
        """Yield what is there now with the file it is from, ordered by time to about a second."""
        backlog = [_timed_lines(tail) for tail in self._all()]
        for _, file, line in heapq.merge(*backlog, key=lambda timed: timed[0]):
            yield file, line.decode(errors="replace")

    def new(self) -> Iterator[tuple[Path, str]]:
        """Yield lines that have been completed since, with the file they are from."""
        for tail in self._all():
            for line in tail.lines():
                yield tail.path, line.decode(errors="replace")

    def unfinished(self) -> Iterator[tuple[Path, str]]:
        """Yield last lines that have no end."""
        for file, tail in self._tails.items():
            if rest := tail.unfinished():
                yield file, rest.decode(errors="replace")

    def _all(self) -> list[Tail]:
        return [self._tails.setdefault(file, Tail(file)) for file in sorted(self.folder.glob(self.pattern))]


def follow_files(folder: Path, pattern: str, running: Callable[[], bool]) -> Iterator[tuple[Path, str]]:
    """Yield lines of all files that match, with the file they are from: first those there are, then new ones.

    New files are taken up as they appear, while `running()`. A line still being written is given when it is complete,
    or at the end.
    """
    logs = Logs(folder, pattern)
    yield from logs.backlog()
    while True:
        still = running()
        yield from logs.new()
        if not still:
            break
        time.sleep(0.2)
    yield from logs.unfinished()


def _timed_lines(tail: Tail) -> Iterator[tuple[float, Path, bytes]]:
    """Yield a log's lines, each with the time by which its agent saw it written; else with the file's last."""
    now = tail.path.stat()
    late = (now.st_mtime, math.inf)
    times = _times(tail.path)
    moment, size = next(times, late)
    for line in tail.lines(now.st_size):
        while size < tail.offset:
            moment, size = next(times, late)
        yield moment, tail.path, line


def _times(log: Path) -> Iterator[tuple[float, float]]:
    """Yield pairs of a time and the log's size in bytes at that time, since it has begun again last."""
    found: list[tuple[float, float]] = []
    for noted in read_json_lines(log.parent / TIMES):
        if (written := noted.get(rank_of(log))) is not None:
            size, when = written
            if found and size < found[-1][1]:
                found.clear()
            found.append((when, size))
    yield from found


def rank_of(log: Path) -> str:
    return log.stem.removeprefix("rank-")


def label(file: Path) -> str:
    """Return `node-1/rank-3` of a rank's log."""
    return f"{file.parent.name}/{file.stem}"


def numbers_of(file: Path) -> tuple[int, int, int]:
    """Return attempt, node and rank of a rank's log."""
    attempt, node, rank = (part.rpartition("-")[2] for part in (file.parts[-3], file.parts[-2], file.stem))
    return int(attempt), int(node), int(rank)


def looks_like_error(line: str) -> bool:
    return bool(_ERROR.search(line))
