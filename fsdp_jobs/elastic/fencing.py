"""What the coordinator waits for before a round: that no rank of an earlier one can run, and a new epoch. No torch."""

from __future__ import annotations

import uuid
from concurrent.futures import Future, ThreadPoolExecutor, wait
from math import inf
from pathlib import Path

from fsdp_jobs.config.schema import ElasticConfig
from fsdp_jobs.elastic.protocol import lease_s
from fsdp_jobs.run.epoch import ROUND, Fenced, claim

_MARGIN = 1.05, 1.0  # of a lease: for clocks of different speed (a factor), and for killing ranks (seconds)
_BEFORE = "before"  # in place of an agent's id: those that an earlier coordinator may have left running
_CLAIM_S = 0.2  # to wait for a claim: longer than a file system takes, shorter than anybody would notice
_AGAIN_S = 5.0


class Leases(dict[str, float]):
    """Until when the ranks of an agent, by its id, may run; agents whose ranks are known to have ended are not here."""

    def __init__(self, elastic: ElasticConfig):
        super().__init__()
        self._elastic = elastic
        self._unseen: set[str] = set()

    def hold(self, agent: str, now: float) -> None:
        """Note that an agent with ranks has been answered."""
        self[agent] = self._end(now)

    def _end(self, now: float) -> float:
        factor, seconds = _MARGIN
        return now + factor * lease_s(self._elastic) + seconds

    def surrender(self, agent: str) -> None:
        """Note that an agent's ranks have ended."""
        self.pop(agent, None)

    def expect(self, hosts: set[str]) -> None:
        """Note machines where ranks may run for an earlier coordinator."""
        self._unseen = hosts
        if hosts:
            self[_BEFORE] = inf  # until `on_charge`

    def saw(self, host: str) -> None:
        """Note that an agent of this machine has connected: who else runs there is not cut off, and connects, too."""
        self._unseen.discard(host)
        if not self._unseen:
            self.surrender(_BEFORE)

    def on_charge(self, late_s: float, now: float) -> None:
        """Note that earlier coordinators give no more answers `late_s` from now."""
        if _BEFORE in self:
            self[_BEFORE] = self._end(now) + late_s

    def running(self, now: float) -> int:
        """Count the leases that have not run out."""
        for agent in [agent for agent, end in self.items() if end <= now]:
            del self[agent]
        return len(self)


class Epochs:
    """Claims the number of the next round, in a thread: a store that hangs must not leave agents without answers."""

    def __init__(self, home: Path, attempt: int):
        self.home, self.attempt = home, attempt
        self.problem = ""  # why there is none yet
        self._claims = ThreadPoolExecutor(1, "claims")
        self._claim: Future[int] | None = None
        self._again_at = -inf

    def next(self, last: int, now: float) -> int | None:
        """Return the number for the round after `last` (0: not known), always the same until `use`.

        Returns None while there is none; `problem` says why.

        Raises:
            Fenced: another coordinator has claimed one after `last`.
        """
        if self._claim is None:
            if now < self._again_at:
                return None
            owner = f"attempt {self.attempt} {uuid.uuid4().hex}"
            self._claim = self._claims.submit(claim, self.home, ROUND, owner, last or None)
        if not wait([self._claim], _CLAIM_S).done:
            self.problem = f"checkpoint.dir: {self.home} does not answer"
            return None
        error = self._claim.exception()
        if error is None or isinstance(error, Fenced):
            return self._claim.result()
        self._claim, self._again_at = None, now + _AGAIN_S
        self.problem = f"checkpoint.dir: {self.home} cannot be written: {type(error).__name__}: {error}"
        return None

    def use(self) -> None:
        """Begin a round with the number."""
        self._claim, self.problem = None, ""
