"""The process beside an agent that hands metrics on: started where rank 0 is, let go of at the end. No torch."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from typing import IO

from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.observe.trackers.send import FAREWELL_S
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir


class Beside:
    """At most one process of an agent's."""

    def __init__(self, config: JobConfig, run: RunDir, attempt: int, node: int):
        self.kind, self.run, self.attempt, self.node = config.tracking.kind, run, attempt, node
        self._process: subprocess.Popen[bytes] | None = None

    def stand(self, with_rank_0: bool) -> None:
        """A round begins, with rank 0 on this node or on another."""
        if not with_rank_0:
            self._let_go()
        elif self.kind != "none" and (self._process is None or self._process.poll() is not None):
            with self._log() as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "fsdp_jobs.observe.trackers.send", str(self.run.path), "--beside-agent"],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # signals are for agents
                )

    def _log(self) -> IO[bytes]:
        folder = self.run.node(self.attempt, self.node)
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / "tracking.log").open("ab")

    def _let_go(self) -> subprocess.Popen[bytes] | None:
        """It sends the rest, and ends by itself."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        return process

    def close(self) -> None:
        """The attempt is over: wait while it sends the rest; say so if it cannot."""
        process = self._let_go()
        if process is None:
            return
        try:
            process.wait(FAREWELL_S + 1)
        except subprocess.TimeoutExpired:
            process.kill()
        if unsent := unsent_lines(self.run):
            why = f"{unsent} lines are not sent; later: python -m fsdp_jobs.observe.trackers.send {self.run.path}"
            events.record(self.run, self.attempt, events.TrackingFailed(self.kind, why))


def unsent_lines(run: RunDir) -> int:
    """Lines of metrics.jsonl that the tracker has not got."""
    if not run.metrics.exists():
        return 0
    offset = json.loads(run.tracking.read_text())["offset"] if run.tracking.exists() else 0
    with run.metrics.open("rb") as f:
        f.seek(offset)
        return sum(line.endswith(b"\n") for line in f)
