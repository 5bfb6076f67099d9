"""Read growing files, the records and logs of a run, from either end while they are written. No torch."""

from __future__ import annotations

import heapq
import itertools
import json
import logging
import math
import os
import re
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fsdp_jobs.run.files import look_again
from fsdp_jobs.run.record import JsonObject

TIMES = "log-times.jsonl"  # beside ranks' logs: {rank: [size in bytes, time]} whenever they have grown
_BLOCK = 1 << 16  # bytes read at once
_SMALL_BLOCK, _TOGETHER = 1 << 12, 1 << 26  # where thousands of files are read together: least of each, and of all
_LONGEST_LINE = 1 << 20  # bytes; longer lines come in parts
_LONGEST_PAUSE_S = 5.0  # between two looks: the time of one includes that of its reader, which may stand still
_SHORT_LINE = 1 << 9  # bytes of a line of metrics.jsonl, about
_ERROR = re.compile(
    r"Error\b|Exception|Traceback|ERROR\b|CRITICAL|FATAL|Fatal|WARN|Watchdog caught|Killed|Segmentation fault|Bus error"
)
_MOVE = re.compile(r"\x1b\[[\d;?]*[A-HJKSTfhl]")  # of the cursor; colours stay

_parse = msgspec.json.Decoder().decode

logger = logging.getLogger(__name__)


@dataclass
class Tail:
    """The whole lines of a growing file; each call continues where the last one stopped.

    The file may be created later; if it has become shorter, it is read from its beginning.
    """

    path: Path
    offset: int = 0  # bytes of the lines read so far
    block: int = _BLOCK  # bytes read at once
    has_bars: bool = False  # a carriage return ends a line, too: of a progress bar, which overwrites it

    def lines(self, until: float = math.inf) -> Iterator[bytes]:
        """Yield new lines in the first `until` bytes of the file, without line ends."""
        size = size_of(self.path)
        if size < self.offset:
            self.offset = 0
        rest, position = b"", self.offset
        while block := self._block(position, int(min(size, until)) - position):
            position += len(block)
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                self.offset += len(line) + 1
                yield line
            if len(rest) > _LONGEST_LINE:
                self.offset += len(rest)
                yield rest
                rest = b""

    def _block(self, position: int, left: int) -> bytes:
        if left > 0:
            with suppress(FileNotFoundError), self.path.open("rb") as f:  # not kept open: there may be thousands
                f.seek(position)
                block = f.read(min(self.block, left))
                return block.replace(b"\r", b"\n") if self.has_bars else block
        return b""

    def records(self) -> Iterator[JsonObject]:
        """Yield the objects of new lines of a .jsonl file."""
        return json_objects(self.lines(), self.path)

    def unfinished(self) -> bytes:
        """Return the last line if its end has not been written yet."""
        with self.path.open("rb") as f:
            f.seek(self.offset)
            line = f.readline().rstrip(b"\n")
        return line.partition(b"\r")[0] if self.has_bars else line  # a bar may have been drawn anew since `lines`

    def skip(self, but: int = 0) -> None:
        """Skip the present content, except whole lines in about the last `but` bytes, and at least one if `but`."""
        with suppress(FileNotFoundError), self.path.open("rb") as f:
            size = f.seek(0, os.SEEK_END)
            while size > self.offset + but:
                f.seek(size - but)
                f.readline()
                if not but or f.tell() < size:
                    self.offset = f.tell()
                    return
                but *= 4  # the last line is longer


def size_of(file: Path) -> int:
    """Return a file's size in bytes, 0 if it does not exist."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return file.stat().st_size
    look_again(file)
    with suppress(FileNotFoundError, NotADirectoryError):
        return file.stat().st_size
    return 0


def is_cut(descriptor: int) -> bool:
    """Whether an open file's last line has no end: its writer was killed, or has more to write."""
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


def json_objects(lines: Iterable[bytes], file: Path) -> Iterator[JsonObject]:
    """Yield the objects in lines of a .jsonl file; lines torn by a crash are skipped and counted."""
    bad = 0
    for line in lines:
        if isinstance(record := _parsed(line), dict):
            yield record
        else:
            bad += 1
    if bad:
        logger.warning("%s: %d lines that hold no record are skipped", file, bad)


def _parsed(line: bytes) -> object:
    """Parse JSON; None if it is torn. Python's own parser, which takes four times as long, also takes NaN."""
    for parse in (_parse, json.loads):
        with suppress(ValueError):
            return parse(line)
    return None


def read_json_lines(path: Path) -> Iterator[JsonObject]:
    """Yield the objects of a .jsonl file, except an unfinished last line."""
    return Tail(path).records()


def lines_backwards(path: Path, begin: int = 0) -> Iterator[bytes]:
    """Yield the lines of a file behind its first `begin` bytes, the last one first, reading only what is consumed.

    The last line may be unfinished. Lines longer than 1 MB come in parts.
    """
    with suppress(FileNotFoundError), path.open("rb") as f:
        position, rest = f.seek(0, os.SEEK_END), b""
        while position > begin:
            size = min(_BLOCK, position - begin)
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


def newest_json_lines(path: Path) -> Iterator[JsonObject]:
    """Yield the objects of a .jsonl file, newest first, except an unfinished last line."""
    return json_objects(lines_backwards(path), path)


def lacks_line(metrics: Path, step: int, every: int) -> bool:
    """Whether only this step lacks its line: rank 0 was lost before recording it, but replicas have snapshots of it."""
    return step % every == 0 and next(newest_json_lines(metrics), {}).get("step") == step - every


def sampled_json_lines(path: Path, count: int) -> Iterator[JsonObject]:
    """Yield the objects of a .jsonl file, newest first; for a long one about `count`, evenly spread over its bytes.

    The number of bytes read is bounded, however long the file is.
    """
    size = size_of(path)
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


def last_lines(file: Path, count: int, begin: int = 0) -> str:
    """Return the last lines of a file behind its first `begin` bytes, empty if it cannot be read."""
    newest = list[bytes]()
    with suppress(OSError):  # its storage may not answer
        newest += itertools.islice(lines_backwards(file, begin), count)
    return "\n".join(map(shown, reversed(newest)))


def shown(line: bytes) -> str:
    """Return what a terminal shows of a line: a progress bar replaces itself after each carriage return."""
    return _MOVE.sub("", line.decode(errors="replace")).rstrip("\r").rpartition("\r")[2]


class Logs:
    """New lines, as `shown`, of all files under a folder that match a pattern; files may be created later."""

    def __init__(self, folder: Path, pattern: str):
        self.folder, self.pattern = folder, pattern
        self._tails: dict[Path, Tail] = {}

    def skip(self, but: int = 0) -> None:
        """Skip the present content, except whole lines in about the last `but` bytes of all files together."""
        tails = self._all()
        for tail in tails:
            tail.skip(but // len(tails))

    def backlog(self) -> Iterator[tuple[Path, str]]:
        """Yield the present lines, each with its file, ordered by time to about a second."""
        tails = self._all()
        for tail in tails:  # a block of each is in memory
            tail.block = min(_BLOCK, max(_SMALL_BLOCK, _TOGETHER // len(tails)))
        nodes = [list(node) for _, node in itertools.groupby(tails, lambda tail: tail.path.parent)]
        backlog = [_timed_lines(tail, times) for node in nodes for tail, times in zip(node, _times(node), strict=True)]
        for _, file, line in heapq.merge(*backlog, key=lambda timed: timed[0]):
            yield file, shown(line)

    def new(self, most: float = math.inf) -> Iterator[tuple[Path, str]]:
        """Yield lines completed since the last call, each with its file: of each file about the last `most` bytes."""
        for tail in self._all():
            before = tail.offset
            if size_of(tail.path) - before > most:
                tail.skip(but=int(most))
            if tail.offset > before:  # else all is one line, as of a progress bar
                yield tail.path, f"... {(tail.offset - before) / 1e6:,.0f} MB left out"
            for line in tail.lines():
                yield tail.path, shown(line)

    def unfinished(self) -> Iterator[tuple[Path, str]]:
        """Yield unfinished last lines, each with its file."""
        for file, tail in self._tails.items():
            if rest := tail.unfinished():
                yield file, shown(rest)

    def _all(self) -> list[Tail]:
        files = sorted(self.folder.glob(self.pattern), key=str)  # comparing paths is slow
        return [self._tails.setdefault(file, Tail(file)) for file in files]


def follow_files(folder: Path, pattern: str, running: Callable[[], bool]) -> Iterator[tuple[Path, str]]:
    """Yield the lines of all matching files, each with its file: first the present lines, then new ones.

    New files are included as they appear, while `running()`. An unfinished line is yielded when it is complete, or at
    the end.
    """
    logs = Logs(folder, pattern)
    yield from logs.backlog()
    while True:
        still, began = running(), time.monotonic()
        yield from logs.new()
        if not still:
            break
        time.sleep(pause_s(began, 0.2))
    yield from logs.unfinished()


def pause_s(began: float, least: float) -> float:
    """Return how long to pause after a look that began then: longer after one at thousands of files."""
    return max(least, min(_LONGEST_PAUSE_S, 4 * (time.monotonic() - began)))


def _timed_lines(tail: Tail, times: Iterator[tuple[float, float]]) -> Iterator[tuple[float, Path, bytes]]:
    """Yield a log's lines, each with the time when its agent saw it; lines after the last such time get the file's."""
    now = tail.path.stat()
    late = (math.inf, now.st_mtime)
    size, moment = next(times, late)
    for line in tail.lines(now.st_size):
        while size < tail.offset:
            size, moment = next(times, late)
        yield moment, tail.path, line


def _times(node: Sequence[Tail]) -> list[Iterator[tuple[float, float]]]:
    """Return for each log of a node pairs (size in bytes, time when it had that size), from its offset to its end.

    Those from before its last rotation are left out.
    """
    found = {rank_of(tail.path): array("d") for tail in node}  # there may be millions
    begins = {rank: tail.offset for rank, tail in zip(found, node, strict=True)}  # of ranks whose times go further back
    for noted in newest_json_lines(node[0].path.parent / TIMES):
        for rank in begins.keys() & noted:
            size, when = noted[rank]
            if size <= begins[rank] or (found[rank] and size > found[rank][-1]):
                del begins[rank]
            else:
                found[rank].extend((when, size))
        if not begins:
            break
    oldest_first = map(reversed, found.values())
    return [zip(numbers, numbers, strict=True) for numbers in oldest_first]


def rank_of(log: Path) -> str:
    return log.stem.removeprefix("rank-")


def label(file: Path) -> str:
    """Return `node-1/rank-3` of a rank's log."""
    return f"{file.parent.name}/{file.stem}"


def numbers_of(file: Path) -> tuple[int, int, int]:
    """Return the attempt, node and rank of a rank's log."""
    attempt, node, rank = (part.rpartition("-")[2] for part in (file.parts[-3], file.parts[-2], file.stem))
    return int(attempt), int(node), int(rank)


def looks_like_error(line: str) -> bool:
    return bool(_ERROR.search(line))
