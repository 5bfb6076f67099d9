"""Find the cause of a failure, decide when the job gives up, and which machines to exclude. No torch."""

from __future__ import annotations

import math
import signal
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fsdp_jobs.control.round import Round, is_progress
from fsdp_jobs.run import events
from fsdp_jobs.run.failure import Failure
from fsdp_jobs.run.table import counted
from fsdp_jobs.run.verdict import Verdict


@dataclass(frozen=True)
class Cause:
    """What broke a round."""

    why: str  # one sentence for the user
    failure: Failure | None = None  # of the rank that failed first; None if a node was lost or ranks stalled
    node: int | None = None  # its machine may be at fault
    by_kernel: bool = False  # the kernel killed it for lack of memory


def find_cause(broken: Round, silent: set[int]) -> Cause:
    """Find the failure that most likely broke a round: the first that no other failure caused.

    Reports count in order of arrival, because clocks of different machines are not compared. The nodes in `silent` are
    lost, or may be.
    """
    real = [f for f in broken.failures if not f.is_request]
    first = min(real, key=lambda f: (f.is_victim, f.has_aborted)) if real and not broken.has_stalled else None
    last = max(broken.ended.values(), default=math.inf)
    if first is not None and first.is_victim and last <= first.step and not silent:
        how = f"after step {last}" if last >= 0 else "with exit code 0"
        ended = f"other ranks, on nodes {sorted(broken.ended)}, had ended before, {how}"
        return Cause(f"{first.describe()}; {ended}", first)
    if first is None or first.is_victim or (broken.culprit is not None and not first.error):
        if broken.culprit in broken.starved:
            return Cause(broken.broken_why, by_kernel=True)
        return Cause(broken.broken_why, node=broken.culprit)  # failures are consequences: the cause died with its node
    alike = {f.node for f in real if f.exit_code == first.exit_code and f.problem == first.problem}
    if first.has_aborted:  # the silent nodes may be why
        alike |= silent
    machine = first.node if first.may_be_machine_fault and len(alike) == 1 else None
    by_kernel = first.is_out_of_memory and first.exit_code == -signal.SIGKILL
    return Cause(first.describe(), first, machine, by_kernel)


class Budget:
    """Counts failures, and attempts that ended as `infrastructure`, since the last new checkpoint."""

    def __init__(self, most: int, history: Iterable[events.Event]):
        self.most = most
        self.count = 0
        self._committed = -1
        self._attempts = 0
        began_at, saves, was_long = math.inf, False, False
        for event in history:
            match event:
                case events.Submitted():
                    self._attempts = 0
                case events.Checkpoint():
                    self._attempts, saves = 0, True
                case events.RoundStarted():
                    began_at = event.time
                case events.RoundBroken() | events.AttemptEnded(verdict="infrastructure"):
                    was_long |= is_progress(began_at, getattr(event, "failed_at", None) or event.time, saves)
                    began_at = math.inf
                    if isinstance(event, events.AttemptEnded):
                        self._attempts, was_long = 0 if was_long else self._attempts + 1, False
        self._last_signature: tuple[int, int | str] | None = None  # newest failure that may be the program's

    def judge(self, cause: Cause, committed: int, broken: Round) -> Verdict | None:
        """Return the verdict that ends the attempt after this failure, or None to continue.

        Args:
            cause: what broke the round.
            committed: step of the newest checkpoint.
            broken: the round; if it was long, that counts as progress, unless it ended like the one before.
        """
        failure, why = cause.failure, cause.why
        is_program_fault, signature = False, None
        if failure is not None:
            is_program_fault = not failure.may_be_machine_fault
            if is_program_fault or (failure.exit_code == -signal.SIGSEGV and failure.step > broken.first_step):
                signature = failure.signature
        again = signature is not None and signature == self._last_signature
        if committed > self._committed or (broken.was_long and not again):
            self._committed, self.count = committed, 0
            if not again:
                self._last_signature = None
        self.count += 1
        details: dict[str, Any] = {}
        if failure is not None:
            details = {name: getattr(failure, name) for name in ("rank", "node", "exit_code", "error")}
            if failure.is_final:
                return Verdict("user_error", "stop", why, **details)
            if again and not broken.was_long:
                same = "the same error at the same step twice" if failure.step >= 0 else "the same twice in a row"
                return Verdict("user_error", "stop", f"{why.rstrip('.')}; {same}", **details)
            self._last_signature = signature or self._last_signature
        if self.count <= self.most:
            return None
        kind = "stalled" if broken.has_stalled else "user_error" if is_program_fault else "infrastructure"
        reason = f"{counted(self.count, 'failure')} without a new checkpoint; the last: {why}"
        return Verdict(kind, "stop", reason, **details)

    def requeue(self, why: str) -> Verdict:
        """Return the verdict on an attempt that the cluster ended: requeue, unless attempts make no progress."""
        if self._attempts >= self.most:
            why = f"{counted(self._attempts + 1, 'attempt')} without a new checkpoint; the last: {why}"
            return Verdict("infrastructure", "stop", why)
        return Verdict("infrastructure", "requeue", why)


class Machines:
    """Counts failures per machine over all attempts; those that fail repeatedly are to be excluded for a while."""

    def __init__(self, most: int, for_s: float, history: Iterable[events.Event]):
        """`most` failures within `for_s` seconds exclude a machine for as long; 0 excludes none."""
        self.most, self.for_s = most, for_s
        self._failures = defaultdict[str, list[float]](list)  # host -> seconds since 1970
        for event in history:
            if isinstance(event, events.RoundBroken) and event.blamed:
                self._failures[event.blamed].append(event.time)

    def blame(self, host: str, why: str, at_once: bool = False) -> str | None:
        """Record a failure. Returns the reason to exclude the machine, if there is one; with `at_once`, always."""
        now = time.time()
        recent = self._failures[host] = [t for t in [*self._failures[host], now] if t > now - self.for_s]
        if not at_once and (not self.most or len(recent) < self.most):
            return None
        return f"{counted(len(recent), 'failure')} within {self.for_s:.0f} s; the last: {why}"
