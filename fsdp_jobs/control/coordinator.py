"""The coordinator's decisions: which nodes form a round, when it ends, when the attempt ends. No torch, no network.

A round is a set of nodes with fixed ranks. Each agent holds a connection: if it closes without `Away`, the agent is
dead; if it is silent, the node is lost. When a round breaks, every agent stops its ranks and becomes ready again. The
next round starts with the ready nodes, once no rank of the last round can still run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.resolve import node_range
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.control.attempt import Attempt
from fsdp_jobs.control.placement import ConnectedAgent, Formation
from fsdp_jobs.control.round import Round
from fsdp_jobs.plan.layout import partners
from fsdp_jobs.plan.topology import to_hostlist
from fsdp_jobs.run import events, messages
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.rank_state import SAVES_NOTHING, Phase, Request
from fsdp_jobs.run.table import listed
from fsdp_jobs.run.term import Fenced
from fsdp_jobs.run.verdict import EXIT_REQUEUE, Verdict

_SETTLE_S = 1.0  # after the first sign of a failure, to receive the reports that show the cause
_STOPS_S = 60.0  # to wait for an agent to stop its ranks, before a round forms without it
_BLOCKED_S = 1.0  # if a tick is this late, this process was blocked, and the agents' messages are queued


class Coordinator(Attempt):
    """Makes the decisions. The server calls a method per message, and `tick` ten times a second."""

    def __init__(self, config: JobConfig, run: RunDir, number: int, now: float):
        super().__init__(config, run, number)
        self.formation = Formation(config.elastic, *node_range(config.nodes), now)
        self._came_at = now  # when an agent last joined the round
        self._exclusion = ""  # why the newest excluded machine was turned away
        self._ticked = now
        self.handlers: dict[type[messages.Message], Callable[..., None]] = {
            messages.Beat: self.on_beat,
            messages.Failed: self.on_failed,
            messages.Ready: self.on_ready,
            messages.Master: self.on_master,
            messages.Notice: self.on_notice,
            messages.Ended: self.on_ended,
            messages.Away: self.on_away,
        }
        for guard in self.guards:
            self.handlers |= dict.fromkeys(guard.takes, guard.on_message)

    def on_message(self, agent: ConnectedAgent, message: messages.Message, now: float) -> None:
        self.handlers[type(message)](agent, message, now)

    def on_hello(self, agent: ConnectedAgent, hello: messages.Hello, now: float) -> bool:
        """Accept an agent that connects, possibly with running ranks.

        Returns False if it is of another attempt, or if another agent of its node is alive.
        """
        if agent.attempt != self.number:
            why = f"this is attempt {self.number}, and the agent's is {agent.attempt}"
            agent.send(messages.End(EXIT_REQUEUE, why))
            return False
        patience_s = min(3 * self.elastic.heartbeat_interval_s, self.elastic.heartbeat_timeout_s)
        before = self.agents.get(agent.node)
        if before is not None and before.id != agent.id:
            is_saving = before.in_round and self.stop_reason is not None and self.verdict is None
            if is_saving or now - before.heard <= patience_s:
                return False  # it will try again
            self.on_gone(before, f"node {agent.node} was silent and has been replaced", now)
            before = None
        self.agents[agent.node] = agent
        agent.ended = hello.ended
        self.leases.pop(agent.host, None)
        self.term_seen = max(self.term_seen, hello.term)
        if self.verdict is None and hello.running.number >= 0:
            self._take_back(agent, hello.running, now)
        if hello.signal:
            self.on_notice(agent, hello, now)
        if hello.ready:
            self.on_ready(agent, messages.Ready(after=-1, at=hello.at), now)
        else:
            self._answer(agent, hello.at, now)
        if before is not None and before.in_round and not (agent.in_round or agent.ended):
            self.break_round(f"node {agent.node} lost its connection before its ranks were started", now)
        return True

    def _take_back(self, agent: ConnectedAgent, running: messages.Round, now: float) -> None:
        """Put an agent with running ranks back into their round; a new coordinator adopts that round."""
        current = self.round
        if self._may_adopt and not current.running and running.number >= current.number:
            known = (running.number, running.term, running.size, running.shard_group)
            self.round = Round(*known, running=True, is_adopted=True, began_at=now)
            self.record(events.Adopted(running.size))
        elif not current.running or running.number != current.number:
            self.leases.hold(agent.id, now)  # an answer just before may have renewed its lease
            agent.send(messages.Break(running.number))
            return
        self._take_into_round(agent, now)
        if agent.id == current.head and not current.has_met:
            self.break_round(f"node {agent.node} lost its connection before the others knew its address", now)

    def _take_into_round(self, agent: ConnectedAgent, now: float) -> None:
        agent.in_round, self.round.hosts[agent.node], self._came_at = True, agent.host, now
        self.leases.hold(agent.id, now)

    def _answer(self, agent: ConnectedAgent, at: float, now: float) -> None:
        """Answer a sign of life; after the verdict, say so. Do not renew the lease of ranks whose round is over."""
        agent.heard = now
        may_run = agent.in_round and self.round.running and not agent.ended
        agent.send(messages.Alive(at if may_run or agent.ready else None, time.time(), now < self.in_charge_until))
        if may_run:
            self.leases.hold(agent.id, now)
        self._send_end(agent)

    def on_beat(self, agent: ConnectedAgent, beat: messages.Beat, now: float) -> None:
        current = self.round
        agent.take(beat)
        self._answer(agent, beat.at, now)
        for report, _ in beat.ranks:
            if agent.in_round and report.step >= 0:
                current.has_reports = True
                if report.phase == Phase.STARTING:  # restored
                    current.first_step = report.step
                elif not current.has_trained:  # ranks may have restored an older checkpoint than the newest on record
                    current.has_trained, self.step, self.committed = True, 0, -1
                    current.first_step = min(current.first_step, report.step)
            self.step, self.committed = max(self.step, report.step), max(self.committed, report.committed)
            current.saves |= agent.in_round and report.committed > SAVES_NOTHING

    def on_ready(self, agent: ConnectedAgent, ready: messages.Ready, now: float) -> None:
        """Record that an agent has no running ranks and wants to join the next round."""
        if agent.in_round and ready.after < self.round.number:
            return  # its `Hello` already said so, and the agent is about to receive the new round
        self._on_ranks_ended(agent)
        if agent.in_round and not self.round.stops_by_signal:
            self.break_round(f"node {agent.node} left the round", now)
        agent.ready, agent.in_round = True, False
        self._answer(agent, ready.at, now)

    def on_failed(self, agent: ConnectedAgent, message: messages.Failed, now: float) -> None:
        """Record that ranks of a node have failed; its agent is stopping the others."""
        current, reports = self.round, sorted(message.failures, key=lambda f: f.time)
        if not reports or self.verdict is not None:
            return
        if current.running and not (agent.in_round or current.is_adopted):
            return  # of an earlier round; the current one runs without this node
        if current.stops_by_signal:
            agent.ended = True  # the signal ended its ranks; others may still be saving
            return
        current.failures += reports
        current.ended |= self.agents.ahead()
        self.step = max(self.step, *(f.step for f in reports))
        why = " and ".join(f.describe() for f in reports)
        if current.running:
            self.break_round(why, now)
        elif current.broken_at is None and self._may_adopt:  # failures without a coordinator count, too
            current.broken_at = current.failed_at = now
            current.broken_why, self._may_adopt = why, False
        current.failed_at = min(current.failed_at, now - max(f.waited_s for f in reports))

    def on_master(self, agent: ConnectedAgent, master: messages.Master, now: float) -> None:
        if agent.id == self.round.head and master.round == self.round.number:
            self.round.has_met = True
            self.agents.send(master)

    def on_notice(self, agent: ConnectedAgent, message: messages.Notice | messages.Hello, now: float) -> None:
        """Stop the job on a node's signal; if the cluster replaces nodes, save and continue without that node."""
        agent.is_leaving = self.config.cluster.replaces_nodes
        if agent.is_leaving and not all(a.is_leaving for a in self.agents.values()):
            if agent.in_round:
                self.round.leaving.add(agent.node)
            if agent.in_round and self.round.running and self.round.requested is Request.NONE:
                self._request(Request.PARK)
            return
        self.on_stop(f"node {agent.node} received {message.signal}", now)

    def on_ended(self, agent: ConnectedAgent, ended: messages.Ended, now: float) -> None:
        agent.ended = True
        self.leases.pop(agent.id, None)
        if self._have_ended() and self.verdict is None and not self.round.stops_by_signal:
            self.close(self._done(), now)  # after a signal, `_watch_round` closes it

    def on_away(self, agent: ConnectedAgent, away: messages.Away, now: float) -> None:
        agent.is_away = True

    def on_gone(self, agent: ConnectedAgent, why: str, now: float, certain: bool = False) -> None:
        """Drop an agent whose connection has closed, or that has been silent for too long.

        Args:
            certain: its process and its ranks are dead; otherwise its ranks may run until the lease expires.
        """
        if self.agents.get(agent.node) is not agent:
            return
        del self.agents[agent.node]
        agent.drop()
        if certain:
            self._on_ranks_ended(agent)
        self.round.left += agent.in_round and agent.ended
        if agent.in_round and not agent.ended and self.verdict is None:
            if certain and agent.memory_note:
                self.round.starved.add(agent.node)
            self.record(events.NodeLost(agent.node, agent.host, why))
            self.round.lost[agent.node] = why
            self.break_round(why, now, now if certain else agent.heard)

    def tick(self, now: float) -> None:
        blocked_s, self._ticked = now - self._ticked, now
        if self.is_superseded:
            return
        self._on_blocked(blocked_s, now)
        for agent in self.agents.values() if blocked_s > _BLOCKED_S else ():
            agent.heard += blocked_s
        timeout_s, recently = self.elastic.heartbeat_timeout_s, now - 1.5 * self.elastic.heartbeat_interval_s
        for agent, are_heard in self.agents.doubtful(now - timeout_s, recently):
            silent = now - agent.heard
            is_cut_off = agent.is_unreachable and are_heard
            if is_cut_off or silent > timeout_s:
                what = "cannot be reached" if is_cut_off else "was silent"
                self.round.has_cuts |= is_cut_off
                self.round.is_in_doubt |= agent.in_round and not are_heard
                self.on_gone(agent, f"node {agent.node} ({agent.host}) {what} for {silent:.0f} s", now)
        if self.verdict is not None:
            if self.closed_at is None:
                self._announce(now)
            return
        if self.round.broken_at is not None:
            if now - self.round.broken_at >= _SETTLE_S or not self.agents.in_round():
                self.formation.restart(now)
                self._judge(now)
        elif self.round.running:
            self._watch_round(now)
        else:
            self._maybe_form(now)

    def _watch_round(self, now: float) -> None:
        here, current = self._here(), self.round
        if self._have_ended() and current.requested is not Request.STOP:
            self.close(self._done(), now)  # they reported this to the previous coordinator
            return
        has_left = self.agents.are_parked() or (current.stops_by_signal and self.agents.have_ended())
        if self.stop_reason is not None and (now > self.stop_by or has_left):
            if not has_left:
                what = "saved" if current.has_reports else "ended"
                self.stop_reason += f"; not {what} within {self.elastic.stop_grace_s:.0f} s{self.storage_note(now)}"
            self.close(self._preempted(now), now)
        elif current.stops_by_signal:
            pass  # nodes leave the round one by one
        elif current.is_adopted and here < current.size and now - self._came_at > self.elastic.heartbeat_timeout_s:
            why = f"{current.size - here} of {current.size} nodes did not come back to the new coordinator"
            self.break_round(why, now)
        else:
            self._maybe_grow(now)
            for guard in self.guards:
                guard.watch(now)

    def _maybe_form(self, now: float) -> None:
        """Form a round when enough nodes are ready; requeue the attempt if they do not come in time."""
        self._turn_away()
        ready = self.agents.ready()
        late = [a.name for a in self.agents.values() if not a.ready]  # they are still stopping their ranks
        are_all_ready = not late or now - self.formation.since > _STOPS_S
        if late and are_all_ready:
            self.warn(f"no longer waiting for {listed(late, 4)}: their ranks do not stop")
        if self.formation.is_complete(len(ready), are_all_ready, self.round.number < 0, self._may_adopt, now):
            are_fenced = self.round.saves and self.round.has_gaps and not self.config.is_program
            if self.leases.running(now, are_fenced):
                self.warn("waiting until no rank of the previous round can still run")
            else:
                self._form(ready, now)
        elif (wait_s := self.formation.waited_in_vain_s(len(ready), bool(self._exclusion), now)) is not None:
            missing = f"{len(ready)} of at least {self.formation.min_nodes} nodes after {wait_s:.0f} s"
            self.close(self.budget.requeue("; ".join(filter(None, [missing, self._exclusion]))), now)

    def _turn_away(self) -> None:
        """End ready agents whose node received a stop signal, or whose machine is excluded."""
        excluded = self.excluded  # a thread may replace it
        for agent in [a for a in self.agents.ready() if a.is_leaving or a.host in excluded]:
            why = "this node received a stop signal"
            if not agent.is_leaving:
                why = self._exclusion = f"{agent.host} is excluded: {excluded[agent.host]}"
            agent.send(messages.End(EXIT_REQUEUE, why))
            del self.agents[agent.node]

    def _next_term(self, now: float) -> int | None:
        """Return the term of the next round, None until it is claimed."""
        try:
            term = self.terms.next(self.round.term, self.term_seen, now)
        except Fenced:
            self.on_superseded()
            return None
        if term is None and self.terms.problem:
            self.warn(self.terms.problem)
            if now - self.formation.since > self.elastic.wait_for_nodes_s:
                self.close(self.budget.requeue(self.terms.problem), now)
        return term

    def _form(self, ready: list[ConnectedAgent], now: float) -> None:
        """Plan with the ready nodes and give each its ranks in topology order, once plan and term exist."""
        try:
            plan = self.planner.plan(ready, self.round.shard_group)
        except BadInput as e:
            self.close(Verdict("user_error", "stop", "; ".join(map(str, e.problems))), now)
            return
        term = self._next_term(now)
        if plan is None or term is None:
            return
        by_name = {a.name: a for a in ready}
        layout, chosen, number = plan.layout, [by_name[name] for name in plan.nodes], self.round.number + 1
        self.terms.use()
        self._may_adopt, self._warned, self._exclusion = False, "", ""
        news = [guard.begin_round() for guard in self.guards]
        self.step = max(0, self.committed)
        known = (number, term, len(chosen), layout.shard_group)
        self.round = Round(*known, head=chosen[0].id, began_at=now, first_step=self.step, running=True)
        nodes, hosts = [a.node for a in chosen], [a.host for a in chosen]
        # Elsewhere each node would receive a long list of all names.
        hostlist = to_hostlist(hosts) if "SLURM_JOB_NODELIST" in os.environ else ""
        for rank, (agent, other) in enumerate(zip(chosen, partners(len(chosen)), strict=True)):
            agent.ready = agent.ended = False
            agent.take(messages.Beat())
            self._take_into_round(agent, now)
            for message in filter(None, news):
                agent.send(message)
            partner = None if other is None else (chosen[other].address, chosen[other].copies)
            agent.send(messages.Round(*known, rank, layout.to_json(), chosen[-1].node, partner, hostlist))
        spares, why = [by_name[name].node for name in plan.spares], list(plan.reasons)
        sharding = (layout.strategy, layout.shard_group, layout.world_size)
        self.record(events.RoundStarted(nodes, hosts, *sharding, spares, why, term))

    def _maybe_grow(self, now: float) -> None:
        """Add nodes that came after the round had started, once the ranks have saved and parked.

        If the ranks report nothing, stop them at once, as torchrun does.
        """
        self._turn_away()
        current, waiting = self.round, self.agents.ready()
        new = {a.id for a in waiting} - current.not_needed
        is_silent = not current.has_reports and now - current.began_at > self.elastic.join_window_s
        may_grow = is_silent or self.step > current.first_step
        if new and current.size < self.formation.max_nodes and current.requested is Request.NONE and may_grow:
            usable = self.planner.usable_nodes([*self.agents.in_round(), *waiting], current.shard_group)
            if usable is None:
                return  # ask again
            if usable > current.size:
                self._request(Request.PARK)
            current.not_needed |= new
        if current.requested is Request.PARK and (self.agents.are_parked() or not current.has_reports):
            leaving = sorted(a.node for a in self.agents.values() if a.is_leaving)
            change = f"nodes {leaving} received a stop signal" if leaving else f"{len(waiting)} more nodes join"
            current.is_over = True
            self.break_round(current.parked_for or change, now)
