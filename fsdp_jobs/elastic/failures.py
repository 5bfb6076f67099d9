"""Telling whose fault a failure is, and when the job should give up. No torch."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import Any

from fsdp_jobs.events import EXIT_REQUEUE, Verdict

# Words of a collective whose peer has gone: the rank that says them is a victim, not the cause.
_PEER_GONE = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection (was )?(closed|refused|reset)|timed out|"
    r"socket (closed|timeout)|remote error|ncclRemoteError|ncclSystemError|no route to host|heartbeat",
    re.IGNORECASE,
)


def speaks_of_lost_peer(text: str) -> bool:
    return bool(_PEER_GONE.search(text))


# Exceptions that say what the user has to change: no use in trying again.
_FINAL = ("BadInput", "JobFailed")


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
        return self.error.startswith(_FINAL)

    @property
    def in_users_code(self) -> bool:
        """It raised, and not because a peer had gone."""
        return bool(self.error) and not self.is_victim

    def describe(self) -> str:
        if self.exit_code < 0:
            name = signal.Signals(-self.exit_code).name
            return f"rank {self.rank} on node {self.node} was killed by {name}"
        return f"rank {self.rank} on node {self.node} failed: {self.error or f'exit code {self.exit_code}'}"


def first_cause(failures: list[Failure]) -> Failure:
    """The failure that most likely began it: no victim of another, then the earliest."""
    return min(failures, key=lambda f: (f.is_victim, f.time))


class Budget:
    """Counts failures in a row without a new checkpoint between them."""

    def __init__(self, most: int):
        self.most = most
        self.count = 0
        self._committed = -1
        self._last_in_users_code: tuple[int, str] | None = None

    def judge(self, cause: Failure | None, committed: int, why: str, stalled: bool = False) -> Verdict | None:
        """The verdict that ends the attempt after this failure, or None to go on.

        Args:
            cause: the rank that failed first; None when a node was lost.
            committed: step of the newest checkpoint.
            why: what happened, for the user.
            stalled: nothing failed, but no rank advanced.
        """
        if committed > self._committed:
            self._committed, self.count = committed, 0
        self.count += 1
        details: dict[str, Any] = {}
        if cause is not None:
            details = {"rank": cause.rank, "node": cause.node, "exit_code": cause.exit_code, "error": cause.error}
            if cause.is_final:
                return Verdict("user_error", "stop", why, **details)
            if cause.in_users_code:
                place = (cause.step, cause.error)
                if place == self._last_in_users_code:
                    return Verdict("user_error", "stop", f"{why}; the same error at the same step twice", **details)
                self._last_in_users_code = place
        if self.count > self.most:
            reason = f"{self.count} failures without a new checkpoint; the last: {why}"
            kind = "user_error" if cause is not None and cause.in_users_code else "infrastructure"
            kind = "stalled" if stalled else kind
            return Verdict(kind, "stop", reason, **details)
        return None
