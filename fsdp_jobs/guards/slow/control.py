"""Report slow nodes with their GPU driver's reasons; exclude one if the job ends sooner. No torch."""

from __future__ import annotations

import time
from dataclasses import replace

from fsdp_jobs.config.resolve import least_nodes
from fsdp_jobs.control import guard
from fsdp_jobs.control.placement import ConnectedAgent
from fsdp_jobs.guards.slow.messages import Slow, Throttled
from fsdp_jobs.guards.slow.windows import SlowWatch
from fsdp_jobs.run import events
from fsdp_jobs.run.rank_state import Request

_RESTART_S = 180.0  # as the plan assumes
_ANSWERS_S = 60.0  # for a node to ask its GPUs' driver
_EXCLUDE_S = 6 * 3600.0  # duration of an exclusion, and at most one in that time


class Guard(guard.Guard):
    """Watches the current round; asks a slow node for the reason, then reports it."""

    takes = (Throttled,)

    def start(self) -> None:
        self._excluded_at = 0.0  # seconds since 1970
        self.begin_round()

    def read(self, event: events.Event) -> None:
        if isinstance(event, events.MachineExcluded) and event.is_slow:
            self._excluded_at = event.time

    def begin_round(self) -> None:
        self._watch, self._looked_at = SlowWatch(), 0.0
        self._asked: dict[int, events.SlowNode] = {}  # by node
        self._asked_at = 0.0
        self._named: events.SlowNode | None = None  # a candidate for exclusion

    def on_message(self, agent: ConnectedAgent, message: Throttled, now: float) -> None:
        """Record a slow node with its driver's reasons."""
        if (slow := self._asked.pop(agent.node, None)) is not None:
            self._named = replace(slow, host=agent.host, throttled=message.why)
            self.attempt.record(self._named)

    def watch(self, now: float) -> None:
        """Record causes of slow steps; first ask a slow node for the reason."""
        attempt = self.attempt
        if now - self._looked_at < attempt.elastic.heartbeat_interval_s:
            return
        self._looked_at = now
        times = {a.node: [times for _, times in a.beat.ranks] for a in attempt.agents.in_round()}
        found = self._watch.see(times) if len(times) == attempt.round.size else None
        if isinstance(found, events.SlowSteps):
            attempt.record(found)
        elif found is not None:
            self._asked[found.node], self._asked_at = found, now
            attempt.agents[found.node].send(Slow())
        if now - self._asked_at > _ANSWERS_S:  # its driver does not answer
            for node in self._asked.keys() & attempt.agents.keys():
                self.on_message(attempt.agents[node], Throttled([]), now)
        if self._named is not None and attempt.elastic.exclude_slow and attempt.round.requested is Request.NONE:
            self._exclude(self._named)

    def _exclude(self, slow: events.SlowNode) -> None:
        """Exclude a slow node's machine if the job then ends sooner on the other nodes and spares."""
        attempt, current = self.attempt, self.attempt.round
        rest = [a for a in attempt.agents.values() if a.host != slow.host and (a.in_round or a.ready)]
        usable = attempt.planner.usable_nodes(rest, current.shard_group)
        if usable is None:
            return  # ask again
        self._named = None
        left = 0 if attempt.config.is_program else attempt.config.steps - attempt.step
        may = usable >= least_nodes(attempt.config) and time.time() - self._excluded_at > _EXCLUDE_S
        # With only two nodes, either may be at fault. The node of rank 0 does more work for checkpoints.
        is_at_fault = slow.others > 1 and slow.cause != "checkpoint"
        saved_s = left * (slow.lost_s - slow.step_s * max(0.0, current.size / max(1, usable) - 1))
        if may and is_at_fault and saved_s > 3 * _RESTART_S:  # ranks save before they are stopped
            self._excluded_at = time.time()
            attempt.exclude(events.MachineExcluded(slow.host, slow.sentence(), is_slow=True), _EXCLUDE_S)
            attempt.park(f"{slow.host} is excluded, because it is slow")
