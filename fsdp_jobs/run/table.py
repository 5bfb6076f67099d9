"""Format durations, sizes, counts and long lists. No torch."""

from __future__ import annotations

from collections.abc import Sequence


def duration(seconds: float | None) -> str:
    """Format as `5d02h`, `2h05m`, `3m20s`, `12s`, `0.3s`, or a dash."""
    if seconds is None:
        return "-"
    if 0 < seconds < 1:
        return f"{seconds:.1g}s"
    whole = round(seconds)
    if whole >= 2 * 86400:
        return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def size(n: float) -> str:
    """Format bytes in the largest unit that leaves at least 1: 15.2 GiB."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= scale:
            return f"{n / scale:.1f} {unit}"
    return f"{n:.0f} B"


def percent(share: float, digits: int = 0) -> str:
    """Format as `99.9%`; only a share of 1 is 100%."""
    text = f"{share:.{digits}%}"
    return text if share == 1 or not text.startswith("100") else f"{100 - 0.1**digits:.{digits}f}%"


def counted(number: int, noun: str) -> str:
    """Format as `1 node`, `4 nodes`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def listed(words: Sequence[str], most: int = 5, separator: str = ", ", of: str = "") -> str:
    """List up to `most` words and the number of further ones, with the noun `of`: `a, b and 3 more ranks`."""
    more = f" and {len(words) - most:,} more{of and f' {of}'}" if len(words) > most else ""
    return separator.join(words[:most]) + more
