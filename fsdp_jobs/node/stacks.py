"""In the agent: collect ranks' stacks. On a signal, each rank writes its threads' stacks to a file. No torch."""

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
from fsdp_jobs.run.tail import size_of

_WAIT_S = 2.0  # for ranks to write them
_MOST = 1 << 20  # bytes of stacks that are kept per rank
_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')
_LIBRARIES = ("<frozen ", sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]))
_PACKAGES = ("/site-packages/", "/dist-packages/")
_COLLECTIVE = "/torch/distributed/"


@dataclass(frozen=True)
class Stack:
    """Frames of a rank's main thread: (file, line, function), innermost first; empty if unknown."""

    frames: tuple[tuple[str, str, str], ...] = ()

    @classmethod
    def parse(cls, dump: str) -> Stack:
        """Parse the main thread, which receives the signal, from the output of faulthandler."""
        threads = dump.strip().split("\n\n")
        main = next((t for t in reversed(threads) if t.startswith("Current thread")), threads[-1])
        return cls(tuple(_FRAME.findall(main)))

    @property
    def is_in_collective(self) -> bool:
        return bool(self.frames) and _COLLECTIVE in self.frames[0][0]

    def __str__(self) -> str:
        """Return the innermost line of the user's program, and the innermost function if it is of a library."""
        own = [f for f in self.frames if not f[0].startswith(_LIBRARIES) and not any(p in f[0] for p in _PACKAGES)]
        if not own:
            return self.frames[0][2] if self.frames else "a place that is not known"
        file, line, function = own[0]
        call = f", {self.frames[0][2]}" if self.frames[0] != own[0] else ""
        return f"{function} ({Path(file).name}:{line}){call}"


def stacks_of(pids: Sequence[int], files: Sequence[Path]) -> list[Stack]:
    """Make every rank write its stacks to its file, and read them; without frames if it does not."""
    before = []
    for pid, file in zip(pids, files, strict=True):
        if size_of(file) > _MOST:
            os.truncate(file, 0)
        before.append(size_of(file))
        with suppress(OSError):
            if has_signal(pid, "SigCgt", STACKS_SIGNAL):  # without a handler it would die
                os.kill(pid, STACKS_SIGNAL)
    deadline, after = time.monotonic() + _WAIT_S, list[int]()
    while time.monotonic() < deadline:
        time.sleep(0.1)
        now = [size_of(file) for file in files]
        if now == after and all(n > b for n, b in zip(now, before, strict=True)):
            break
        after = now
    written = [file.read_bytes()[b:] if size_of(file) else b"" for file, b in zip(files, before, strict=True)]
    return [Stack.parse(text.decode(errors="replace")) for text in written]
