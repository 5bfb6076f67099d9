"""Detect ranks that run but do not advance, and find the rank that the others wait for. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from fsdp_jobs.config.resolve import PROGRAMS_STALL_S
from fsdp_jobs.control import guard
from fsdp_jobs.control.placement import ConnectedAgent
from fsdp_jobs.guards.stall.messages import Dump, RankStack, Stacks
from fsdp_jobs.run import events
from fsdp_jobs.run.rank_state import Phase, Request
from fsdp_jobs.run.table import listed

_FLOOR_S = 60.0
_SAVES_S = 1800.0  # most time for a save, which shows no progress until it is done
_STEPS = 20  # step times without a step that count as a stall, unless the user sets a time
_ANSWERS_S = 4.0  # for agents to send the state of their ranks


class Guard(guard.Guard):
    """Watches the current round."""

    takes = (Stacks,)

    def start(self) -> None:
        self.begin_round()

    def begin_round(self) -> None:
        self._step: int | None = None  # the slowest rank's, None before the first report
        self._since = self._step_s = 0.0  # when `_step` was reached; the slowest of the newest step times
        self._asked_at: float | None = None  # when agents were asked for stacks
        self._answers: dict[int, list[RankStack]] = {}  # by node
        self._saving_since: float | None = None
        self._silent_s = 0.0  # how long ranks that report no steps have been idle

    def on_message(self, agent: ConnectedAgent, message: Stacks, now: float) -> None:
        self._answers[agent.node] = message.ranks

    def watch(self, now: float) -> None:
        attempt, agents = self.attempt, self.attempt.agents.in_round()
        phases = attempt.agents.phases()
        if not phases or attempt.round.requested is Request.STOP:  # a stop has a time limit of its own
            return
        if attempt.round.has_reports and Phase.DONE in phases:
            return  # a rank has done all its steps; what the others still do may take long
        if attempt.storage_away_s(now):  # ranks may wait for it
            self._since, self._asked_at = now, None
            return
        # While one rank waits for a checkpoint, others may wait for that rank.
        self._saving_since = (self._saving_since or now) if {Phase.SAVING, Phase.ENDING} & phases else None
        if self._saving_since is not None and now - self._saving_since < _SAVES_S:
            self._since, self._asked_at = now, None  # the next step has not begun
            return
        silent_s = min((a.beat.measured.get("silent", 0.0) for a in agents), default=0.0)
        if not (self._see(min(a.step for a in agents if a.phases), attempt.round.first_step, now) or silent_s):
            self._asked_at = None  # also if the stall ended while agents collected stacks
        elif self._asked_at is None:
            self._asked_at, self._answers, self._silent_s = now, {}, silent_s
            attempt.agents.send(Dump())
        elif len(self._answers) >= len(agents) or now - self._asked_at > _ANSWERS_S:
            self._end_round(now)

    def _end_round(self, now: float) -> None:
        """Record how long the ranks have stalled and which held them up; a single node is the culprit."""
        attempt, self._asked_at = self.attempt, None
        stood_s = self._silent_s or now - self._since
        why, attempt.round.culprit = self._blame(stood_s)
        attempt.round.has_stalled = True
        attempt.record(events.Stalled(why))
        attempt.break_round(why, now, now - stood_s)

    def _limit_s(self) -> float:
        """Return after how many seconds without a step ranks count as stalled."""
        config = self.attempt.config
        floor_s = PROGRAMS_STALL_S if config.is_program or not self._step_s else _FLOOR_S
        return config.elastic.stall_timeout_s or max(floor_s, _STEPS * self._step_s)

    def _see(self, slowest: int, first_step: int, now: float) -> bool:
        """Record the slowest rank's step. Returns True if it has not advanced for too long.

        Returns False until every rank has done a step after `first_step`, with which the round began, because that
        step compiles, allocates and opens connections.
        """
        if self._step is None or slowest != self._step:
            if self._step is not None and slowest > self._step:
                before_s = self._step_s if self._step > first_step + 1 else 0.0  # the first one's is a placeholder
                self._step_s = max(0.8 * before_s, (now - self._since) / (slowest - self._step))
            self._step, self._since = slowest, now
        return slowest > first_step and now - self._since > self._limit_s()

    def _blame(self, stood_s: float) -> tuple[str, int | None]:
        """Return a sentence on the cause, and the node if a single one is at fault."""
        ranks = [(node, r) for node, of_node in self._answers.items() for r in of_node]
        what = "no output, no work and no new file" if self._silent_s else "no rank has done a step"
        waited = f"{what} for {stood_s:.0f} s"
        if self._silent_s and not _is_frozen(ranks):
            return f"{waited}: {_apart(ranks)}", None  # the program is at fault, not a machine
        dead = [(n, r) for n, r in ranks if not (r.dumped or r.ended)]
        if dead:
            named = [f"rank {r.rank} on node {n} ({r.status})" for n, r in dead]
            node = _only(n for n, _ in dead) if _is_frozen(ranks) else None  # of all, the program may be the reason
            return f"{waited}: {listed(named, 4)} does not respond", node
        if not ranks:
            return f"{waited}: all are in step {(self._step or 0) + 1}, and no node has sent their stacks", None
        behind = min(r.step for _, r in ranks)
        slow = [(n, r) for n, r in ranks if r.step == behind]
        if 0 < len(slow) < len(ranks):
            named = [f"rank {r.rank} on node {n}" for n, r in slow]
            why = f"{waited}: {listed(named, 4)} is still in step {behind + 1} and the others are past it"
            return why, _only(n for n, _ in slow)
        return f"{waited}: all are in step {behind + 1}; their stacks are in the attempt's node folders", None


def _is_frozen(ranks: list[tuple[int, RankStack]]) -> bool:
    """Whether some ranks, but not all, wrote no stacks; programs that are not Python never write any."""
    return 0 < sum(not r.dumped and not r.ended for _, r in ranks) < len(ranks)


def _apart(ranks: list[tuple[int, RankStack]]) -> str:
    """Describe where ranks are, those not waiting in a collective first, and small groups before large."""
    places = defaultdict[tuple[bool, str], list[str]](list)
    for node, r in sorted(ranks, key=lambda rank: rank[1].rank):
        where = "ended" if r.ended else f"in {r.place}"
        places[r.waits and not r.ended, where].append(f"rank {r.rank} on node {node}")
    groups = sorted(places.items(), key=lambda group: (group[0][0], len(group[1])))
    if len(groups) == 1:
        return f"every rank {groups[0][0][1]}"
    return "; ".join(f"{listed(who, 4)} {where}" for (_, where), who in groups[:3])


def _only(nodes: Iterable[int]) -> int | None:
    different = set(nodes)
    return different.pop() if len(different) == 1 else None
