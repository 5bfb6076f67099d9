"""The checksum of checkpoints and snapshots. No torch."""

from __future__ import annotations

import xxhash


def checksum(data: bytes | bytearray | memoryview) -> str:
    """Return XXH3 of 128 bits (Y. Collet, xxhash.com)."""
    return xxhash.xxh3_128_hexdigest(data)
