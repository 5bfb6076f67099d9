"""The commands of README and docs, for tests that check or run them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.jobs import ROOT, environment

QUICK = "data.seq_len=32 data.global_batch=8"  # fewer tokens a step than the pages' jobs have
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """One command of a page: its words, comments left out, and what the page says that it prints."""

    page: str
    line: str
    prints: str = ""

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line, comments=True)

    def __str__(self) -> str:
        return f"{self.page}: {self.line}"


def commands_of(page: Path) -> list[Command]:
    """The commands of a page's blocks of shell. A block of text after one is the output of its last command."""
    found: list[Command] = []
    is_after_shell = False
    for indent, language, block in _BLOCK.findall(page.read_text()):
        if language == "sh":
            whole = block.replace("\\\n", " ").splitlines()
            lines = [line.removeprefix(indent).strip() for line in whole]
            name = str(page.relative_to(ROOT))
            found += [Command(name, line) for line in lines if line and not line.startswith("#")]
        elif language == "text" and is_after_shell:
            found[-1] = Command(found[-1].page, found[-1].line, block)
        is_after_shell = language == "sh"
    return found


def inline_commands(page: Path) -> Iterator[Command]:
    """The commands of fsdp_jobs in a page's running text."""
    text = _BLOCK.sub("", page.read_text())
    for line in re.findall(r"`((?:fsdp-jobs|python -m fsdp_jobs) [^`]+)`", text):
        yield Command(str(page.relative_to(ROOT)), line)


def run_page(
    page: str,
    folder: Path,
    changed: Callable[[str], str] = lambda line: line,
    under: tuple[str, ...] = (),
    timeout: float = 400,
    **env: str,
) -> None:
    """Run the commands of a page one by one, as a reader does, and compare what they print with the page.

    Args:
        changed: returns the line to run in place of a line of the page; an empty one is left out.
        under: the start of a command line that runs the shell elsewhere.
    """
    tools = folder / "bin"
    tools.mkdir()
    (tools / "fsdp-jobs").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fsdp_jobs "$@"\n')
    (tools / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    checkout = folder / "checkout"
    checkout.mkdir()
    (checkout / "examples").symlink_to(ROOT / "examples")
    for command in commands_of(ROOT / "docs" / "start" / page):
        line = changed(command.line)
        if line:
            done = subprocess.run(
                [*under, "bash", "-c", line],
                cwd=checkout,
                env=environment(folder, PATH=f"{tools}:{os.environ['PATH']}", **env),
                capture_output=True,
                text=True,
                timeout=timeout,
            )
            said = done.stdout + done.stderr
            assert done.returncode == 0, f"{command}\n{said}"
            lacking = [wanted for wanted in command.prints.splitlines() if not prints(said, wanted)]
            assert not lacking, f"{command}\nsays nothing like {lacking}\n{said}"


def prints(said: str, wanted: str) -> bool:
    """Whether a line like this was printed: numbers may differ, and `...` is anything."""
    return any(_plain(wanted).fullmatch(line) for line in map(_without_numbers, said.splitlines()))


def _plain(wanted: str) -> re.Pattern[str]:
    return re.compile(".*" + ".*".join(map(re.escape, _without_numbers(wanted).split("..."))) + ".*")


def _without_numbers(line: str) -> str:
    line = re.sub(r"\b(\d[\d.]*[dhms])+\b", "#", line)  # 1m03s, 0.9s
    return re.sub(r"\s+", " ", re.sub(r"\d[\d,.]*", "#", line)).strip()
