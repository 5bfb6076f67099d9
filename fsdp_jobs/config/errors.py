"""Report bad input: where it is, the problem, and the cure. Every bad input is reported through this module."""

from __future__ import annotations

import difflib
import io
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

_MOST_TOGETHER = 3  # words with the same beginning or end, to be offered together


@dataclass(frozen=True)
class Problem:
    """One thing to correct: its place, the problem, and the cure."""

    where: str  # a configuration key with its value, a path, a run name
    what: str
    instead: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" + (f"\n      -> {self.instead}" if self.instead else "")


class BadInput(Exception):
    """All problems of one input at once; the command line prints them and exits with 2."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems = list(problems)
        super().__init__("\n".join(f"  {i}. {p}" for i, p in enumerate(self.problems, 1)))

    @classmethod
    def at(cls, where: str, what: str, instead: str = "") -> Self:
        """Make a BadInput of a single problem."""
        return cls([Problem(where, what, instead)])

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of a traceback."""
        return [f"{type(self).__name__}:", *str(self).splitlines()]


class Damaged(BadInput):
    """A file of a run is not as it was written."""

    def __init__(self, file: object, error: object):
        super().__init__([Problem(str(file), f"damaged: {one_line(error)}", "restore the file, or move its run away")])


class JobFailed(Exception):
    """A failure after the job had started; the command line prints it and exits with 1."""


def name_file(error: OSError) -> None:
    """Name the file in a read or write error that names none: the file that was open where it was raised."""
    if error.errno is not None and error.filename is None:  # an error without a number is from an object store's client
        for frame, _ in [*traceback.walk_tb(error.__traceback__)][1:]:  # the first is the caller's
            for value in frame.f_locals.values():
                if isinstance(value, io.FileIO | io.BufferedReader | io.TextIOWrapper):
                    error.filename = value.name


def one_line(words: object) -> str:
    """Return the message of an exception, or another text, without line breaks and repeated blanks."""
    return " ".join(str(words).split())


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `did you mean X?` for known words that begin or end with this one, or are most like it; else nothing.

    A slip seldom changes the first letter: by gpu nobody means cpu, nor h100 by v100.
    """
    word, names = word.casefold(), {k.casefold(): k for k in known}
    name = word.rpartition(".")[2]  # without its group, which may be the wrong one
    alike = [k for k in names if k.rpartition(".")[2].lstrip("_")[:1] == name[:1]]
    tails = {k.rpartition(".")[2]: k for k in alike}
    close = [word] if word in names else [k for k in names if word and k.startswith(word)]
    if not 0 < len(close) <= _MOST_TOGETHER:
        close = difflib.get_close_matches(word, alike, n=1, cutoff=0.6)
    close = close or [tails[tail] for tail in difflib.get_close_matches(name, tails, n=1, cutoff=0.75)]
    close = close or [k for k in names if k.endswith(f"_{name}")]
    return f"did you mean {' or '.join(names[k] for k in close)}?" if 0 < len(close) <= _MOST_TOGETHER else ""
