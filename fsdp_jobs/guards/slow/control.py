"""Report slow nodes with what their GPU driver says, and exclude one if the job ends sooner without it. No torch."""

from __future__ import annotations

import time
from dataclasses import replace

from fsdp_jobs.config.resolve import node_range
from fsdp_jobs.control import guard
from fsdp_jobs.control.attempt import Attempt
from fsdp_jobs.control.placement import ConnectedAgent
from fsdp_jobs.guards.slow.windows import SlowWatch
from fsdp_jobs.run import events
from fsdp_jobs.run.protocol import Message
from fsdp_jobs.run.rank_state import Request

_RESTART_S = 180.0  # as the plan assumes
_EXCLUDE_S = 6 * 3600.0  # for so long, and at most one in that time


class Guard(guard.Guard):
    """Watches one round after the other; a slow node is asked why, and then told."""

    kinds = ("throttled",)

    def __init__(self, attempt: Attempt):
        super().__init__(attempt)
        self._excluded_at = 0.0  # seconds since 1970
        self.begin_round()

    def read(self, event: events.Event) -> None:
        if isinstance(event, events.MachineExcluded) and event.is_slow:
            self._excluded_at = event.time

    def begin_round(self) -> Message:
        self._watch, self._looked_at = SlowWatch(), 0.0
        self._asked: dict[int, events.SlowNode] = {}  # by node
        self._named: events.SlowNode | None = None  # it may be excluded
        return {}

    def on_message(self, agent: ConnectedAgent, message: Message, now: float) -> None:
        """Name a slow node, with what its driver says."""
        if (slow := self._asked.pop(agent.node, None)) is not None:
            self._named = replace(slow, host=agent.host, throttled=message["why"])
            self.attempt.record(self._named)

    def watch(self, now: float) -> None:
        """Record what holds steps up; a slow node is asked first."""
        attempt = self.attempt
        if now - self._looked_at < attempt.elastic.heartbeat_interval_s:
            return
        self._looked_at = now
        agents = {a.node: a for a in attempt.agents.in_round()}
        is_whole = len(agents) == attempt.round.size
        found = self._watch.see({node: a.times for node, a in agents.items()}) if is_whole else None
        if isinstance(found, events.SlowSteps):
            attempt.record(found)
        elif found is not None:
            self._asked[found.node] = found
            agents[found.node].send({"kind": "slow"})
        if self._named is not None and attempt.elastic.exclude_slow and attempt.round.requested is Request.NONE:
            self._exclude(self._named)

    def _exclude(self, slow: events.SlowNode) -> None:
        """Exclude a slow node's machine if the others and spares are faster without it, and for long enough."""
        attempt, current = self.attempt, self.attempt.round
        rest = [a for a in attempt.agents.values() if a.host != slow.host and (a.in_round or a.ready)]
        usable = attempt.planner.usable_nodes(rest, current.shard_group)
        if usable is None:
            return  # ask again
        self._named = None
        left = 0 if attempt.config.is_program else attempt.config.steps - attempt.step
        may = usable >= node_range(attempt.config.nodes)[0] and time.time() - self._excluded_at > _EXCLUDE_S
        if may and _pays(slow, current.size, usable, left):
            self._excluded_at, why = time.time(), slow.sentence()
            attempt.run.exclude(slow.host, _EXCLUDE_S, why)
            attempt.record(events.MachineExcluded(slow.host, why, is_slow=True))
            attempt.park(f"{slow.host} is excluded, because it is slow")


def _pays(slow: events.SlowNode, nodes: int, without: int, steps: int) -> bool:
    """Whether a round of `without` nodes, the slow one not among them, does so many steps so much sooner than `nodes`.

    With two nodes it is not known which of them is at fault, and the node of rank 0 does more work for
    checkpoints. Ranks save before they are stopped, so what it costs is a restart.
    """
    saved_s = slow.lost_s - slow.step_s * max(0.0, nodes / max(1, without) - 1)
    return slow.others > 1 and slow.cause != "checkpoint" and saved_s * steps > 3 * _RESTART_S
