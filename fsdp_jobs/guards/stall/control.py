"""Detect that ranks run but do not advance, and find the rank that the others wait for. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from fsdp_jobs.config.resolve import PROGRAMS_STALL_S
from fsdp_jobs.control import guard
from fsdp_jobs.control.attempt import Attempt
from fsdp_jobs.control.placement import ConnectedAgent
from fsdp_jobs.run import events
from fsdp_jobs.run.protocol import Message
from fsdp_jobs.run.rank_state import Request
from fsdp_jobs.run.table import listed

_FLOOR_S = 60.0
_SAVES_S = 1800.0  # that a save may take, of which nobody hears before it is done
_STEPS = 20  # step times without a step that are a stall, unless the user sets a time
_ANSWERS_S = 4.0  # for agents to send the state of their ranks


class Guard(guard.Guard):
    """Watches one round after the other."""

    kinds = ("stacks",)

    def __init__(self, attempt: Attempt):
        super().__init__(attempt)
        self.begin_round()

    def begin_round(self) -> Message:
        self._step: int | None = None  # the slowest rank's, None before the first report
        self._since = self._step_s = 0.0  # the second: measured, the slowest of the newest few
        self._asked_at: float | None = None  # when agents were asked for stacks
        self._answers: list[Message] = []
        self._saving_since: float | None = None
        self._silent_s = 0.0  # for so long ranks that report no steps had done nothing
        return {}

    def on_message(self, agent: ConnectedAgent, message: Message, now: float) -> None:
        self._answers.append(message)

    def watch(self, now: float) -> None:
        attempt, agents = self.attempt, self.attempt.agents.in_round()
        if self._asked_at is not None:
            if len(self._answers) >= len(agents) or now - self._asked_at > _ANSWERS_S:
                self._end_round(now)
            return
        slowest = attempt.agents.slowest_step()
        if slowest is None or attempt.round.requested is not Request.NONE:
            return
        self._saving_since = (self._saving_since or now) if attempt.agents.are_saving() else None
        if self._saving_since is not None and now - self._saving_since < _SAVES_S:
            self._since = now  # the next step has not begun
            return
        silent_s = min((a.beat.get("silent", 0.0) for a in agents), default=0.0)
        if self._see(slowest, attempt.round.first_step, now) or silent_s:
            self._asked_at, self._answers, self._silent_s = now, [], silent_s
            attempt.agents.send("dump")

    def _end_round(self, now: float) -> None:
        """Say for how long nothing has advanced and because of whom; a single node is the culprit."""
        attempt, self._asked_at = self.attempt, None
        stood_s = self._silent_s or now - self._since
        why, attempt.round.culprit = self._blame(stood_s)
        attempt.round.has_stalled = True
        attempt.record(events.Stalled(why))
        attempt.break_round(why, now, now - stood_s)

    def _limit_s(self) -> float:
        """Return the seconds without a step that are a stall."""
        config = self.attempt.config
        floor_s = PROGRAMS_STALL_S if config.is_program else _FLOOR_S
        return config.elastic.stall_timeout_s or max(floor_s, _STEPS * self._step_s)

    def _see(self, slowest: int, first_step: int, now: float) -> bool:
        """Note the slowest rank's step; True when it has not advanced for too long.

        Not before every rank has done a step more than `first_step`, with which the round began: the first one
        compiles, allocates and opens connections.
        """
        if self._step is None or slowest != self._step:
            if self._step is not None and slowest > self._step >= first_step + 1:
                self._step_s = max(0.8 * self._step_s, (now - self._since) / (slowest - self._step))
            self._step, self._since = slowest, now
        return slowest > first_step and now - self._since > self._limit_s()

    def _blame(self, stood_s: float) -> tuple[str, int | None]:
        """Return a sentence, and the node when it is a single one."""
        ranks = [(a["node"], r) for a in self._answers for r in a["ranks"]]
        what = "no rank has done a step" if not self._silent_s else "no output, no work and no new file"
        waited = f"{what} for {stood_s:.0f} s"
        if self._silent_s and not _is_frozen(ranks):
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
