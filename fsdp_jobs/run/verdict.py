"""Record why an attempt ended and what happens next, and start the notification. No torch."""

from __future__ import annotations

import atexit
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO

from fsdp_jobs.config.schema import plain_values
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import look_again, write_atomic
from fsdp_jobs.run.record import Record
from fsdp_jobs.run.tail import last_lines

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: checkpoint saved, start the job again

FINAL_ERRORS = ("BadInput", "Damaged", "JobFailed")  # name what the user must change: a retry would also fail

_NOTIFIED_WITHIN_S = 15.0  # a notification gives up by itself after 10 s


@dataclass
class Verdict(Record):
    """Why an attempt ended and what happens next."""

    verdict: str  # one of VERDICTS in config/schema.py
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
        write_atomic(run.verdict(attempt), self.to_json(indent=2))

    def close(self, run: RunDir, attempt: int, **details: Any) -> None:
        """End an attempt: write the verdict, record the event, start the notification if one is configured."""
        if self.rank is not None and self.node is not None:
            self.last_lines = last_lines(run.rank_log(attempt, self.node, self.rank), 20)
        self.write(run, attempt)
        self._record(run, attempt, **details)
        self._notify(run, attempt)

    def complete(self, run: RunDir, attempt: int) -> None:
        """Do what `close` has not done because its process was killed."""
        ends = events.newest_of(run, events.AttemptEnded)
        if (attempt, self.decision) not in ((end.attempt, end.decision) for end in ends):
            self._record(run, attempt)
        if not run.notified(attempt, self.decision).exists():
            self._notify(run, attempt)

    def _record(self, run: RunDir, attempt: int, **details: Any) -> None:
        events.record(run, attempt, events.AttemptEnded(self.verdict, self.decision, self.reason, **details))

    def _notify(self, run: RunDir, attempt: int) -> None:
        notify(run, attempt, "requeue" if self.decision == "requeue" else self.verdict)

    @classmethod
    def read(cls, run: RunDir, attempt: int) -> Verdict | None:
        return cls.from_file(run.verdict(attempt))

    @classmethod
    def final(cls, run: RunDir) -> Verdict | None:
        """Return the verdict that ended a run's newest submission; None as long as another attempt may follow."""
        attempt = run.last_attempt()
        if attempt < run.first_attempt():
            return None
        look_again(run.verdict(attempt))
        verdict = cls.read(run, attempt)
        return verdict if verdict is not None and verdict.decision == "stop" else None


KILLED = Verdict("preempted", "stop", "killed on request, without waiting for a checkpoint")
WITHDRAWN = Verdict("preempted", "stop", "cancelled while it waited")


def judge(run: RunDir, verdict: Verdict) -> None:
    """End a job for its coordinator, in the submission's newest attempt; an existing verdict to stop is kept."""
    attempt = max(run.last_attempt(), run.first_attempt())
    before = Verdict.read(run, attempt)
    if before is None or before.decision == "requeue":  # the requeue will not follow
        verdict.close(run, attempt)
        if run.tracking.exists():  # the process that sends metrics may have died before it told the tracker the end
            with suppress(OSError):  # this process may start no other
                _start([sys.executable, "-m", "fsdp_jobs.observe.trackers.send", str(run.path)], subprocess.DEVNULL)


def notify(run: RunDir, attempt: int, what: str, *why: str) -> None:
    """Send the notification of `what`, one of `notify.on`, if configured; `why` describes a `what` that is no verdict.

    A separate process sends it.
    """
    settings = plain_values(run.config).get("notify") if run.config.exists() else None
    if not settings or not (settings["command"] or settings["webhook"]) or what not in settings["on"]:
        return
    argv = [sys.executable, "-m", "fsdp_jobs.observe.notify", str(run.path), str(attempt), *why]
    try:
        _start(argv, sys.stderr)
    except OSError as e:  # this process may start no other
        way = "command" if settings["command"] else "webhook"
        events.record(run, attempt, events.NotifyFailed(way, f"it cannot be started: {e}"))


def _start(argv: Sequence[str], output: int | TextIO) -> None:
    """Start a process that this one waits for at exit, because its end may end the container."""
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)

    def wait() -> None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_NOTIFIED_WITHIN_S)

    atexit.register(wait)
