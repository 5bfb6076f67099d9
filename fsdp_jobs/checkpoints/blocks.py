"""Checksum the blocks of a file while it is written, and verify them while it is read. No torch.

A block ends where a large write begins or ends, or after 4 MiB. `torch.save` writes a tensor in one call, so large
tensors get blocks of their own, and a reader verifies only what it reads. Small tensors share blocks, which keeps the
manifest short; those at the beginning of a file, which all ranks may read, share none with later ones.
"""

from __future__ import annotations

import io
import mmap
import os
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from fsdp_jobs.run.checksum import checksum, fill
from fsdp_jobs.run.files import file_system
from fsdp_jobs.run.threads import begin_in

SUMS = "xxh3_128"  # manifest key of a file's block ends and checksums; earlier versions have crc32 instead
FileSums = dict[str, Any]  # a file in a manifest: its size as `bytes`, and the ends and checksums of its blocks
_BLOCK = 1 << 22  # bytes, at most
SMALL = 1 << 16  # bytes; shorter writes are small
_LARGE = 1 << 22  # bytes from which a write gets blocks of its own, except for its tail
_TAIL = 1 << 12  # bytes of that tail: a zip reader looks this far back from the end of the file
_BATCH = 1 << 26  # bytes read back at once, while writing continues
_HELD = 4  # blocks that a reader caches, because callers read them in parts
IN_TORCH = (RuntimeError, SystemError)  # what torch raises for an error of its file; the second since Python 3.13


class _Block(NamedTuple):
    begin: int  # bytes from the beginning of the file
    end: int
    sum: str

    def fault(self, file: Any, into: memoryview) -> str:
        """Read this block from the file's position on. Returns how it differs, empty if it does not."""
        if fill(file, into) and checksum(into) == self.sum:
            return ""
        return f"differs from its checksum in bytes {self.begin} to {self.end}"


class Damaged(OSError):
    """A file differs from what was written."""


class ReadBack:
    """Syncs a file to disk in batches while it is being written, and verifies what the disk returns."""

    def __init__(self, file: Path):
        self._file = file.open("rb", buffering=0)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-back")
        self._batches: list[Future[str]] = []

    def begin_batch(self, blocks: Sequence[_Block]) -> None:
        """Begin to verify the next blocks, which must have been passed to the kernel."""
        self._batches.append(begin_in(self._thread, self._compare, blocks))

    def _compare(self, blocks: Sequence[_Block]) -> str:
        os.fdatasync(self._file.fileno())
        begin = blocks[0].begin
        page = begin - begin % mmap.PAGESIZE
        os.posix_fadvise(self._file.fileno(), page, blocks[-1].end - page, os.POSIX_FADV_DONTNEED)  # drops clean pages
        self._file.seek(begin)
        return _fault(self._file, blocks)

    def fault(self) -> str:
        """Wait for all batches. Returns what differs, empty for nothing.

        Raises:
            OSError: from the disk.
        """
        return next(filter(None, [batch.result() for batch in self._batches]), "")

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._file.close()


@contextmanager
def reading_back(file: Path) -> Iterator[ReadBack | None]:
    """Yield a `ReadBack` of a file that is open for writing.

    Yields None for object stores, mounted ones included: each read or sync before the end may upload the file again.
    """
    if not isinstance(file, Path) or _is_mounted_store(file):
        yield None
        return
    with closing(ReadBack(file)) as beside:
        yield beside


def _is_mounted_store(file: Path) -> bool:
    """Whether a file is on a FUSE mount, such as s3fs or gcsfuse."""
    return file_system(file).startswith("fuse")


class SummedFile:
    """A binary file, open for writing, that checksums what is written to it."""

    def __init__(self, raw: IO[bytes], beside: ReadBack | None = None):
        """`beside`: reads back what was written, while writing continues."""
        self.raw, self.size, self._beside = raw, 0, beside
        self.error: OSError | None = None
        self._blocks: list[_Block] = []
        self._given = 0  # how many blocks are being read back
        self._pending = bytearray()  # writes whose block is not complete
        self._are_small = True  # all writes so far

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        ends_small = self._are_small and len(view) >= SMALL
        if len(view) >= _LARGE or len(self._pending) + len(view) > _BLOCK or ends_small:
            self._flush()
        self._are_small &= not ends_small
        at = len(view) - _TAIL if len(view) >= _LARGE else 0
        for begin in range(0, at, _BLOCK):
            self._write(view[begin : min(at, begin + _BLOCK)])
        self._pending += view[at:]
        return len(view)

    def _write(self, block: Any) -> None:
        begin, self.size = self.size, self.size + len(block)
        self._blocks.append(_Block(begin, self.size, checksum(block)))
        try:
            self.raw.write(block)
            if self.size - self._blocks[self._given].begin > _BATCH:
                self._read_back(len(self._blocks) - 1)  # the last block's last page is not full
        except OSError as e:
            self.error = e  # torch.save reports it as a wrong file position
            raise

    def _read_back(self, count: int) -> None:
        if self._beside is not None and count > self._given:
            self.raw.flush()
            self._beside.begin_batch(self._blocks[self._given : count])
            self._given = count

    def _flush(self) -> None:
        if self._pending:
            block, self._pending = self._pending, bytearray()
            self._write(block)

    def tell(self) -> int:
        return self.size + len(self._pending)

    def flush(self) -> None:
        """Do nothing: a flush after each tensor must not end a block."""

    def fileno(self) -> int:
        self._flush()
        self.raw.flush()  # before an fsync
        return self.raw.fileno()

    def close(self) -> None:
        self._flush()
        self._read_back(len(self._blocks))
        self.raw.close()

    def sums(self) -> FileSums:
        """Return this file's entry in a manifest, once it is closed."""
        return {"bytes": self.size, SUMS: " ".join(f"{block.end} {block.sum}" for block in self._blocks)}


class VerifiedFile(io.RawIOBase):
    """A file, open for reading, that verifies a block's checksum before it returns any of the block."""

    def __init__(self, raw: IO[bytes], name: str, blocks: Sequence[_Block]):
        self.raw, self.name, self._blocks = raw, name, blocks
        self.error: OSError | None = None
        self._ends = [block.end for block in blocks]
        self._at = 0
        self._held = lru_cache(_HELD)(self._read_alone)

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, up to the end of the file; raises Damaged for a block that differs."""
        view, filled = memoryview(buffer).cast("B"), 0
        while filled < len(view) and (number := bisect_right(self._ends, self._at)) < len(self._ends):
            block = self._blocks[number]
            size = min(block.end - self._at, len(view) - filled)
            if size == block.end - block.begin:
                self._read(block, view[filled : filled + size])
            else:
                view[filled : filled + size] = self._held(block)[self._at - block.begin :][:size]
            self._at, filled = self._at + size, filled + size
        return filled

    def forget(self) -> None:
        """Free the cached blocks: a reference cycle may keep this reader alive."""
        self._held.cache_clear()

    def _read_alone(self, block: _Block) -> memoryview:
        into = memoryview(bytearray(block.end - block.begin))
        self._read(block, into)
        return into

    def _read(self, block: _Block, into: memoryview) -> None:
        try:
            self.raw.seek(block.begin)
            if fault := block.fault(self.raw, into):
                raise Damaged(f"{self.name} {fault}")
        except OSError as e:
            self.error = e  # torch.load may raise another one
            raise

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        size = self._ends[-1] if self._ends else 0
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


@contextmanager
def open_verified(file: Path, expected: FileSums | None) -> Iterator[IO[bytes]]:
    """Open a file. Reading a block that differs from the manifest raises Damaged.

    Args:
        expected: the file's entry in the manifest, None without a manifest. A file from an earlier version, with one
            checksum for all of it, is read whole first.
    """
    if expected is None or SUMS not in expected:
        if expected is not None and (fault := difference(file, expected)):
            raise Damaged(f"{file.name} {fault}")
        with file.open("rb") as raw:
            yield raw
        return
    opened: Any = file.open("rb", buffering=0) if isinstance(file, Path) else file.open("rb")
    with opened as raw:
        verified = VerifiedFile(raw, file.name, _blocks_of(expected))
        try:
            yield cast(IO[bytes], verified)
        except IN_TORCH as e:
            raise verified.error or e from e
        finally:
            verified.forget()


def difference(file: Path, expected: FileSums, from_disk: bool = False) -> str:
    """Return where a file differs from its manifest entry, empty for nowhere; `from_disk` bypasses the page cache.

    Raises:
        OSError: it cannot be read.
    """
    with file.open("rb") as opened:
        f: Any = opened
        if from_disk and isinstance(file, Path):
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # drops clean pages
        if SUMS not in expected:
            value, block = 0, memoryview(bytearray(_BLOCK))
            while size := f.readinto(block):
                value = zlib.crc32(block[:size], value)
            return "" if value == expected["crc32"] else f"differs from its checksum ({value:08x})"
        return _fault(f, _blocks_of(expected))


def _blocks_of(expected: FileSums) -> list[_Block]:
    words = expected[SUMS].split()
    ends = [int(end) for end in words[::2]]
    begins = [0, *ends][: len(ends)]
    return [_Block(*block) for block in zip(begins, ends, words[1::2], strict=True)]


def _fault(file: Any, blocks: Sequence[_Block]) -> str:
    """Read blocks from the file's position on. Returns what differs, empty for nothing."""
    buffer = memoryview(bytearray(_BLOCK))
    faults = (block.fault(file, buffer[: block.end - block.begin]) for block in blocks)
    return next(filter(None, faults), "")
