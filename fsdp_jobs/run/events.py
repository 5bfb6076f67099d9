"""What happens to a run, as append-only JSON lines, and the verdict on an attempt. No torch.

Events: submitted, attempt_started, round_started, round_broken, resumed, checkpoint, checkpoint_failed,
checkpoint_skipped, stop_requested, node_lost, machine_excluded, stalled, adopted, process_restarted,
attempt_ended, done, notify_failed, tracking_failed; waiting, which launchers add.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdp_jobs.run.directory import RunDir, read_json_lines, write_atomic

VERDICTS = ("done", "preempted", "infrastructure", "stalled", "user_error")

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: saved, start me again


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON line, whole, among writers on several nodes: under a lock where the file system has them.

    A record that the disk has no room for is left out, and said so on stderr: no job dies of its own diary.
    """
    line = (json.dumps(record) + "\n").encode()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            with suppress(OSError):  # some shared file systems have no locks; O_APPEND alone has to do there
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            before = os.fstat(descriptor).st_size
            if os.write(descriptor, line) < len(line):
                os.ftruncate(descriptor, before)  # never half a line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)
    except OSError as e:
        print(f"WARNING not recorded in {path}: {e.strerror}", file=sys.stderr, flush=True)


def record_event(run: RunDir, event: str, attempt: int, **details: Any) -> None:
    """Append an event with the time and whatever else it needs."""
    append_line(run.events, {"time": time.time(), "event": event, "attempt": attempt, **details})


def read_events(run: RunDir) -> Iterator[dict[str, Any]]:
    return read_json_lines(run.events)


@dataclass
class Verdict:
    """Why an attempt ended and what happens next."""

    verdict: str  # one of VERDICTS
    decision: str  # stop | requeue
    reason: str  # one sentence for the user
    rank: int | None = None  # the first rank that failed
    node: int | None = None
    exit_code: int | None = None  # of that rank; negative: killed by that signal
    error: str = ""  # its exception
    last_lines: str = ""  # of its log

    @property
    def exit_code_of_attempt(self) -> int:
        if self.verdict == "done":
            return EXIT_DONE
        return EXIT_REQUEUE if self.decision == "requeue" else EXIT_FAILED

    def write(self, run: RunDir, attempt: int) -> None:
        write_atomic(run.verdict(attempt), json.dumps(asdict(self), indent=2))

    def close(self, run: RunDir, attempt: int, **details: Any) -> None:
        """End an attempt: the verdict's file, the event that tells of it, and whoever is to be told."""
        self.write(run, attempt)
        said = {"verdict": self.verdict, "decision": self.decision, "reason": self.reason}
        record_event(run, "attempt_ended", attempt, **said, **details)
        from fsdp_jobs.observe.notify import notify  # it records events

        notify(run, attempt, self)

    @classmethod
    def read(cls, run: RunDir, attempt: int) -> Verdict | None:
        path = run.verdict(attempt)
        return cls(**json.loads(path.read_text())) if path.exists() else None
