"""Telling whose fault a failure is, when the job should give up, and which machines to do without. No torch."""

from __future__ import annotations

import re
import signal
import time
from dataclasses import dataclass
from typing import Any

from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.verdict import EXIT_REQUEUE, FINAL_ERRORS, Verdict

# Words of a collective whose peer has gone: the rank that says them is a victim, not the cause.
_PEER_GONE = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection (was )?(closed|refused|reset)|timed out|"
    r"socket (closed|timeout)|remote error|ncclRemoteError|ncclSystemError|no route to host|heartbeat",
    re.IGNORECASE,
)

_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|can't allocate memory", re.IGNORECASE)

# Exceptions that speak of the machine and not of the program.
_HARDWARE = re.compile(r"CUDA error|uncorrectable|\bECC\b|\bXid\b|cudaError|CUDA driver|no CUDA GPUs", re.IGNORECASE)


def speaks_of_lost_peer(text: str) -> bool:
    return bool(_PEER_GONE.search(text))


@dataclass(frozen=True)
class Failure:
    """One rank's end, as its agent saw it."""

    node: int
    rank: int
    exit_code: int  # negative: killed by that signal
    error: str  # "ExceptionClass: message", or empty
    time: float  # seconds since 1970
    step: int = -1  # steps it had done

    @property
    def is_request(self) -> bool:
        """It saved and left because it was asked to."""
        return self.exit_code == EXIT_REQUEUE

    @property
    def is_victim(self) -> bool:
        return speaks_of_lost_peer(self.error)

    @property
    def is_final(self) -> bool:
        return self.error.startswith(FINAL_ERRORS)

    @property
    def is_out_of_memory(self) -> bool:
        return bool(_OUT_OF_MEMORY.search(self.error))

    @property
    def may_be_the_machines(self) -> bool:
        return self.exit_code < 0 or bool(_HARDWARE.search(self.error))

    @property
    def in_users_code(self) -> bool:
        """It raised, or ended with an exit code of its own, and not because a peer had gone."""
        return (bool(self.error) or self.exit_code > 0) and not self.is_victim

    def describe(self) -> str:
        if self.exit_code < 0:
            name = signal.Signals(-self.exit_code).name
            why = f" ({self.error})" if self.error else ""
            return f"rank {self.rank} on node {self.node} was killed by {name}{why}"
        return f"rank {self.rank} on node {self.node} failed: {self.error or f'exit code {self.exit_code}'}"


def first_cause(failures: list[Failure]) -> Failure:
    """The failure that most likely began it: no victim of another, then the earliest."""
    return min(failures, key=lambda f: (f.is_victim, f.time))


class Budget:
    """Counts failures in a row without a new checkpoint between them, and attempts that ended so."""

    def __init__(self, most: int, run: RunDir):
        self.most = most
        self.count = 0
        self._committed = -1
        self._attempts = 0
        for event in events.read_events(run):
            match event:
                case events.Submitted() | events.Checkpoint():
                    self._attempts = 0
                case events.AttemptEnded(verdict="infrastructure"):
                    self._attempts += 1
        self._last_in_users_code: tuple[int, int, str] | None = None

    def judge(
        self, cause: Failure | None, committed: int, why: str, stalled: bool = False, lived: bool = False
    ) -> Verdict | None:
        """The verdict that ends the attempt after this failure, or None to go on.

        Args:
            cause: the rank that failed first; None when a node was lost.
            committed: step of the newest checkpoint.
            why: what happened, for the user.
            stalled: nothing failed, but no rank advanced.
            lived: the round was long, and its ranks say of no checkpoint: progress, unless it ended as the last one.
        """
        place = None
        if cause is not None and cause.in_users_code:
            error = re.sub(r"[0-9]+", "0", cause.error)  # addresses and sizes differ
            place = (cause.step, cause.exit_code, error)
        again = place is not None and place == self._last_in_users_code
        if committed > self._committed or (lived and not again):
            self._committed, self.count = committed, 0
        self.count += 1
        details: dict[str, Any] = {}
        if cause is not None:
            details = {"rank": cause.rank, "node": cause.node, "exit_code": cause.exit_code, "error": cause.error}
            if cause.is_final:
                return Verdict("user_error", "stop", why, **details)
            if again and not lived:
                same = "the same error at the same step twice" if cause.step >= 0 else "the same twice in a row"
                return Verdict("user_error", "stop", f"{why}; {same}", **details)
            if place is not None:
                self._last_in_users_code = place
        if self.count > self.most:
            reason = f"{self.count} failures without a new checkpoint; the last: {why}"
            kind = "user_error" if cause is not None and cause.in_users_code else "infrastructure"
            kind = "stalled" if stalled else kind
            return Verdict(kind, "stop", reason, **details)
        return None

    def requeue(self, why: str) -> Verdict:
        """The verdict on an attempt that the cluster ended: another one, unless they lead nowhere."""
        if self._attempts >= self.most:
            why = f"{self._attempts + 1} attempts without a new checkpoint; the last: {why}"
            return Verdict("infrastructure", "stop", why)
        return Verdict("infrastructure", "requeue", why)


class Machines:
    """Counts failures by machine, over all attempts. One that fails again and again is done without for a while."""

    def __init__(self, run: RunDir, most: int, for_s: float):
        """`most` failures within `for_s` seconds exclude a machine for as long; 0 excludes none."""
        self.run, self.most, self.for_s = run, most, for_s
        self._failures: dict[str, list[float]] = {}  # host -> seconds since 1970
        for event in events.read_events(run):
            if isinstance(event, events.RoundBroken) and event.blamed:
                self._failures.setdefault(event.blamed, []).append(event.time)

    def blame(self, host: str, why: str) -> str | None:
        """Take note of a failure; returns the reason when it is the one that excludes the machine."""
        now = time.time()
        recent = [t for t in [*self._failures.get(host, []), now] if t > now - self.for_s]
        self._failures[host] = recent
        if not self.most or len(recent) < self.most:
            return None
        reason = f"{len(recent)} failures within {self.for_s:.0f} s; the last: {why}"
        self.run.exclude(host, self.for_s, reason)
        return reason
