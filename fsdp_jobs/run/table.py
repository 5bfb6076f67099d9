"""Plain text for terminals: tables, and durations in them. No torch."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Sequence

_NARROWEST = 30  # columns of the last cell


def table_lines(
    headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[str] = (), width: int | None = None
) -> Iterator[str]:
    """Yield the lines of a table, the headings first.

    Args:
        headings: of the columns.
        rows: a cell for each heading.
        numbers: headings of columns that are aligned to the right.
        width: columns of the terminal: the last cell goes on below itself. None: a line each, as long as it is.
    """
    cells = [list(headings), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)][:-1]
    left = sum(widths) + 2 * len(widths)
    room = None if width is None else max(_NARROWEST, width - left)
    for row in cells:
        aligned = [
            cell.rjust(w) if heading in numbers else cell.ljust(w)
            for heading, cell, w in zip(headings, row, widths, strict=False)
        ]
        first, *rest = [row[-1]] if room is None else textwrap.wrap(row[-1], room) or [""]
        yield "  ".join([*aligned, first]).rstrip()
        yield from (" " * left + line for line in rest)


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


def counted(number: int, noun: str) -> str:
    """Format as `1 node`, `4 nodes`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def listed(words: Sequence[str], most: int = 5, separator: str = ", ", of: str = "") -> str:
    """List up to `most` words, and say how many more there are, `of` a kind: `a, b and 3 more ranks`."""
    more = f" and {len(words) - most:,} more{of and f' {of}'}" if len(words) > most else ""
    return separator.join(words[:most]) + more


def ago(seconds: float | None) -> str:
    """Format as `5s ago`, or a dash."""
    return "-" if seconds is None else f"{duration(seconds)} ago"
