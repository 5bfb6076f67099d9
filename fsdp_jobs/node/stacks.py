"""Ask ranks where they are: a signal has each write the stacks of its threads into a file of its own. No torch."""

from __future__ import annotations

import os
import re
import sysconfig
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fsdp_jobs.run.processes import STACKS_SIGNAL, has_signal

_WAIT_S = 2.0  # for ranks to write them
_MOST = 1 << 20  # bytes of a rank's that are kept
_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')
_LIBRARIES = ("<frozen ", sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]))
_PACKAGES = ("/site-packages/", "/dist-packages/")
_COLLECTIVE = "/torch/distributed/"


@dataclass(frozen=True)
class Stack:
    """Where the main thread of a rank is: (file, line, function), innermost first; empty when it is not known."""

    frames: tuple[tuple[str, str, str], ...] = ()

    @classmethod
    def parse(cls, dump: str) -> Stack:
        """Take the main thread, which receives the signal, from what faulthandler wrote."""
        threads = dump.strip().split("\n\n")
        main = next((t for t in reversed(threads) if t.startswith("Current thread")), threads[-1])
        return cls(tuple(_FRAME.findall(main)))

    @property
    def is_in_collective(self) -> bool:
        return bool(self.frames) and _COLLECTIVE in self.frames[0][0]

    def __str__(self) -> str:
        """Return the innermost line of the program itself, and what it calls where that is not its own."""
        own = [f for f in self.frames if not f[0].startswith(_LIBRARIES) and not any(p in f[0] for p in _PACKAGES)]
        if not own:
            return self.frames[0][2] if self.frames else "a place that is not known"
        file, line, function = own[0]
        call = f", {self.frames[0][2]}" if self.frames[0] != own[0] else ""
        return f"{function} ({Path(file).name}:{line}){call}"


def stacks_of(pids: Sequence[int], files: Sequence[Path]) -> list[Stack]:
    """Make every rank write its stacks into its file; without frames for those that do not."""
    before = []
    for pid, file in zip(pids, files, strict=True):
        if _size(file) > _MOST:
            os.truncate(file, 0)
        before.append(_size(file))
        with suppress(OSError):
            if has_signal(pid, "SigCgt", STACKS_SIGNAL):  # it would kill one that has just been started
                os.kill(pid, STACKS_SIGNAL)
    deadline, after = time.monotonic() + _WAIT_S, list[int]()
    while time.monotonic() < deadline:
        time.sleep(0.1)
        now = [_size(file) for file in files]
        if now == after and all(n > b for n, b in zip(now, before, strict=True)):
            break
        after = now
    written = [file.read_bytes()[b:] if _size(file) else b"" for file, b in zip(files, before, strict=True)]
    return [Stack.parse(text.decode(errors="replace")) for text in written]


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
