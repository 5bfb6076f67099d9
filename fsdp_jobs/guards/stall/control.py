"""Detect that ranks run but do not advance, and find the one that holds the others up. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fsdp_jobs.config.resolve import PROGRAMS_STALL_S
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.run.protocol import Message
from fsdp_jobs.run.table import listed

_FLOOR_S = 60.0
_STEPS = 20  # step times without a step that are a stall, unless the user sets a time
_ANSWERS_S = 4.0  # for agents to send the state of their ranks


@dataclass
class StallWatch:
    """Watches one round."""

    config: JobConfig
    _step: int | None = None  # the slowest rank's, None before the first report
    _since: float = 0.0
    _step_s: float = 0.0  # measured, the slowest of the newest few
    asked_at: float | None = None  # when agents were asked for stacks
    answers: list[Message] = field(default_factory=list)
    has_stalled: bool = False
    silent_s: float | None = None  # for so long ranks that report no steps have done nothing

    def limit_s(self) -> float:
        """Return the seconds without a step that are a stall."""
        floor_s = PROGRAMS_STALL_S if self.config.is_program else _FLOOR_S
        return self.config.elastic.stall_timeout_s or max(floor_s, _STEPS * self._step_s)

    def see(self, slowest: int, first_step: int, now: float) -> bool:
        """Note the slowest rank's step; True when it has not advanced for too long.

        Not before every rank has done a step more than `first_step`, with which the round began: the first one
        compiles, allocates and opens connections.
        """
        if self._step is None or slowest != self._step:
            if self._step is not None and slowest > self._step >= first_step + 1:
                self._step_s = max(0.8 * self._step_s, (now - self._since) / (slowest - self._step))
            self._step, self._since = slowest, now
        return slowest > first_step and now - self._since > self.limit_s()

    def stood_s(self, now: float) -> float:
        """Return for how many seconds nothing has advanced."""
        return now - self._since if self.silent_s is None else self.silent_s

    def settled(self, agents: int, now: float) -> bool:
        """Whether all agents have answered, or have had the time to."""
        assert self.asked_at is not None
        return len(self.answers) >= agents or now - self.asked_at > _ANSWERS_S

    def blame(self, now: float) -> tuple[str, int | None]:
        """Say how long nothing has advanced and because of whom; and the node, when it is a single one."""
        self.asked_at, self.has_stalled = None, True
        ranks = [(a["node"], r) for a in self.answers for r in a["ranks"]]
        what = "no rank has done a step" if self.silent_s is None else "no output, no work and no new file"
        waited = f"{what} for {self.stood_s(now):.0f} s"
        if self.silent_s is not None and not _is_frozen(ranks):
            return f"{waited}: {_apart(ranks)}", None  # the program's fault, and no machine's
        dead = [(n, r) for n, r in ranks if not r["dumped"]]
        if dead:
            named = [f"rank {r['rank']} on node {n} ({r['status']})" for n, r in dead]
            return f"{waited}: {listed(named, 4)} does not respond", _only(n for n, _ in dead)
        behind = min((r["step"] for _, r in ranks), default=0)
        slow = [(n, r) for n, r in ranks if r["step"] == behind]
        if 0 < len(slow) < len(ranks):
            named = [f"rank {r['rank']} on node {n}" for n, r in slow]
            why = f"{waited}: {listed(named, 4)} is still in step {behind + 1} and the others are past it"
            return why, _only(n for n, _ in slow)
        return f"{waited}: all are in step {behind + 1}; their stacks are in the attempt's node folders", None


def _is_frozen(ranks: list[tuple[int, dict[str, Any]]]) -> bool:
    """Whether single ranks wrote no stacks; what is not Python never does."""
    return 0 < sum(not r["dumped"] and not r["ended"] for _, r in ranks) < len(ranks)


def _apart(ranks: list[tuple[int, dict[str, Any]]]) -> str:
    """Say where ranks are, first those that are not where most are, or for whom the others wait in a collective."""
    places = defaultdict[tuple[bool, str], list[str]](list)
    for node, r in sorted(ranks, key=lambda rank: rank[1]["rank"]):
        where = "ended" if r["ended"] else f"in {r['place']}"
        places[r["waits"] and not r["ended"], where].append(f"rank {r['rank']} on node {node}")
    groups = sorted(places.items(), key=lambda group: (group[0][0], len(group[1])))
    if len(groups) == 1:
        return f"every rank {groups[0][0][1]}"
    return "; ".join(f"{listed(who, 4)} {where}" for (_, where), who in groups[:3])


def _only(nodes: Iterable[int]) -> int | None:
    different = set(nodes)
    return different.pop() if len(different) == 1 else None
