"""State of an attempt and its rounds, and the decision after a round has failed. No torch, no network."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace

from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.control.failures import Budget, Machines, find_cause
from fsdp_jobs.control.fencing import Leases
from fsdp_jobs.control.guard import Guard
from fsdp_jobs.control.placement import Agents, ConnectedAgent, RoundPlanner
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.failure import Failure
from fsdp_jobs.run.leaves import guards_in
from fsdp_jobs.run.rank_state import Request
from fsdp_jobs.run.tail import last_lines
from fsdp_jobs.run.verdict import Verdict

_LONG_ROUND_S = 600.0  # a round of a program that saves nothing and lasted so long counts as progress

logger = logging.getLogger(__name__)


@dataclass
class Round:
    """State of the newest round. Before the first, a round that is not running."""

    number: int = -1
    term: int = 0  # the number over all attempts of the run
    size: int = 0  # nodes
    shard_group: int = 0  # 0 before the first
    hosts: dict[int, str] = field(default_factory=dict)  # node -> machine
    head: ConnectedAgent | None = None
    began_at: float = 0.0
    first_step: int = 0  # that it began with
    running: bool = False
    is_adopted: bool = False  # it began under a coordinator before this one
    has_reports: bool = False  # some rank has reported a step
    saves: bool = False  # some rank has something to save with
    has_gaps: bool = False  # ranks of some node have ended: the others cannot do a step
    has_cuts: bool = False  # a node was lost because its machine could not be reached
    requested: Request = Request.NONE
    parked_for: str = ""  # in place of nodes that join
    not_needed: set[str] = field(default_factory=set)  # ids of agents that would not put more nodes to work
    broken_at: float | None = None  # until it is judged
    failed_at: float = 0.0  # when what broke it happened
    broken_why: str = ""
    failures: list[Failure] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)  # node -> how
    culprit: int | None = None  # node on which the others waited, that was lost alone, or whose state is wrong
    excludes: bool = False  # the culprit at once
    has_stalled: bool = False

    def was_long(self, now: float) -> bool:
        return not self.saves and now - self.began_at > _LONG_ROUND_S

    @property
    def stops_by_signal(self) -> bool:
        """Whether the ranks were asked to stop and can only be told by a signal: none has ever reported."""
        return self.requested is Request.STOP and not self.has_reports


class Attempt:
    """An attempt as its coordinator knows it."""

    def __init__(self, config: JobConfig, run: RunDir, number: int):
        """Read what coordinators before this one have recorded."""
        self.config, self.run, self.number = config, run, number
        self.elastic = config.elastic
        self.agents = Agents()
        self.round = Round()
        self.verdict: Verdict | None = None
        self.closed_at: float | None = None  # when the verdict was written, and the agents told
        self.is_superseded = False  # another coordinator has taken over: nothing is recorded or decided any more
        self.stop_reason: str | None = None
        self.committed = -1
        self.step = 0
        self.planner = RoundPlanner(config, run)
        history = list(events.read_events(run))
        self.budget = Budget(self.elastic.max_failures_without_progress, history)
        self.machines = Machines(run, self.elastic.exclude_after, self.elastic.exclude_for_s, history)
        self.term_seen = 0  # the newest that the records, an agent, or snapshots in its memory know
        self._may_adopt = True  # no round was formed or broken yet: this may replace a coordinator that died
        self._warned = ""  # what was last warned of
        self.guards: list[Guard] = [made(self) for made in guards_in("control")]
        self.guard_of = {kind: guard for guard in self.guards for kind in guard.kinds}  # of messages
        may_run: set[str] = set()  # machines, since an earlier coordinator
        for event in history:
            if event.attempt == number and event.round is not None:
                self.round.number = max(self.round.number, event.round)
            for guard in self.guards:
                guard.read(event)
            match event:
                case events.Checkpoint():
                    self.committed = event.step
                case events.RoundStarted():
                    may_run = set(event.hosts)
                    self.term_seen = max(self.term_seen, event.term or 0)
                case events.AttemptEnded(leases=0):
                    may_run = set()
        self.leases = Leases(self.elastic, may_run)

    def record(self, event: events.Event) -> None:
        if not self.is_superseded:
            event = replace(event, round=self.round.number)
            events.record(self.run, self.number, event)
            logger.info("%s", event.sentence() or event.kind)

    def warn(self, why: str) -> None:
        """Warn of something that goes on, once, where the user looks."""
        if why != self._warned:
            self._warned = why
            self.record(events.Waiting(why))

    def on_superseded(self) -> None:
        """Stop deciding: agents get no more answers, so their leases run out."""
        logger.error("another coordinator of %s has taken over: this one decides nothing more", self.run.name)
        self.is_superseded = True
        for agent in self.agents.values():
            agent.drop()
        self.agents.clear()

    def _request(self, request: Request) -> None:
        self.round.requested = request
        self.agents.send("request", request=int(request))

    def park(self, why: str) -> None:
        """Have the ranks save and stop, for another round."""
        self.round.parked_for = why
        self._request(Request.PARK)

    def break_round(self, why: str, now: float, since: float | None = None) -> None:
        """End the running round, which has failed `since`: every agent stops its ranks and becomes ready again."""
        if not self.round.running:
            return
        self.round.running, self.round.broken_at, self.round.broken_why = False, now, why
        self.round.failed_at = now if since is None else since
        self._may_adopt = False
        self.agents.send("break", round=self.round.number, why=why)

    def _judge(self, now: float) -> None:
        """Decide, from what is known of a broken round, whether another one follows."""
        broken = self.round
        broken.broken_at, failed_at = None, time.time() - (now - broken.failed_at)
        failures, was_parked = broken.failures, broken.requested is Request.PARK
        if failures and all(f.is_request for f in failures) and not was_parked and self.stop_reason is None:
            if not broken.was_long(now):  # by itself, and it may do so again
                self.close(self.budget.requeue(failures[0].describe()), now)
                return
            self.stop_reason = failures[0].describe()
        if self.stop_reason is not None:
            self.close(self._preempted(), now)
            return
        if was_parked:
            self.record(events.RoundBroken(broken.broken_why, self.step, self.committed, failed_at=failed_at))
            return
        stalled = broken.has_stalled
        self._look_for_lost(now)
        cause = find_cause(failures, broken.culprit, broken.broken_why, stalled)
        machine = broken.hosts.get(cause.node) if cause.node is not None else None
        self.record(events.RoundBroken(cause.why, self.step, self.committed, machine, failed_at))
        verdict = self.budget.judge(cause, self.committed, stalled, broken.was_long(now))
        if verdict is not None:
            if cause.failure is not None and cause.failure.is_out_of_memory:
                verdict.reason += f". {self.planner.what_would_fit(broken.size)}"
            self.close(verdict, now)
        elif machine is not None and len(set(broken.hosts.values())) > 1:
            reason = self.machines.blame(machine, cause.why, at_once=broken.excludes and cause.node == broken.culprit)
            if reason is not None:
                self.record(events.MachineExcluded(machine, reason))

    def _look_for_lost(self, now: float) -> None:
        """Blame the node if only one was lost. If several were, the network or the coordinator is at fault.

        The others' silence has not lasted as long as the first one's.
        """
        broken, timeout_s, beats_s = self.round, self.elastic.heartbeat_timeout_s, self.elastic.heartbeat_interval_s
        silence_s = 1.5 * beats_s if broken.has_cuts else timeout_s / 2
        lost = {a.node for a in self.agents.in_round() if a.is_unreachable or now - a.heard > silence_s}
        lost |= broken.lost.keys()
        if broken.lost and len({broken.hosts.get(node) for node in lost}) > 1:
            broken.broken_why = f"the coordinator lost {len(lost)} of {broken.size} nodes at once"
        elif broken.lost and broken.culprit is None:
            node, why = min(broken.lost.items())
            elsewhere = [f for f in broken.failures if f.node != node and not (f.is_victim or f.is_request)]
            if not elsewhere or broken.broken_why in broken.lost.values():  # else what failed elsewhere came before
                broken.culprit, broken.broken_why = node, why

    def _done(self) -> Verdict:
        return Verdict("done", "stop", f"all {self.step} steps are done" if self.step else "the program has ended")

    def _preempted(self) -> Verdict:
        if self.committed >= 0:
            saved = f"saved at step {self.committed}"
        elif self.round.size and not self.round.has_reports and not self.round.saves:
            saved = "the program received SIGTERM"
        else:
            saved = "nothing was saved yet"
        decision = "stop" if self.run.stop_request.exists() else "requeue"
        return Verdict("preempted", decision, f"{self.stop_reason}; {saved}")

    def close(self, verdict: Verdict, now: float) -> None:
        if self.is_superseded:
            return
        self.round.running = False
        for guard in self.guards:
            guard.close(now)
        self.verdict = verdict
        if verdict.rank is not None and verdict.node is not None:
            verdict.last_lines = last_lines(self.run.rank_log(self.number, verdict.node, verdict.rank), 20)
        self._announce(now)

    def _announce(self, now: float) -> None:
        """Write the verdict, for whoever restarts processes, before agents end; `tick` tries again on a full disk."""
        assert self.verdict is not None
        leases = self.leases.running(now)
        details = {"round": self.round.number, "step": self.step, "committed": self.committed}
        try:
            self.verdict.close(self.run, self.number, **details, leases=leases)
        except OSError as e:
            self.warn(f"the verdict cannot be written: {e}")
            if not self.run.verdict(self.number).exists():
                return  # else only its notification could not be started
        self.closed_at = now
        for agent in self.agents.values():
            self._send_end(agent)

    def _send_end(self, agent: ConnectedAgent) -> None:
        assert self.verdict is not None
        if self.closed_at is not None:
            agent.send({"kind": "end", "exit_code": self.verdict.exit_code_of_attempt, "why": self.verdict.reason})
