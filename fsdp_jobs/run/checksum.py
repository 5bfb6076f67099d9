"""Read the files of checkpoints and snapshots, and their checksum. No torch."""

from __future__ import annotations

import os
from typing import Any

import xxhash

_BLOCK = 1 << 20  # bytes read at once; they fit the CPU's cache


def checksum(data: bytes | bytearray | memoryview) -> str:
    """Return XXH3 of 128 bits (Y. Collet, xxhash.com)."""
    return xxhash.xxh3_128_hexdigest(data)


def checksum_of_part(descriptor: int, begin: int, size: int) -> str:
    """Return the checksum of a part of an open file; if the file ends within the part, up to its end."""
    total, block = xxhash.xxh3_128(), memoryview(bytearray(min(_BLOCK, size)))
    for at in range(begin, begin + size, _BLOCK):
        total.update(block[: os.preadv(descriptor, [block[: begin + size - at]], at)])
    return total.hexdigest()


def fill(file: Any, into: memoryview) -> bool:
    """Read until `into` is full; return whether it is. A file of a store or a socket may return less than asked for."""
    filled = 0
    while filled < len(into) and (came := file.readinto(into[filled:])):
        filled += came
    return filled == len(into)
