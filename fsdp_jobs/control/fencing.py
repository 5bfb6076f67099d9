"""Start a round only when all older leases have expired and a new term is claimed. No torch."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from concurrent.futures import Future
from math import inf
from pathlib import Path

from fsdp_jobs.config.schema import ElasticConfig
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.protocol import lease_s, unreachable_s
from fsdp_jobs.run.term import COORDINATOR, ROUND, Fenced, claim, newest
from fsdp_jobs.run.threads import Background

CHARGE_S = 5.0  # after a look that found no newer coordinator; until then no newer one begins a round
_CLOCKS, _KILL_S = 1.05, 1.0  # margins on a lease: clock drift (a factor), and time to kill ranks
_RECORD_S = 0.2  # for a rank to write a line after it checked that it may
_PATIENCE_S = 5.0  # to wait for a store's answer, and between a failed claim and the next


class Leases(dict[str, float]):
    """Expiry times of the leases of ranks that may still run, by their agent's id or by unseen machine.

    A machine is unseen if ranks of an earlier coordinator may run there and no agent has connected from it yet. An
    agent that is cut off cannot connect. A lease is dropped when the ranks have ended, or the machine is seen.
    """

    def __init__(self, elastic: ElasticConfig, unseen: Iterable[str]):
        super().__init__(dict.fromkeys(unseen, inf))  # until `on_charge`
        self._lasts_s = _CLOCKS * lease_s(elastic) + _KILL_S
        self._fresh_s = _CLOCKS * unreachable_s(elastic) + _RECORD_S

    def hold(self, agent: str, now: float) -> None:
        """Renew the lease of an agent with ranks, which was just answered."""
        self[agent] = now + self._lasts_s

    def on_charge(self, now: float) -> None:
        """Let the leases of unseen machines expire: earlier coordinators look for this one within `CHARGE_S`."""
        self.update({holder: now + CHARGE_S + self._lasts_s for holder, end in self.items() if end == inf})

    def running(self, now: float, are_fenced: bool = False) -> int:
        """Count the leases that have not expired.

        Args:
            now: monotonic seconds.
            are_fenced: ranks that still run cannot complete a step without the ended ones, and once their node's
                newest answer is no longer fresh, they check for a newer round before they write. Leases that are
                no longer fresh then count as expired.
        """
        for holder in [holder for holder, end in self.items() if end <= now]:
            del self[holder]
        early_s = max(0.0, self._lasts_s - self._fresh_s) if are_fenced else 0.0
        return sum(end - early_s > now for end in self.values())


class Terms:
    """Claims the term of the next round in a thread, so that agents get answers while a store hangs.

    Only the newest coordinator of the newest attempt may: it has the highest number.
    """

    def __init__(self, home: Path, run: RunDir, attempt: int):
        self.home, self.run, self.attempt = home, run, attempt
        self.number = 0  # of this coordinator; not claimed yet
        self.problem = ""  # why no term is claimed yet
        self._claims = Background("claims")
        self._claim: Future[int] | None = None
        self._patient_until = -inf

    def take_charge(self, seen: int) -> None:
        """Claim the number of this coordinator, greater than `seen`."""
        self.number = claim(self.run.attempt(self.attempt), COORDINATOR, uuid.uuid4().hex, above=seen)

    def check(self) -> None:
        """Raise Fenced if another coordinator has taken charge since."""
        there = newest(self.run.attempt(self.attempt), COORDINATOR)
        if self.run.last_attempt() > self.attempt or 0 < self.number < there:
            raise Fenced(f"another coordinator of {self.run.name} has taken over")

    def next(self, last: int, seen: int, now: float) -> int | None:
        """Return the term of the round after that of term `last` (0: not known), the same until `use`.

        It is also greater than `seen`. Returns None until it is claimed; `problem` says why.

        Raises:
            Fenced: another coordinator has claimed a term after `last`.
        """
        if self._claim is None:
            if now < self._patient_until:
                return None
            owner, self._patient_until = f"attempt {self.attempt} {uuid.uuid4().hex}", now + _PATIENCE_S
            before = 0 if self.problem else last  # after an error, a newer one may be this coordinator's own
            self._claim = self._claims.begin(claim, self.home, ROUND, owner, before, max(last, seen), self.check)
        if not self._claim.done():
            if now > self._patient_until:
                self.problem = f"checkpoint.dir: {self.home} does not answer"
            return None
        error = self._claim.exception()
        if error is None or isinstance(error, Fenced):
            return self._claim.result()
        self._claim, self._patient_until = None, now + _PATIENCE_S
        self.problem = f"checkpoint.dir: {self.home} cannot be written: {type(error).__name__}: {error}"
        return None

    def use(self) -> None:
        """Mark the term as used by a round, so that `next` claims another."""
        self._claim, self._patient_until, self.problem = None, -inf, ""
