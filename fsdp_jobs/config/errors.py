"""Name what is wrong with an input and how to correct it. Every bad input is reported through this module."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing to correct: where it is, what is wrong, what to write instead."""

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

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows in place of a traceback."""
        return [f"{type(self).__name__}:", *str(self).splitlines()]


class JobFailed(Exception):
    """A failure after the job had started; the command line prints it and exits with 1."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `did you mean X?` for the known word most like this one, or the empty string."""
    known = list(known)
    tails = {k.rpartition(".")[2]: k for k in known}  # the right name in the wrong group counts as near
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not close and (tail := difflib.get_close_matches(word.rpartition(".")[2], tails, n=1, cutoff=0.75)):
        close = [tails[tail[0]]]
    return f"did you mean {close[0]}?" if close else ""
