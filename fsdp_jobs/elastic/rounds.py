"""What the coordinator decides: who forms the next round, when a round is over, when the attempt is. No torch, no I/O
but the run directory.

A round is one life of the world: a set of nodes with fixed ranks. Agents hold a connection each; a closed
connection is a dead agent, a silent one a lost node. When a round breaks, every node stops its ranks and
comes back ready, and the next round starts with whoever is there.
"""

from __future__ import annotations

from dataclasses import replace

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.resolve import node_range
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.elastic.failures import Budget, Failure, Machines, first_cause
from fsdp_jobs.elastic.placement import Member, Seating
from fsdp_jobs.elastic.protocol import Message
from fsdp_jobs.elastic.rank_state import Phase, Request
from fsdp_jobs.elastic.stall import PROGRAMS_FLOOR_S, StallWatch
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.tail import last_lines
from fsdp_jobs.run.verdict import EXIT_REQUEUE, Verdict

_REPLACEMENT_S = 60.0  # an excluded machine is not waited for longer than a replacement takes to come
_A_LIFE_S = 600.0  # a program that says nothing of its progress has made some when a round lasted so long
_SETTLE_S = 1.0  # after a first sign of failure: wait so long for the reports that tell the cause


class Coordinator:
    """The decisions, without the network: methods are called as messages arrive, `tick` ten times a second."""

    def __init__(self, config: JobConfig, run: RunDir, attempt: int, now: float):
        self.config, self.run, self.attempt = config, run, attempt
        self.elastic = config.elastic
        self.min_nodes, self.max_nodes = node_range(config.nodes)
        self.members: dict[str, Member] = {}  # by life
        self.round = -1
        self.size = 0  # nodes in the round
        self.shard_group = 0  # of the newest round; 0 before the first
        self.running = False
        self.verdict: Verdict | None = None
        self.closed_at = 0.0
        self.seating = Seating(config, run)
        self.budget = Budget(config.elastic.max_failures_without_progress, run)
        self.machines = Machines(run, config.elastic.exclude_after, config.elastic.exclude_for_s)
        self.committed = -1
        self.step = 0
        self.stop_reason: str | None = None
        self.asked = Request.NONE
        self._forming_since = now
        self._enough_since: float | None = None
        self._broken_at: float | None = None
        self._broken_why = ""
        self._failures: list[Failure] = []
        self._head: Member | None = None
        self._fresh = True  # neither formed nor broke a round: may be the successor of a coordinator that died
        self._watch = self._new_watch()
        self._stalled = False
        self._culprit: int | None = None  # node that was lost, or on which the others waited
        self._hosts: dict[int, str] = {}  # node -> machine, of the newest round
        self._turned_away = ""  # the newest machine that came and was excluded
        self._begun_at = 0  # step the round began with
        self._begun_when = now
        self._stop_by = 0.0
        self._refused: set[str] = set()  # lives whose joining would not put more nodes to work
        for event in events.read_events(run):  # of a coordinator that this one replaces
            if event.attempt == attempt and event.round is not None:
                self.round = max(self.round, event.round)
            if isinstance(event, events.Checkpoint):
                self.committed = event.step

    def _record(self, event: events.Event) -> None:
        events.record(self.run, self.attempt, replace(event, round=self.round))

    @property
    def _is_deaf(self) -> bool:
        """Whether ranks are a program's that has never said anything on its boards: it hears only signals."""
        return self.config.is_program and not any(s >= 0 for m in self.round_members() for s, _, _ in m.ranks)

    def _new_watch(self) -> StallWatch:
        timeout = self.elastic.stall_timeout_s
        return StallWatch(timeout, PROGRAMS_FLOOR_S) if self.config.is_program else StallWatch(timeout)

    def round_members(self) -> list[Member]:
        return [m for m in self.members.values() if m.in_round]

    def on_hello(self, member: Member, round_: int, size: int, shard_group: int, now: float) -> None:
        """An agent has connected: for the first time, or again with ranks running in `round_`."""
        for other in [m for m in self.members.values() if m.node == member.node and m.agent != member.agent]:
            self.on_gone(other, f"node {other.node} was replaced", now)
        self.members[member.agent] = member
        if self.verdict is not None:
            self._send_end(member)
        elif round_ >= 0 and self._fresh and not self.running and round_ >= self.round:
            self.round, self.size, self.running = round_, size, True  # adopt: the coordinator was restarted
            self.shard_group, member.in_round = shard_group, True
            self._hosts[member.node] = member.host
            self._record(events.Adopted(size))
        elif round_ >= 0 and round_ == self.round and self.running:
            member.in_round, self._hosts[member.node] = True, member.host
        elif round_ >= 0:
            member.send({"kind": "break", "round": round_, "why": "the job has moved on without this node"})

    def on_beat(self, member: Member, ranks: list[list[int]], now: float) -> None:
        member.heard, member.ranks = now, ranks
        for step, committed, _ in ranks:
            self.step, self.committed = max(self.step, step), max(self.committed, committed)

    def on_ready(self, member: Member, failures: list[Message], now: float) -> None:
        """An agent has no ranks running and wants to be in the next round."""
        member.heard = now
        self.on_failed(member, failures, now)
        if member.in_round and not (self.asked is Request.STOP and self._is_deaf):
            self._break(f"node {member.node} left the round", now)
        member.ready, member.in_round, member.ranks = True, False, []
        if self.verdict is not None:
            self._send_end(member)

    def on_failed(self, member: Member, failures: list[Message], now: float) -> None:
        """Ranks of a node have failed; it is stopping the others."""
        if not failures or self.verdict is not None:
            return
        if self.asked is Request.STOP and self._is_deaf:
            member.ended = True  # by the signal; others may still be saving
            return
        reports = [Failure(**f) for f in failures]
        self._failures += reports
        why = " and ".join(f.describe() for f in reports)
        if self.running:
            self._break(why, now)
        elif self._broken_at is None and self._fresh:  # while there was no coordinator: charged all the same
            self._broken_at, self._broken_why, self._fresh = now, why, False

    def on_master(self, member: Member, message: Message) -> None:
        if member is self._head and message["round"] == self.round:
            for other in self.round_members():
                if other is not member:
                    other.send({**message, "kind": "start", "host": member.address})

    def on_ended(self, member: Member, now: float) -> None:
        member.ended = True
        if self.asked is Request.STOP and self._is_deaf:
            return  # `_watch_round` sees when all have ended
        if self._all_ended() and self.verdict is None:
            self._close(self._done(), now)

    def _done(self) -> Verdict:
        what = "the program has ended" if self.config.is_program else f"all {self.config.steps} steps are done"
        return Verdict("done", "stop", what)

    def on_gone(self, member: Member, why: str, now: float) -> None:
        """An agent's connection has closed, or it has been silent for too long."""
        if self.members.get(member.agent) is not member:
            return
        del self.members[member.agent]
        member.drop()
        if member.in_round and not member.ended and self.verdict is None:
            self._record(events.NodeLost(member.node, member.host, why))
            self._culprit = member.node if self._culprit is None else self._culprit
            self._break(why, now)

    def on_stop(self, why: str, now: float) -> None:
        """The job has to leave: a signal to any of its processes, or the user's cancel."""
        if self.stop_reason is not None or self.verdict is not None:
            return
        self.stop_reason = why
        self._record(events.StopRequested(why))
        self._stop_by = now + self.elastic.stop_grace_s
        if self.running:
            self._ask(Request.STOP)
        else:
            self._close(self._preempted(), now)

    def tick(self, now: float) -> None:
        for member in list(self.members.values()):
            silent = now - member.heard
            if silent > self.elastic.heartbeat_timeout_s:
                self.on_gone(member, f"node {member.node} ({member.host}) was silent for {silent:.0f} s", now)
        if self.verdict is None and self.run.stop_request.exists():
            self.on_stop(self.run.stop_request.read_text().strip() or "cancelled", now)
        if self.running and self.run.save_request.exists():
            self.run.save_request.unlink(missing_ok=True)
            self._send_request(Request.SAVE)
        if self.verdict is not None:
            return
        if self._broken_at is not None:
            if now - self._broken_at >= _SETTLE_S or not any(m.in_round for m in self.members.values()):
                self._judge(now)
        elif self.running:
            self._watch_round(now)
        else:
            self._maybe_form(now)

    def _watch_round(self, now: float) -> None:
        here = len(self.round_members())
        if here == self.size and self._all_ended() and self.asked is not Request.STOP:
            self._close(self._done(), now)  # they told the coordinator before this one
            return
        has_left = self._all_parked() or (self.asked is Request.STOP and self._is_deaf and self._all_ended())
        if self.stop_reason is not None and (now > self._stop_by or has_left):
            if not has_left:
                what = "ended" if self._is_deaf else "saved"
                self.stop_reason += f"; not {what} within {self.elastic.stop_grace_s:.0f} s"
            self._close(self._preempted(), now)
        elif self.asked is Request.STOP and self._is_deaf:
            pass  # nodes leave the round one by one
        elif 0 < here < self.size and now - self._forming_since > self.elastic.heartbeat_timeout_s:
            self._break(f"{self.size - here} nodes did not come back to a new coordinator", now)
        else:
            self._maybe_grow(now)
            self._watch_for_stall(now)

    def on_stacks(self, message: Message) -> None:
        self._watch.answers.append(message)

    def _watch_for_stall(self, now: float) -> None:
        members = self.round_members()
        steps = [step for m in members for step, _, _ in m.ranks]
        if self._watch.asked_at is not None:
            if self._watch.settled(len(members), now):
                (why, self._culprit), self._watch.asked_at, self._stalled = self._watch.blame(now), None, True
                self._record(events.Stalled(why))
                self._break(why, now)
        elif steps and self.asked is Request.NONE and self._watch.see(min(steps), self._begun_at, now):
            self._watch.asked_at, self._watch.answers = now, []
            for member in members:
                member.send({"kind": "dump"})

    def _break(self, why: str, now: float) -> None:
        """The running round is over: everyone stops their ranks and comes back."""
        if not self.running:
            return
        self.running, self._broken_at, self._broken_why, self._fresh = False, now, why, False
        for member in self.round_members():
            member.send({"kind": "break", "round": self.round, "why": why})

    def _judge(self, now: float) -> None:
        """Decide, from what is known of a broken round, whether there will be another."""
        failures, self._failures, self._broken_at = self._failures, [], None
        culprit, self._culprit = self._culprit, None
        self._forming_since, self._enough_since = now, None
        lived = self.config.is_program and now - self._begun_when > _A_LIFE_S
        if failures and all(f.is_request for f in failures) and self.asked is not Request.PARK:
            if self.config.is_program and self.stop_reason is None and not lived:  # by itself, and it may do so again
                self._close(self.budget.requeue(failures[0].describe()), now)
                return
            # An agent that was told to stop while there was no coordinator asked the ranks itself.
            self.stop_reason = self.stop_reason or f"node {failures[0].node} was told to stop"
        if self.stop_reason is not None:
            self._close(self._preempted(), now)
            return
        if self.asked is Request.PARK:
            self.asked = Request.NONE
            self._record(events.RoundBroken(self._broken_why, self.step, self.committed))
            return
        real = [f for f in failures if not f.is_request]
        cause = first_cause(real) if real else None
        if cause is not None and (cause.is_victim or (culprit is not None and not cause.error)):
            cause = None  # everyone is a victim: the cause died with its node, or on the network
        why = cause.describe() if cause is not None and not self._stalled else self._broken_why
        stalled, self._stalled = self._stalled, False
        cause = None if stalled else cause
        if cause is not None:
            culprit = cause.node if cause.may_be_the_machines else None
        machine = self._hosts.get(culprit) if culprit is not None else None
        self._record(events.RoundBroken(why, self.step, self.committed, blamed=machine))
        verdict = self.budget.judge(cause, self.committed, why, stalled, lived)
        if verdict is not None:
            if cause is not None and cause.is_out_of_memory:
                verdict.reason += f". {self.seating.what_would_fit(self.size)}"
            self._close(verdict, now)
        elif machine is not None and len(set(self._hosts.values())) > 1:
            reason = self.machines.blame(machine, why)
            if reason is not None:
                self._record(events.MachineExcluded(machine, reason))

    def _maybe_form(self, now: float) -> None:
        self._turn_away_excluded()
        ready = [m for m in self.members.values() if m.ready]
        others = len(self.members) - len(ready)  # alive, still stopping their ranks: worth waiting for
        if len(ready) < self.min_nodes:
            self._enough_since = None
            wait_s = self.elastic.wait_for_nodes_s
            wait_s = min(wait_s, _REPLACEMENT_S) if self._turned_away else wait_s
            if now - self._forming_since > wait_s:
                have = f"{len(ready)} of at least {self.min_nodes} nodes after {wait_s:.0f} s"
                self._close(self.budget.requeue("; ".join(filter(None, [have, self._turned_away]))), now)
            return
        self._enough_since = self._enough_since if self._enough_since is not None else now
        window = self.elastic.join_window_s if self.round < 0 else _SETTLE_S
        if len(ready) >= self.max_nodes or (not others and now - self._enough_since >= window):
            self._form(ready, now)

    def _turn_away_excluded(self) -> None:
        ready = [m for m in self.members.values() if m.ready]
        excluded = self.run.excluded_hosts() if ready else {}
        for member in [m for m in ready if m.host in excluded]:
            self._turned_away = f"{member.host} is excluded: {excluded[member.host]}"
            member.send({"kind": "end", "exit_code": EXIT_REQUEUE, "why": self._turned_away})
            del self.members[member.agent]

    def _form(self, ready: list[Member], now: float) -> None:
        """Plan with the nodes that are here, and give each its place in topology order."""
        try:
            plan, by_name = self.seating.plan(ready, self.shard_group)
        except BadInput as e:
            self._close(Verdict("user_error", "stop", "; ".join(map(str, e.problems))), now)
            return
        layout, chosen = plan.layout, [by_name[name] for name in plan.nodes]
        self.shard_group = layout.shard_group
        self.round, self.size, self.running = self.round + 1, len(chosen), True
        self._hosts = {m.node: m.host for m in chosen}
        self.asked, self._head, self._fresh = Request.NONE, chosen[0], False
        self.step = self._begun_at = max(0, self.committed)
        self._begun_when = now
        self._watch, self._refused = self._new_watch(), set()
        for rank, member in enumerate(chosen):
            member.ready, member.in_round, member.ended, member.ranks = False, True, False, []
            member.send(
                {"kind": "round", "round": self.round, "rank": rank, "size": self.size, "layout": layout.to_json()}
            )
        started = events.RoundStarted(
            nodes=[m.node for m in chosen],
            hosts=[m.host for m in chosen],
            strategy=layout.strategy,
            shard_group=layout.shard_group,
            world_size=layout.world_size,
            spares=[by_name[name].node for name in plan.spares],
            why=list(plan.reasons),
            program=self.config.is_program or None,
        )
        self._record(started)

    def _maybe_grow(self, now: float) -> None:
        """Nodes that came after the round had started are taken in once the ranks have saved and parked.

        A program that says nothing is stopped for them at once, as torchrun does.
        """
        self._turn_away_excluded()
        waiting = [m for m in self.members.values() if m.ready]
        new = {m.agent for m in waiting} - self._refused
        may = self.step > self._begun_at or (self._is_deaf and now - self._begun_when > self.elastic.join_window_s)
        if new and self.size < self.max_nodes and self.asked is Request.NONE and may:
            if self.seating.put_to_work([*self.round_members(), *waiting], self.shard_group) > self.size:
                self._ask(Request.PARK)
            self._refused |= new
        if self.asked is Request.PARK and (self._all_parked() or self._is_deaf):
            self._break(f"{len(waiting)} more nodes join", now)

    def _all_parked(self) -> bool:
        phases = [phase for m in self.round_members() for _, _, phase in m.ranks]
        return bool(phases) and all(phase == Phase.PARKED for phase in phases)

    def _all_ended(self) -> bool:
        return all(m.ended for m in self.round_members())

    def _ask(self, request: Request) -> None:
        self.asked = request
        self._send_request(request)

    def _send_request(self, request: Request) -> None:
        for member in self.round_members():
            member.send({"kind": "request", "request": int(request)})

    def _preempted(self) -> Verdict:
        why = self.stop_reason or ""
        cancelled = self.run.stop_request.exists()
        saved = f"saved at step {self.committed}" if self.committed >= 0 else "nothing was saved yet"
        if self.committed < 0 and self._is_deaf:
            saved = "the program was told so by SIGTERM"
        return Verdict("preempted", "stop" if cancelled else "requeue", f"{why}; {saved}")

    def _close(self, verdict: Verdict, now: float) -> None:
        self.verdict, self.closed_at, self.running = verdict, now, False
        if verdict.rank is not None and verdict.node is not None:
            verdict.last_lines = last_lines(self.run.rank_log(self.attempt, verdict.node, verdict.rank), 20)
        verdict.close(self.run, self.attempt, round=self.round, step=self.step, committed=self.committed)
        for member in self.members.values():
            self._send_end(member)

    def _send_end(self, member: Member) -> None:
        assert self.verdict is not None
        exit_code = self.verdict.exit_code_of_attempt
        member.send({"kind": "end", "exit_code": exit_code, "why": self.verdict.reason})
