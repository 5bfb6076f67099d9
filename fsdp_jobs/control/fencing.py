"""Start a round only when all older leases have expired and a new term is claimed. No torch."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from fsdp_jobs.config.schema import ElasticConfig
from fsdp_jobs.run.protocol import lease_s, unreachable_s
from fsdp_jobs.run.term import ROUND, Fenced, claim

_T = TypeVar("_T")
_CLOCKS, _KILL_S = 1.05, 1.0  # added to a lease: for clocks of different speed (a factor), and for killing ranks
_RECORD_S = 0.2  # for writing a line, by a rank that has just seen that it may
_SOON_S = 0.02  # what takes a thread no longer is waited for: nobody notices
_PATIENCE_S = 5.0  # with a store that does not answer, and between two claims of which the first has failed


def begin(thread: ThreadPoolExecutor, work: Callable[..., _T], *args: Any) -> Future[_T]:
    """Begin work for which agents must not wait, in a thread; it may be done at once."""
    begun = thread.submit(work, *args)
    wait([begun], _SOON_S)
    return begun


class Leases(dict[str, float]):
    """Until when ranks may run that are not known to have ended: of an agent, by its id, or on an unseen machine.

    A machine is unseen when ranks may run there for an earlier coordinator, and no agent has connected from it yet:
    an agent that is cut off does not connect.
    """

    def __init__(self, elastic: ElasticConfig, unseen: Iterable[str]):
        super().__init__(dict.fromkeys(unseen, inf))  # until `on_charge`
        self._lasts_s = _CLOCKS * lease_s(elastic) + _KILL_S
        self._fresh_s = _CLOCKS * unreachable_s(elastic) + _RECORD_S

    def hold(self, agent: str, now: float) -> None:
        """Note that an agent with ranks has been answered."""
        self[agent] = now + self._lasts_s

    def surrender(self, holder: str) -> None:
        """Note that an agent's ranks have ended, or that a machine has been seen."""
        self.pop(holder, None)

    def on_charge(self, late_s: float, now: float) -> None:
        """Note that earlier coordinators give no more answers `late_s` from now."""
        self.update({holder: now + late_s + self._lasts_s for holder, end in self.items() if end == inf})

    def running(self, now: float, are_fenced: bool = False) -> int:
        """Count the leases that have not run out.

        Args:
            now: monotonic seconds.
            are_fenced: ranks that still run do no step without those that do not, and look for a newer round before
                they write anything, once their node's newest answer is not fresh any more. Then it counts earlier.
        """
        for holder in [holder for holder, end in self.items() if end <= now]:
            del self[holder]
        early_s = max(0.0, self._lasts_s - self._fresh_s) if are_fenced else 0.0
        return sum(end - early_s > now for end in self.values())


class Terms:
    """Claims the number of the next round, in a thread: a store that hangs must not leave agents without answers."""

    def __init__(self, home: Path, attempt: int):
        self.home, self.attempt = home, attempt
        self.problem = ""  # why there is none yet
        self._claims = ThreadPoolExecutor(1, "claims")
        self._claim: Future[int] | None = None
        self._patient_until = -inf

    def next(self, last: int, seen: int, now: float) -> int | None:
        """Return the number for the round after `last` (0: not known), always the same until `use`.

        It is also above `seen`. Returns None while there is none; `problem` says why.

        Raises:
            Fenced: another coordinator has claimed one after `last`.
        """
        if self._claim is None:
            if now < self._patient_until:
                return None
            owner, self._patient_until = f"attempt {self.attempt} {uuid.uuid4().hex}", now + _PATIENCE_S
            self._claim = begin(self._claims, claim, self.home, ROUND, owner, last or None, seen)
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
        """Begin a round with the number."""
        self._claim, self._patient_until, self.problem = None, -inf, ""
