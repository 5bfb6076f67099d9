"""Print the output of commands: text for people, JSON for scripts. No torch."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

from rich.console import Console, RenderableType
from rich.text import Text
from rich.theme import Theme

VERSION = 1  # of the JSON for scripts; grows when a key is removed or changes its meaning
_NARROWEST = 30  # columns of a table's last cell
_NARROWEST_TABLE = 60  # columns
_THEME = Theme({"bar.finished": "green"})  # rich's green of a full bar is the grey of an empty one in 16 colours


class _Console(Console):
    """Shows text of runs and launchers verbatim, without markup."""

    ends_with_its_reader = True  # else the command continues without output

    def __init__(self, stderr: bool = False):
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False, theme=_THEME)

    def write_to(self, stderr: bool) -> None:
        """Write to stderr or to stdout from now on, with colours if that is a terminal."""
        self.stderr = stderr
        self._color_system = self._detect_color_system()

    @contextmanager
    def widened(self) -> Iterator[None]:
        """Print at least as wide as tables need: a narrower terminal breaks their lines, but no cell is cut."""
        before, self._width = self._width, max(self.width, _NARROWEST_TABLE)
        try:
            yield
        finally:
            self._width = before

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError again, or print nothing more; rich would exit with 1."""
        silence(self.file)
        if self.ends_with_its_reader:
            raise BrokenPipeError


def silence(output: IO[str]) -> None:
    """Drop what is still written to an output that has no reader or no room."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())


console = _Console()
errors = _Console(stderr=True)


def say(what: RenderableType, style: str | None = None) -> None:
    """Print text without wrapping its lines, or a rich renderable at the width of the terminal."""
    if isinstance(what, str | Text):
        console.print(what, style=style, soft_wrap=True)
        return
    with console.widened():
        console.print(what, style=style)


def complain(what: str, style: str | None = None) -> None:
    """Print text on stderr."""
    errors.print(what, style=style, soft_wrap=True)


def show_table(headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[str] = ()) -> None:
    """Print a table; in a terminal the last cell wraps within its column, elsewhere each row is one line.

    Args:
        headings: of the columns.
        rows: a cell for each heading.
        numbers: headings of the right-aligned columns.
    """
    cells = [list(headings), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)][:-1]
    left = " " * (sum(widths) + 2 * len(widths))
    width = max(len(left) + _NARROWEST, console.width) if console.is_terminal else sys.maxsize
    lines = []
    for row in cells:
        aligned = [
            f"{cell:{'>' if heading in numbers else '<'}{w}}  "
            for heading, cell, w in zip(headings, row, widths, strict=False)
        ]
        start = "".join(aligned)
        lines += textwrap.wrap(row[-1], width, initial_indent=start, subsequent_indent=left) or [start]
    say("\n".join(map(str.rstrip, lines)))


def print_json(values: Mapping[str, Any] | list[dict[str, Any]]) -> None:
    """Print an object, or a list of objects, as one line of JSON."""
    objects = values if isinstance(values, list) else [values]
    versioned = [{"version": VERSION, **each} for each in objects]
    print(json.dumps(finite(versioned if objects is values else versioned[0])), flush=True)


def finite(values: Any) -> Any:
    """Return the values with None for NaN and infinities, which JSON lacks."""
    return json.loads(json.dumps(values), parse_constant=lambda _: None)
