"""Noticing that ranks live but do not advance, and finding the one that holds the others up. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fsdp_jobs.elastic.protocol import Message

_FLOOR_S = 60.0
PROGRAMS_FLOOR_S = 1800.0  # a user's program may evaluate, and do other things between steps, as long as it likes
_STEPS = 20  # without a word of the user's: so many step times without a step are a stall
_ANSWERS_S = 4.0  # how long agents have to send what their ranks are doing


@dataclass
class StallWatch:
    """Watches one round. `timeout_s` is the user's, 0 for a multiple of the measured step time."""

    timeout_s: float
    floor_s: float = _FLOOR_S
    _step: int | None = None  # the slowest rank's, None before the first report
    _since: float = 0.0
    _step_s: float = 0.0  # measured, the slowest of the newest few
    asked_at: float | None = None  # when agents were asked for stacks
    answers: list[Message] = field(default_factory=list)

    def limit_s(self) -> float:
        """Seconds without a step that are a stall."""
        return self.timeout_s or max(self.floor_s, _STEPS * self._step_s)

    def see(self, slowest: int, begun_at: int, now: float) -> bool:
        """Take note of the slowest rank's step; True when it has not moved for too long.

        Not before every rank has done a step more than `begun_at`, the step this round began with: the first one
        compiles, allocates and opens connections.
        """
        if self._step is None or slowest != self._step:
            if self._step is not None and slowest > self._step >= begun_at + 1:
                self._step_s = max(0.8 * self._step_s, (now - self._since) / (slowest - self._step))
            self._step, self._since = slowest, now
        return slowest > begun_at and now - self._since > self.limit_s()

    def settled(self, agents: int, now: float) -> bool:
        """Whether all agents have answered, or had time enough to."""
        assert self.asked_at is not None
        return len(self.answers) >= agents or now - self.asked_at > _ANSWERS_S

    def blame(self, now: float) -> tuple[str, int | None]:
        """One sentence, how long nothing moved and on whose account; and the node, when it is one node's."""
        ranks = [(a["node"], r) for a in self.answers for r in a["ranks"]]
        waited = f"no rank has done a step for {now - self._since:.0f} s"
        dead = [(n, r) for n, r in ranks if not r["dumped"]]
        if dead:
            named = ", ".join(f"rank {r['rank']} on node {n} ({r['status']})" for n, r in dead[:4])
            return f"{waited}: {named} does not respond", _only(n for n, _ in dead)
        behind = min((r["step"] for _, r in ranks), default=0)
        slow = [(n, r) for n, r in ranks if r["step"] == behind]
        if 0 < len(slow) < len(ranks):
            named = ", ".join(f"rank {r['rank']} on node {n}" for n, r in slow[:4])
            why = f"{waited}: {named} is still in step {behind + 1} and the others are past it"
            return why, _only(n for n, _ in slow)
        return f"{waited}: all are in step {behind + 1}; their stacks are in the attempt's node folders", None


def _only(nodes: Iterable[int]) -> int | None:
    different = set(nodes)
    return different.pop() if len(different) == 1 else None
