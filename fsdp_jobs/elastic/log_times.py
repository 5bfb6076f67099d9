"""Record once a second how long the logs of a node's ranks are, so that lines of all nodes can be ordered later."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from pathlib import Path

from fsdp_jobs.run.tail import TIMES

_EVERY_S = 1.0


class LogTimes:
    """A thread that writes `log-times.jsonl` next to the logs of a node's ranks."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._known: dict[str, tuple[int, float]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="log-times", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(_EVERY_S):
            self._note()
        self._note()

    def _note(self) -> None:
        """Append a line with the sizes that have changed, and when each file was last written to."""
        with suppress(OSError):  # a full disk, or a file that has just gone: only the order of lines suffers
            stats = {f.stem.removeprefix("rank-"): f.stat() for f in self._folder.glob("rank-*.log")}
            sizes = {rank: (stat.st_size, round(stat.st_mtime, 3)) for rank, stat in stats.items() if stat.st_size}
            changed = {rank: written for rank, written in sizes.items() if written != self._known.get(rank)}
            if changed:
                with (self._folder / TIMES).open("a") as f:
                    f.write(json.dumps(changed) + "\n")
                self._known |= changed

    def close(self) -> None:
        self._over.set()
        self._thread.join(_EVERY_S)
