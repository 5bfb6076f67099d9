"""The coordinator's decisions: who forms a round, when it is over, when the attempt is. No torch, no network.

A round is a set of nodes with fixed ranks. Agents hold a connection each; a closed connection is a dead agent, a
silent one a lost node. When a round breaks, every agent stops its ranks and becomes ready again, and the next
round starts with those that are there.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.resolve import node_range
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.elastic.failures import Budget, Failure, Machines, find_cause
from fsdp_jobs.elastic.placement import Agents, ConnectedAgent, Formation, RoundPlanner
from fsdp_jobs.elastic.protocol import Message
from fsdp_jobs.elastic.rank_state import Request
from fsdp_jobs.elastic.stall import FLOOR_S, PROGRAMS_FLOOR_S, StallWatch
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.tail import last_lines
from fsdp_jobs.run.verdict import EXIT_REQUEUE, Verdict

_LONG_ROUND_S = 600.0  # a round of a user's program that lasted so long counts as progress
_SETTLE_S = 1.0  # after the first sign of a failure: for the reports that tell the cause

logger = logging.getLogger(__name__)


class Coordinator:
    """The decisions, without the network: methods are called as messages arrive, `tick` ten times a second."""

    def __init__(self, config: JobConfig, run: RunDir, attempt: int, now: float):
        self.config, self.run, self.attempt = config, run, attempt
        self.elastic = config.elastic
        self._is_users = config.is_program  # the user's own program: it need not save, nor do a step a minute
        self._stall_limits = self.elastic.stall_timeout_s, PROGRAMS_FLOOR_S if self._is_users else FLOOR_S
        self.agents = Agents()
        self.round = -1
        self.size = 0  # nodes in the round
        self.shard_group = 0  # of the newest round; 0 before the first
        self.running = False
        self.verdict: Verdict | None = None
        self.closed_at = 0.0
        self.planner = RoundPlanner(config, run)
        self.formation = Formation(config.elastic, *node_range(config.nodes), now)
        self.budget = Budget(config.elastic.max_failures_without_progress, run)
        self.machines = Machines(run, config.elastic.exclude_after, config.elastic.exclude_for_s)
        self.committed = -1
        self.step = 0
        self.stop_reason: str | None = None
        self.requested = Request.NONE
        self._broken_at: float | None = None
        self._broken_why = ""
        self._failures: list[Failure] = []
        self._head: ConnectedAgent | None = None
        self._may_adopt = True  # no round was formed or broken yet: this may replace a coordinator that died
        self._watch = StallWatch(*self._stall_limits)
        self._culprit: int | None = None  # node that was lost, or on which the others waited
        self._hosts: dict[int, str] = {}  # node -> machine, of the newest round
        self._exclusion = ""  # of the newest machine that was turned away
        self._first_step = 0  # that the round began with
        self._began_at = now
        self._has_reports = False  # some rank of the round has reported a step
        self._stop_by = 0.0
        self._not_needed: set[str] = set()  # ids of agents that would not put more nodes to work
        for event in events.read_events(run):  # of a coordinator that this one replaces
            if event.attempt == attempt and event.round is not None:
                self.round = max(self.round, event.round)
            if isinstance(event, events.Checkpoint):
                self.committed = event.step

    def _record(self, event: events.Event) -> None:
        event = replace(event, round=self.round)
        events.record(self.run, self.attempt, event)
        logger.info("%s", event.sentence() or event.kind)

    @property
    def _stops_by_signal(self) -> bool:
        """Whether the ranks were asked to stop and can only be told by a signal: none has ever reported."""
        return self.requested is Request.STOP and not self._has_reports

    def on_hello(self, agent: ConnectedAgent, round_: int, size: int, shard_group: int, now: float) -> None:
        """Take in an agent that connects for the first time, or again with ranks running in `round_`."""
        for other in [a for a in self.agents.values() if a.node == agent.node and a.id != agent.id]:
            if other.in_round and self.stop_reason is not None and self.verdict is None:
                agent.drop()  # until the other has saved, or is silent for too long: it asks again
                return
            self.on_gone(other, f"node {other.node} was replaced", now)
        self.agents[agent.id] = agent
        if self.verdict is not None:
            self._send_end(agent)
        elif round_ >= 0 and self._may_adopt and not self.running and round_ >= self.round:
            self.round, self.size, self.running = round_, size, True  # adopt: the coordinator was restarted
            self.shard_group, agent.in_round = shard_group, True
            self._hosts[agent.node] = agent.host
            self._record(events.Adopted(size))
        elif round_ >= 0 and round_ == self.round and self.running:
            agent.in_round, self._hosts[agent.node] = True, agent.host
        elif round_ >= 0:
            agent.send({"kind": "break", "round": round_, "why": "a newer round runs without this node"})

    def on_beat(self, agent: ConnectedAgent, ranks: list[list[int]], now: float) -> None:
        agent.heard, agent.ranks = now, ranks
        self._has_reports |= agent.in_round and any(step >= 0 for step, _, _ in ranks)
        for step, committed, _ in ranks:
            self.step, self.committed = max(self.step, step), max(self.committed, committed)

    def on_ready(self, agent: ConnectedAgent, failures: list[Message], now: float) -> None:
        """Note that an agent has no ranks running and wants to be in the next round."""
        agent.heard = now
        self.on_failed(agent, failures, now)
        if agent.in_round and not self._stops_by_signal:
            self._break(f"node {agent.node} left the round", now)
        agent.ready, agent.in_round, agent.ranks = True, False, []
        if self.verdict is not None:
            self._send_end(agent)

    def on_failed(self, agent: ConnectedAgent, failures: list[Message], now: float) -> None:
        """Note that ranks of a node have failed; its agent is stopping the others."""
        if not failures or self.verdict is not None:
            return
        if self._stops_by_signal:
            agent.ended = True  # by the signal; others may still be saving
            return
        reports = [Failure(**f) for f in failures]
        self._failures += reports
        why = " and ".join(f.describe() for f in reports)
        if self.running:
            self._break(why, now)
        elif self._broken_at is None and self._may_adopt:  # while there was no coordinator: it counts nevertheless
            self._broken_at, self._broken_why, self._may_adopt = now, why, False

    def on_master(self, agent: ConnectedAgent, message: Message) -> None:
        if agent is self._head and message["round"] == self.round:
            for other in self.agents.in_round():
                if other is not agent:
                    other.send({**message, "kind": "start", "host": agent.address})

    def on_ended(self, agent: ConnectedAgent, now: float) -> None:
        agent.ended = True
        if self.agents.have_ended() and self.verdict is None and not self._stops_by_signal:
            self._close(self._done(), now)  # after a signal `_watch_round` does

    def _done(self) -> Verdict:
        what = "the program has ended" if self._is_users else f"all {self.config.steps} steps are done"
        return Verdict("done", "stop", what)

    def on_gone(self, agent: ConnectedAgent, why: str, now: float) -> None:
        """Drop an agent whose connection has closed, or that has been silent for too long."""
        if self.agents.get(agent.id) is not agent:
            return
        del self.agents[agent.id]
        agent.drop()
        if agent.in_round and not agent.ended and self.verdict is None:
            self._record(events.NodeLost(agent.node, agent.host, why))
            self._culprit = agent.node if self._culprit is None else self._culprit
            self._break(why, now)

    def on_stop(self, why: str, now: float) -> None:
        """Stop the job: a signal to any of its processes, or the user's cancel."""
        if self.stop_reason is not None or self.verdict is not None:
            return
        self.stop_reason = why
        self._record(events.StopRequested(why))
        self._stop_by = now + self.elastic.stop_grace_s
        if self.running:
            self._request(Request.STOP)
        else:
            self._close(self._preempted(), now)

    def tick(self, now: float) -> None:
        for agent in list(self.agents.values()):
            silent = now - agent.heard
            if silent > self.elastic.heartbeat_timeout_s:
                self.on_gone(agent, f"node {agent.node} ({agent.host}) was silent for {silent:.0f} s", now)
        if self.verdict is None and self.run.stop_request.exists():
            self.on_stop(self.run.stop_request.read_text().strip() or "cancelled", now)
        if self.running and self.run.save_request.exists():
            self.run.save_request.unlink(missing_ok=True)
            self.agents.send("request", request=int(Request.SAVE))
        if self.verdict is not None:
            return
        if self._broken_at is not None:
            if now - self._broken_at >= _SETTLE_S or not self.agents.in_round():
                self._judge(now)
        elif self.running:
            self._watch_round(now)
        else:
            self._maybe_form(now)

    def _watch_round(self, now: float) -> None:
        here = len(self.agents.in_round())
        if here == self.size and self.agents.have_ended() and self.requested is not Request.STOP:
            self._close(self._done(), now)  # they had reported it to the coordinator before this one
            return
        has_left = self.agents.are_parked() or (self._stops_by_signal and self.agents.have_ended())
        if self.stop_reason is not None and (now > self._stop_by or has_left):
            if not has_left:
                what = "saved" if self._has_reports else "ended"
                self.stop_reason += f"; not {what} within {self.elastic.stop_grace_s:.0f} s"
            self._close(self._preempted(), now)
        elif self._stops_by_signal:
            pass  # nodes leave the round one by one
        elif 0 < here < self.size and now - self.formation.since > self.elastic.heartbeat_timeout_s:
            self._break(f"{self.size - here} nodes did not reconnect to the restarted coordinator", now)
        else:
            self._maybe_grow(now)
            self._watch_for_stall(now)

    def on_stacks(self, message: Message) -> None:
        self._watch.answers.append(message)

    def _watch_for_stall(self, now: float) -> None:
        slowest = self.agents.slowest_step()
        if self._watch.asked_at is not None:
            if self._watch.settled(len(self.agents.in_round()), now):
                why, self._culprit = self._watch.blame(now)
                self._record(events.Stalled(why))
                self._break(why, now)
        elif slowest is not None and self.requested is Request.NONE and self._watch.see(slowest, self._first_step, now):
            self._watch.asked_at, self._watch.answers = now, []
            self.agents.send("dump")

    def _break(self, why: str, now: float) -> None:
        """End the running round: every agent stops its ranks and becomes ready again."""
        if not self.running:
            return
        self.running, self._broken_at, self._broken_why, self._may_adopt = False, now, why, False
        self.agents.send("break", round=self.round, why=why)

    def _judge(self, now: float) -> None:
        """Decide, from what is known of a broken round, whether another one follows."""
        failures, self._failures, self._broken_at = self._failures, [], None
        culprit, self._culprit = self._culprit, None
        self.formation.restart(now)
        was_long = self._is_users and now - self._began_at > _LONG_ROUND_S
        if failures and all(f.is_request for f in failures) and self.requested is not Request.PARK:
            if self._is_users and self.stop_reason is None and not was_long:  # by itself, and it may do so again
                self._close(self.budget.requeue(failures[0].describe()), now)
                return
            # An agent that received a signal while there was no coordinator asked the ranks itself.
            self.stop_reason = self.stop_reason or f"node {failures[0].node} received a signal to stop"
        if self.stop_reason is not None:
            self._close(self._preempted(), now)
            return
        if self.requested is Request.PARK:
            self.requested = Request.NONE
            self._record(events.RoundBroken(self._broken_why, self.step, self.committed))
            return
        stalled = self._watch.has_stalled
        cause = find_cause(failures, culprit, self._broken_why, stalled)
        machine = self._hosts.get(cause.node) if cause.node is not None else None
        self._record(events.RoundBroken(cause.why, self.step, self.committed, blamed=machine))
        verdict = self.budget.judge(cause, self.committed, stalled, was_long)
        if verdict is not None:
            if cause.failure is not None and cause.failure.is_out_of_memory:
                verdict.reason += f". {self.planner.what_would_fit(self.size)}"
            self._close(verdict, now)
        elif machine is not None and len(set(self._hosts.values())) > 1:
            reason = self.machines.blame(machine, cause.why)
            if reason is not None:
                self._record(events.MachineExcluded(machine, reason))

    def _maybe_form(self, now: float) -> None:
        """Form a round when enough nodes are ready; requeue the attempt when they do not come."""
        self._turn_away_excluded()
        ready = self.agents.ready()
        are_all_ready = len(ready) == len(self.agents)  # the others are still stopping their ranks
        if self.formation.is_complete(len(ready), are_all_ready, self.round < 0, now):
            self._form(ready, now)
        elif (wait_s := self.formation.waited_in_vain_s(len(ready), bool(self._exclusion), now)) is not None:
            missing = f"{len(ready)} of at least {self.formation.min_nodes} nodes after {wait_s:.0f} s"
            self._close(self.budget.requeue("; ".join(filter(None, [missing, self._exclusion]))), now)

    def _turn_away_excluded(self) -> None:
        ready = self.agents.ready()
        excluded = self.run.excluded_hosts() if ready else {}
        for agent in [a for a in ready if a.host in excluded]:
            self._exclusion = f"{agent.host} is excluded: {excluded[agent.host]}"
            agent.send({"kind": "end", "exit_code": EXIT_REQUEUE, "why": self._exclusion})
            del self.agents[agent.id]

    def _form(self, ready: list[ConnectedAgent], now: float) -> None:
        """Plan with the ready nodes, and give each its ranks in topology order."""
        try:
            plan, by_name = self.planner.plan(ready, self.shard_group)
        except BadInput as e:
            self._close(Verdict("user_error", "stop", "; ".join(map(str, e.problems))), now)
            return
        layout, chosen = plan.layout, [by_name[name] for name in plan.nodes]
        self.round, self.size, self.shard_group = self.round + 1, len(chosen), layout.shard_group
        self._hosts, self._head = {a.node: a.host for a in chosen}, chosen[0]
        self.running, self.requested, self._may_adopt = True, Request.NONE, False
        self.step = self._first_step = max(0, self.committed)
        self._began_at = now
        self._watch, self._not_needed, self._has_reports = StallWatch(*self._stall_limits), set(), False
        message = {"kind": "round", "round": self.round, "size": self.size, "layout": layout.to_json()}
        for rank, agent in enumerate(chosen):
            agent.ready, agent.in_round, agent.ended, agent.ranks = False, True, False, []
            agent.send({**message, "rank": rank})
        started = events.RoundStarted(
            nodes=[a.node for a in chosen],
            hosts=[a.host for a in chosen],
            strategy=layout.strategy,
            shard_group=layout.shard_group,
            world_size=layout.world_size,
            spares=[by_name[name].node for name in plan.spares],
            why=list(plan.reasons),
        )
        self._record(started)

    def _maybe_grow(self, now: float) -> None:
        """Take in nodes that came after the round had started, once the ranks have saved and parked.

        Ranks that report nothing are stopped for them at once, as torchrun does.
        """
        self._turn_away_excluded()
        waiting = self.agents.ready()
        new = {a.id for a in waiting} - self._not_needed
        is_silent = not self._has_reports and now - self._began_at > self.elastic.join_window_s
        may_grow = is_silent or self.step > self._first_step
        if new and self.size < self.formation.max_nodes and self.requested is Request.NONE and may_grow:
            if self.planner.usable_nodes([*self.agents.in_round(), *waiting], self.shard_group) > self.size:
                self._request(Request.PARK)
            self._not_needed |= new
        if self.requested is Request.PARK and (self.agents.are_parked() or not self._has_reports):
            self._break(f"{len(waiting)} more nodes join", now)

    def _request(self, request: Request) -> None:
        self.requested = request
        self.agents.send("request", request=int(request))

    def _preempted(self) -> Verdict:
        if self.committed >= 0:
            saved = f"saved at step {self.committed}"
        elif self._is_users and not self._has_reports:
            saved = "the program received SIGTERM"
        else:
            saved = "nothing was saved yet"
        decision = "stop" if self.run.stop_request.exists() else "requeue"
        return Verdict("preempted", decision, f"{self.stop_reason}; {saved}")

    def _close(self, verdict: Verdict, now: float) -> None:
        self.verdict, self.closed_at, self.running = verdict, now, False
        if verdict.rank is not None and verdict.node is not None:
            verdict.last_lines = last_lines(self.run.rank_log(self.attempt, verdict.node, verdict.rank), 20)
        verdict.close(self.run, self.attempt, round=self.round, step=self.step, committed=self.committed)
        for agent in self.agents.values():
            self._send_end(agent)

    def _send_end(self, agent: ConnectedAgent) -> None:
        assert self.verdict is not None
        agent.send({"kind": "end", "exit_code": self.verdict.exit_code_of_attempt, "why": self.verdict.reason})
