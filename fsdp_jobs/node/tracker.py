"""The agent's tracker process: runs where rank 0 is, flushes at the end of the attempt. No torch.

`python -m fsdp_jobs.observe.trackers.send` reads metrics.jsonl, and exits once its standard input is closed.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from contextlib import suppress

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import read_json
from fsdp_jobs.run.messages import Round
from fsdp_jobs.run.tail import Tail

FLUSH_S = 10.0  # for the tracker process to send the rest once its standard input is closed
_MODULE = "fsdp_jobs.observe.trackers.send"

logger = logging.getLogger(__name__)


class TrackerProcess:
    """Starts and stops the process, at most one per agent."""

    def __init__(self, config: JobConfig, run: RunDir, attempt: int, node: int):
        self.kind, self.run, self.attempt, self.node = config.tracking.kind, run, attempt, node
        self._process: subprocess.Popen[bytes] | None = None

    def begin_round(self, round_: Round) -> None:
        """Start the process if rank 0 is here; otherwise let an earlier one flush and exit."""
        if round_.rank != 0:
            self._end_input()
        elif self.kind != "none" and (self._process is None or self._process.poll() is not None):
            file = self.run.tracking_log(self.attempt, self.node)
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("ab") as log:
                    self._process = subprocess.Popen(
                        [sys.executable, "-m", _MODULE, str(self.run.path), "--beside-agent"],
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,  # signals are only for the agent
                    )
            except OSError as e:  # a full disk: the next round tries again
                logger.warning("the tracker cannot be started: %s", e)

    def _end_input(self) -> subprocess.Popen[bytes] | None:
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        return process

    def close(self) -> None:
        """Wait for the flush at the end of the attempt; record how many lines were not sent."""
        process = self._end_input()
        if process is None:
            return
        try:
            process.wait(FLUSH_S + 1)
        except subprocess.TimeoutExpired:
            process.kill()
        try:
            unsent = unsent_lines(self.run)
        except (OSError, BadInput) as e:  # storage fails, or the file is damaged
            logger.warning("cannot tell whether the tracker has all lines: %s", e)
            return
        if unsent:
            why = f"{unsent} lines were not sent; to send them: python -m {_MODULE} {self.run.path}"
            events.record(self.run, self.attempt, events.TrackingFailed(self.kind, why))


def unsent_lines(run: RunDir) -> int:
    """Count the lines of metrics.jsonl that were not sent to the tracker."""
    offset = read_json(run.tracking).get("offset", 0)
    return sum(1 for _ in Tail(run.metrics, offset).lines())
