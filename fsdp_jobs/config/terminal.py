"""What commands print: text for people, JSON for scripts. No torch."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

VERSION = 1  # of what is printed for scripts; grows when a key goes, or changes its meaning
_NARROWEST = 30  # columns of a table's last cell

# What runs and launchers say is shown as it is.
console = Console(highlight=False, markup=False, emoji=False)
errors = Console(stderr=True, highlight=False, markup=False, emoji=False)


def say(what: RenderableType, style: str | None = None) -> None:
    """Print text in lines as long as they are, or what is drawn as wide as the terminal."""
    console.print(what, style=style, soft_wrap=isinstance(what, str | Text))


def complain(what: str, style: str | None = None) -> None:
    """Print text on stderr."""
    errors.print(what, style=style, soft_wrap=True)


def show_table(headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[str] = ()) -> None:
    """Print a table; in a terminal the last cell goes on below itself, elsewhere a row is a line.

    Args:
        headings: of the columns.
        rows: a cell for each heading.
        numbers: headings of columns that are aligned to the right.
    """
    cells = [list(headings), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)][:-1]
    left = sum(widths) + 2 * len(widths)
    room = max(_NARROWEST, console.width - left)
    lines = []
    for row in cells:
        aligned = [
            cell.rjust(w) if heading in numbers else cell.ljust(w)
            for heading, cell, w in zip(headings, row, widths, strict=False)
        ]
        first, *rest = (textwrap.wrap(row[-1], room) or [""]) if console.is_terminal else [row[-1]]
        lines.append("  ".join([*aligned, first]).rstrip())
        lines += [" " * left + line for line in rest]
    say("\n".join(lines))


def tell(values: Mapping[str, Any] | list[dict[str, Any]]) -> None:
    """Print an object, or a list of them, on a line."""
    objects = values if isinstance(values, list) else [values]
    versioned = [{"version": VERSION, **each} for each in objects]
    sys.stdout.write(json.dumps(finite(versioned if objects is values else versioned[0])) + "\n")
    sys.stdout.flush()


def finite(values: Any) -> Any:
    """Return the same with null for NaN and infinities, which are no JSON."""
    return json.loads(json.dumps(values), parse_constant=lambda _: None)
