"""The coordinator's state of an attempt, and its decision after a round broke. No torch, no network."""

from __future__ import annotations

import logging
import math
import time
from concurrent.futures import Future
from dataclasses import replace

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.control.failures import Budget, Machines, find_cause
from fsdp_jobs.control.fencing import Leases, Terms
from fsdp_jobs.control.guard import Guard
from fsdp_jobs.control.placement import Agents, ConnectedAgent, RoundPlanner
from fsdp_jobs.control.requests import Requests
from fsdp_jobs.control.round import Round
from fsdp_jobs.run import events, messages
from fsdp_jobs.run.directory import RunDir, checkpoints_of
from fsdp_jobs.run.files import is_there
from fsdp_jobs.run.leaves import guards_in
from fsdp_jobs.run.protocol import lease_s
from fsdp_jobs.run.rank_state import Request
from fsdp_jobs.run.table import counted
from fsdp_jobs.run.term import Fenced
from fsdp_jobs.run.threads import Background
from fsdp_jobs.run.verdict import Verdict

logger = logging.getLogger(__name__)

_AWAY_S = 5.0  # without an answer, until storage counts as away; a busy one may need seconds


class Attempt:
    """State of an attempt in its coordinator."""

    def __init__(self, config: JobConfig, run: RunDir, number: int):
        """Restore the state from the events that earlier coordinators recorded."""
        self.config, self.run, self.number = config, run, number
        self.elastic = config.elastic
        self.agents = Agents()
        self.round = Round()
        self.verdict: Verdict | None = None
        self.closed_at: float | None = None  # when the verdict was written and sent to the agents
        self.is_superseded = False  # another coordinator has taken over: this one must not record or decide
        self.in_charge_until = math.inf  # until then no other begins a round; past while storage does not answer
        self.asked_at = math.inf  # when storage was asked what it has not answered; infinite: nothing
        self.stop_reason: str | None = None
        self.is_cancelled = False  # the user has asked to stop
        self.stop_by = 0.0  # when a requested stop must be over, on the monotonic clock
        self.committed = -1
        self.step = 0
        self.planner = RoundPlanner(config, run)
        history = list(events.read_events(run))
        self.budget = Budget(self.elastic.max_failures_without_progress, history)
        self.machines = Machines(self.elastic.exclude_after, self.elastic.exclude_for_s, history)
        self.term_seen = 0  # the newest in the events, or known to an agent or its snapshots
        self.excluded = run.excluded_hosts()  # machine -> why
        self._excluding: Future[None] | None = None  # until `Requests` are read after it
        self._may_adopt = True  # until it forms or breaks a round: an earlier coordinator's may still run
        self._warned = ""  # the last warning
        self.records = Background("records")  # does what needs the run directory, in order
        self._closing: Future[None] | None = None  # writes the verdict
        self.guards: list[Guard] = [made(self) for made in guards_in("control")]
        may_run: set[str] = set()  # machines where ranks of an earlier coordinator may run
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
        self.terms = Terms(checkpoints_of(config.checkpoint, run), run, number)

    def record(self, event: events.Event) -> None:
        """Record an event, in a thread: agents get answers while the file system hangs."""
        self.records.begin(self._write, replace(event, time=time.time(), round=self.round.number))

    def _write(self, event: events.Event) -> None:
        if not self.is_superseded:
            events.record(self.run, self.number, event)
            logger.info("%s", event.sentence() or event.kind)

    def storage_away_s(self, now: float) -> float:
        """Return for how many seconds storage has not answered; 0 while it does."""
        return away_s if (away_s := now - self.asked_at) > _AWAY_S else 0.0

    def storage_note(self, now: float) -> str:
        """Return what to add to the reason of an end if storage does not answer now: for how long; else nothing."""
        away_s = self.storage_away_s(now)
        return f"; storage has not answered for {away_s:.0f} s" if away_s else ""

    def warn(self, why: str) -> None:
        """Record a lasting problem for the user, unless it was recorded last, or the attempt has ended."""
        if why != self._warned and self.closed_at is None:
            self._warned = why
            self.record(events.Waiting(why))

    def on_superseded(self) -> None:
        """Stop deciding. Agents get no more answers from this coordinator, so their leases run out."""
        logger.error("another coordinator of %s has taken over: this one decides nothing more", self.run.name)
        self.is_superseded = True
        for agent in self.agents.values():
            agent.drop()
        self.agents.clear()

    def _here(self) -> int:
        """Count the round's nodes that are connected, or left after their ranks had ended."""
        return len(self.agents.in_round()) + self.round.left

    def _have_ended(self) -> bool:
        return self.agents.have_ended() and self._here() == self.round.size

    def _on_ranks_ended(self, agent: ConnectedAgent) -> None:
        self.leases.pop(agent.id, None)
        self.round.has_gaps |= agent.in_round

    def _request(self, request: Request) -> None:
        self.round.requested = request
        self.agents.send(messages.Request(request))

    def park(self, why: str) -> None:
        """Ask the ranks to save and wait for a new round."""
        self.round.parked_for = why
        self._request(Request.PARK)

    def on_stop(self, why: str, now: float) -> None:
        """Stop the job because one of its processes received a signal, or the user cancelled it."""
        if self.stop_reason is not None or self.verdict is not None or self.is_superseded:
            return
        self.stop_reason = why
        self.record(events.StopRequested(why))
        self.stop_by = now + self.elastic.stop_grace_s
        if self.round.running:
            self._request(Request.STOP)
        else:
            self.close(self._preempted(now), now)

    def on_requests(self, found: Requests, now: float) -> None:
        if self._excluding is None:
            self.excluded = found.excluded
        elif self._excluding.done():  # these may have been read before
            self._excluding = None
        if found.problem:
            self.warn(found.problem)
        if found.save:
            self.agents.send(messages.Request(Request.SAVE))
        if found.stop:
            self.is_cancelled = True
            self.on_stop(found.stop, now)

    def exclude(self, found: events.MachineExcluded, for_s: float) -> None:
        """Exclude a machine for `for_s` seconds, and record it."""
        self.excluded[found.host] = found.why
        found = replace(found, time=time.time(), round=self.round.number)
        self._excluding = self.records.begin(self._exclude, found, for_s)

    def _exclude(self, found: events.MachineExcluded, for_s: float) -> None:
        try:
            self.run.exclude(found.host, for_s, found.why)
        except (BadInput, OSError) as e:  # the user edits the file, or the disk is full
            self.warn(f"{found.host} cannot be excluded: {e}")
        else:
            self._write(found)
        if found.host not in self.run.excluded_hosts():
            others = dict(self.excluded)  # the loop may be reading that one
            others.pop(found.host, None)
            self.excluded = others

    def break_round(self, why: str, now: float, since: float | None = None) -> None:
        """End the running round, which failed at `since`: agents stop their ranks and become ready again."""
        current = self.round
        if not current.running:
            return
        current.running, current.broken_at, current.broken_why = False, now, why
        current.failed_at = now if since is None else since
        self._may_adopt = False
        self.agents.send(messages.Break(current.number))

    def _on_blocked(self, seconds: float, now: float) -> None:
        """End the round if this process did not run for longer than a lease: ranks had to stop, without a failure."""
        current = self.round
        if seconds > lease_s(self.elastic) and (current.running or current.broken_at is not None):
            why = f"the job stood still for {seconds:.0f} s, as when it is suspended: its ranks' leases have expired"
            self.break_round(why, now, now - seconds)
            current.broken_why, current.stood_still = why, True

    def _judge(self, now: float) -> None:
        """Decide after a broken round whether to start another one, from the reports received so far."""
        broken = self.round
        broken.broken_at, failed_at = None, time.time() - (now - broken.failed_at)
        failures, was_planned = broken.failures, broken.was_planned
        if failures and all(f.is_request for f in failures) and not was_planned and self.stop_reason is None:
            if not broken.was_long:  # the ranks left without a request, and may do so again
                self.close(self.budget.requeue(failures[0].describe()), now)
                return
            self.stop_reason = failures[0].describe()
        if self.stop_reason is not None:
            self.close(self._preempted(now), now)
            return
        if was_planned or broken.stood_still:
            why = broken.broken_why
            self.record(events.RoundBroken(why, self.step, self.committed, failed_at=failed_at, is_planned=was_planned))
            return
        cause = find_cause(broken, self._look_for_lost(now))
        machine = broken.hosts.get(cause.node) if cause.node is not None else None
        why = cause.why + self.storage_note(now)
        self.record(events.RoundBroken(why, self.step, self.committed, machine, failed_at))
        verdict = self.budget.judge(cause, self.committed, broken)
        if verdict is not None:
            if cause.by_kernel or (cause.failure is not None and cause.failure.is_out_of_memory):
                verdict.reason += f". {self.planner.what_would_fit(broken.size, cause.by_kernel)}"
            self.close(verdict, now)
        elif machine is not None and (self.config.cluster.restarts_elsewhere or len(set(broken.hosts.values())) > 1):
            reason = self.machines.blame(machine, cause.why, at_once=broken.excludes and cause.node == broken.culprit)
            if reason is not None:
                self.exclude(events.MachineExcluded(machine, reason), self.elastic.exclude_for_s)

    def _look_for_lost(self, now: float) -> set[int]:
        """Blame the node if only one was lost. If several were, the network or the coordinator is at fault.

        Other lost nodes may not have been silent for the full timeout yet, so a shorter silence counts here. Returns
        all nodes that are lost or may be.
        """
        broken, timeout_s, beats_s = self.round, self.elastic.heartbeat_timeout_s, self.elastic.heartbeat_interval_s
        silence_s = 1.5 * beats_s if broken.has_cuts else timeout_s / 2
        lost = {a.node for a in self.agents.in_round() if a.is_unreachable or now - a.heard > silence_s}
        lost |= broken.lost.keys()
        if broken.lost and len({broken.hosts.get(node) for node in lost}) > 1:
            broken.broken_why = f"the coordinator lost {len(lost)} of {broken.size} nodes at once"
        elif broken.lost and broken.culprit is None and not broken.is_in_doubt:
            node, why = min(broken.lost.items())
            others = [f for f in broken.failures if f.node != node]
            elsewhere = [f for f in others if not (f.is_victim or f.has_aborted or f.is_request)]
            if not elsewhere or broken.broken_why in broken.lost.values():  # else the failure elsewhere came first
                broken.culprit, broken.broken_why = node, why
        return lost

    def _done(self) -> Verdict:
        return Verdict("done", "stop", f"all {self.step} steps are done" if self.step else "the program has ended")

    def _preempted(self, now: float) -> Verdict:
        is_cancelled = self.is_cancelled or (not self.storage_away_s(now) and is_there(self.run.stop_request))
        decision = "stop" if is_cancelled else "requeue"
        committed = self.committed
        if decision == "stop" and self.config.checkpoint.memory.every_steps:  # the snapshots end with the job
            committed = min(committed, self._newest_on_disk())
        if committed >= 0:
            saved = f"saved at step {committed}"
            if committed < self.step:
                saved += f", {counted(self.step - committed, 'step')} before the last"
        elif self.config.is_program and self.round.size and not self.round.has_reports:
            saved = "the program received SIGTERM"
            if decision == "requeue":
                saved += "; it starts again from what it saved itself, or from zero: job.checkpointer can save for it"
        elif self.config.is_program and self.round.has_reports and not self.round.saves:
            saved = "job.checkpointer has saved nothing"
        else:
            saved = "nothing was saved yet"
        return Verdict("preempted", decision, f"{self.stop_reason}; {saved}")

    def _newest_on_disk(self) -> int:
        """Return the step of the newest checkpoint in the records that is not in memory; -1 for none."""
        for event in events.newest_events(self.run):
            match event:
                case events.Checkpoint() | events.Resumed(place="storage" | "local_dir"):
                    return event.step
        return -1

    def close(self, verdict: Verdict, now: float) -> None:
        if self.is_superseded:
            return
        self.round.running = False
        for guard in self.guards:
            guard.close(now)
        self.verdict = verdict
        self._announce(now)

    def _announce(self, now: float) -> None:
        """Write the verdict, for the launcher, before agents exit; `tick` calls this until it is written."""
        assert self.verdict is not None
        if self._closing is None:
            leases = self.leases.running(now)
            details = {"round": self.round.number, "step": self.step, "committed": self.committed, "leases": leases}
            self._closing = self.records.begin(self._end, self.verdict, **details)
        if not self._closing.done():
            return
        closing, self._closing = self._closing, None
        try:
            closing.result()
        except Fenced:
            self.on_superseded()
            return
        except OSError as e:
            self.warn(f"the verdict cannot be written: {e}")
            if not is_there(self.run.verdict(self.number)):
                return  # else only the notification failed to start
        self.closed_at = now
        for agent in self.agents.values():
            self._send_end(agent)

    def _end(self, verdict: Verdict, **details: int) -> None:
        """Write the verdict unless another coordinator has taken over: the file system may have hung until now."""
        self.terms.check()
        verdict.close(self.run, self.number, **details)

    def _send_end(self, agent: ConnectedAgent) -> None:
        if self.verdict is not None and self.closed_at is not None:
            agent.send(messages.End(self.verdict.exit_code_of_attempt, self.verdict.reason))
