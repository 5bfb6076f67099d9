"""Compare replicas, and restart from a step at which they agreed. No torch, no network.

Agents send a digest of each rank's shards, and the checksums of single tensors when digests differ. Among three or
more replicas a strict majority is right. With two, the step is repeated from the newest one at which they agreed: the
replica whose checksums change was wrong before.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from fsdp_jobs.control import guard
from fsdp_jobs.control.placement import ConnectedAgent
from fsdp_jobs.guards.replicas.difference import (
    OUTVOTED,
    REPRODUCED,
    START,
    TRANSIENT,
    TWO,
    UNKNOWN,
    Difference,
    differing,
)
from fsdp_jobs.guards.replicas.messages import Ask, Compared, Digests, Limits, Tensors
from fsdp_jobs.run import events
from fsdp_jobs.run.agreement import NO_LIMIT, Place, corruption
from fsdp_jobs.run.table import listed
from fsdp_jobs.run.verdict import Verdict, notify

_ANSWERS_S = 1.0  # for agents to send the checksums of single tensors
_REPLAYS = 2  # most repeated steps in an attempt
_KEPT = 64  # newest steps that still lack some ranks' digests; they come once per heartbeat
_NAMED = 3  # tensors in a sentence
_ASKED = 256  # most ranks to ask for single tensors: the answers of more take longer than leases last


@dataclass
class _Comparison:
    """State of one round."""

    round: int = -1
    digests: dict[int, dict[int, str]] = field(default_factory=dict)  # step -> rank -> digest
    places: dict[int, Place] = field(default_factory=dict)  # by rank
    reported: set[int] = field(default_factory=set)  # shards whose replicas are known to differ
    open: Difference | None = None  # waits for agents to send single tensors
    resumed: Future[events.Resumed | None] | None = None  # the newest in the records, read once ranks have sent digests


class Guard(guard.Guard):
    """Compares replicas. A difference ends the round, unless `integrity.action` is report."""

    takes = (Digests, Tensors)

    def start(self) -> None:
        self._action = self.attempt.config.integrity.action
        self.limit = NO_LIMIT  # newest step that a restart may use, unless replicas are known to agree at a later one
        self._comparison = _Comparison()
        self._agreed = -1  # the newest step at which all replicas agreed
        self._suspect: Difference | None = None  # between two replicas; its step is repeated
        self._replays = 0
        self._limited = -1  # the newest round that got `limit`

    def read(self, event: events.Event) -> None:
        match event:
            case events.Corruption(finding=found) if found in (OUTVOTED, TWO) and self._action != "report":
                self.limit = event.agreed if event.agreed >= 0 else event.step - 1
            case events.Resumed():
                self.limit = NO_LIMIT

    def begin_round(self) -> Limits:
        attempt, before = self.attempt, self.attempt.round
        if before.number == self._limited and before.has_reports:
            self.limit = NO_LIMIT  # that round restarted within the limit, and rank 0 has marked later checkpoints
        attempt.committed, self._limited = min(attempt.committed, self.limit), before.number + 1
        replayed = self._suspect.step if self._suspect is not None else -1
        return Limits(self.limit, replayed, holds=self._action != "report")

    def on_message(self, agent: ConnectedAgent, message: Digests | Tensors, now: float) -> None:
        match message:
            case Digests():
                self._take_digests(agent, message, now)
            case Tensors(step, rank, of, sums):
                difference = self._comparison.open
                if difference is not None and step == difference.step and rank in difference.sums:
                    difference.expected[rank] = of
                    difference.sums[rank] |= sums
                    if difference.is_complete:
                        self._conclude(now)

    def _take_digests(self, agent: ConnectedAgent, message: Digests, now: float) -> None:
        """Store the digests of a node's ranks; compare once all ranks have sent theirs for the step."""
        current = self.attempt.round
        if message.round != current.number or not current.running:
            return
        if self._comparison.round != current.number:
            self._comparison = _Comparison(current.number)
        step, known = message.step, self._comparison
        digests = known.digests.setdefault(step, {})
        digests |= message.digests
        known.digests = dict(sorted(known.digests.items())[-_KEPT:])
        known.places |= {r: Place(agent.node, agent.host, r % agent.nproc) for r in message.digests}
        if len(digests) == current.size * agent.nproc:
            known.digests = {s: of_step for s, of_step in known.digests.items() if s > step}
            if known.resumed is None:
                newest = events.newest_of(self.attempt.run, events.Resumed)
                known.resumed = self.attempt.records.begin(next, newest, None)
            self._compare(step, digests, now)

    def close(self, now: float) -> None:
        self._conclude(now)

    def watch(self, now: float) -> None:
        """Conclude without answers that agents do not send in time."""
        if self._comparison.open is not None and now - self._comparison.open.asked_at > _ANSWERS_S:
            self._conclude(now)

    def _compare(self, step: int, digests: dict[int, str], now: float) -> None:
        group, known = self.attempt.round.shard_group, self._comparison
        shards = differing(digests, group)
        known.reported &= shards  # the others agree again
        if self._suspect is not None and step >= self._suspect.step:
            self._judge_replay(step, digests, now)
        self._agreed = min(self._agreed, step - 1) if shards else step  # even if an earlier round got further
        if not shards:
            self.limit = NO_LIMIT
        if not shards - known.reported:
            self._go_on(step, bool(shards))
        elif self.attempt.round.running:
            self._conclude(now)
            holders = {rank: digest for rank, digest in digests.items() if rank % group in shards - known.reported}
            known.reported |= shards
            known.open = Difference(step, group, holders, known.places, now)
            if len(holders) <= _ASKED:
                self.attempt.agents.send(Ask(step, [*holders]))
            else:
                self._conclude(now)

    def _go_on(self, step: int, differ: bool) -> None:
        differ &= self._action == "report"  # otherwise it is unknown which is wrong, and training goes on
        self.attempt.agents.send(Compared(self._agreed, step, differ))

    def _conclude(self, now: float) -> None:
        """Record the open difference, and restart from where replicas agreed unless the action is report."""
        difference, self._comparison.open = self._comparison.open, None
        if difference is None:
            return
        step, wrong = difference.step, difference.outvoted()
        goes_back = self.attempt.round.running and self._action != "report"
        if step == 0:
            cure = "every rank has to begin with the same weights, and to train a replica of the same model"
            why = self._record_corruption(difference, START, [*difference.sums], f"before the first step: {cure}")
            if goes_back:
                self.attempt.close(Verdict("user_error", "stop", why), now)
            return
        if wrong:
            why = self._record_corruption(difference, OUTVOTED, [*wrong], "differs from the majority of its replicas")
        else:
            goes_back &= self._replays < _REPLAYS
            how = "; the step is repeated to find out which" if goes_back else ""
            why = self._record_corruption(difference, TWO, [*difference.sums], f"differ, and one of them is wrong{how}")
            if goes_back:
                self._suspect, self._replays = difference, self._replays + 1
        if goes_back:
            agreed = self._agreed_before(step)
            self.limit, self._limited = agreed if agreed >= 0 else step - 1, -1
            self._break_for(difference, [*wrong], why, now)
        else:
            self._go_on(step, differ=True)

    def _judge_replay(self, step: int, digests: dict[int, str], now: float) -> None:
        """Record what the repeated step has shown."""
        assert self._suspect is not None
        suspect, self._suspect = self._suspect, None
        finding, wrong = suspect.judge(digests) if step == suspect.step else (UNKNOWN, [])
        if finding == TRANSIENT:
            what = "was wrong: when the step was repeated, its checksums became those of the other replicas"
            why = self._record_corruption(suspect, finding, wrong, what)
            if self._action == "exclude":
                self._break_for(suspect, wrong, why, now)
        elif finding == REPRODUCED:
            what = "differ in the same way when the step is repeated, so it is not known which is wrong"
            self._record_corruption(suspect, finding, [*suspect.sums], what)
            self._comparison.reported |= {rank % suspect.shard_group for rank in suspect.sums}
        else:
            what = "differed, and repeating the step has not shown which was wrong"
            self._record_corruption(suspect, UNKNOWN, [*suspect.sums], what)

    def _record_corruption(self, difference: Difference, finding: str, ranks: list[int], what: str) -> str:
        """Record a finding. Returns its sentence."""
        tensors = difference.tensors()
        places = {rank: difference.places[rank] for rank in ranks}
        where = f" in {listed(tensors, _NAMED, of='tensors')}" if tensors else ""
        agreed = self._agreed_before(difference.step)
        found = corruption(difference.step, agreed, finding, places, tensors, f"{what}{where}")
        self.attempt.record(found)
        self.attempt.records.begin(notify, self.attempt.run, self.attempt.number, "corruption", found.why)
        return found.why

    def _agreed_before(self, step: int) -> int:
        """Return the newest step at which replicas are known to have agreed before they differed, -1 for none."""
        looked = self._comparison.resumed
        resumed = looked.result() if looked is not None and looked.done() and not looked.exception() else None
        read = resumed.step if resumed is not None and resumed.place != "memory" else -1  # all loaded the same files
        return max(min(self._agreed, step - 1), min(read, step))

    def _break_for(self, difference: Difference, wrong: list[int], why: str, now: float) -> None:
        """End the round because ranks are wrong; if they are all on one node, blame that node."""
        current = self.attempt.round
        places = {difference.places[rank][:2] for rank in wrong}
        if len(places) == 1:
            node, host = places.pop()
            current.culprit = node if current.hosts.get(node) == host else None
        current.excludes = self._action == "exclude" and current.culprit is not None
        self.attempt.break_round(why, now)
