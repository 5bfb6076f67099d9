"""Account for a run's time. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean

from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.record import JsonObject
from fsdp_jobs.run.table import duration, percent
from fsdp_jobs.run.tail import Tail, newest_json_lines

_SUMS = ("useful_s", "stall_s", "snapshot_s", "snapshots")  # of the steps that count, in each line of metrics.jsonl
_SHORT_S = 0.05  # shorter parts are not listed
_RUNS = 20  # newest runs from which the failure rate of a cluster's nodes is estimated


@dataclass(frozen=True)
class Goodput:
    """Seconds, over all attempts of a run."""

    wall_s: float  # from the first submission to the last event, without the time between submissions
    useful_s: float  # steps that counted
    stall_s: float  # steps that waited for checkpoints
    lost_s: float  # steps that were repeated later, and steps that a failure interrupted
    recover_s: float  # from a failure until steps advance again
    queue_s: float  # submitted, but not started yet

    @property
    def start_s(self) -> float:
        """Return the rest of the wall time: starting, loading, stopping."""
        return self.wall_s - sum((self.useful_s, self.stall_s, self.lost_s, self.recover_s, self.queue_s))

    @property
    def fraction(self) -> float:
        """Return the useful part of the wall time, 0 to 1."""
        return self.useful_s / self.wall_s if self.wall_s else 0.0

    def __str__(self) -> str:
        share = percent(self.fraction) if self.useful_s else "-"  # as in a table: no step has counted yet
        return (
            f"{share} of {duration(self.wall_s)}: useful {duration(self.useful_s)}, "
            f"checkpoints {self.stall_s:.1f}s, lost {self.lost_s:.1f}s, recovering {self.recover_s:.1f}s, "
            f"queue {duration(self.queue_s)}, starting and stopping {duration(self.start_s)}"
        )


@dataclass(frozen=True)
class Costs:
    """The costs of failures and checkpoints on a run, in seconds; 0 for those that have not occurred yet."""

    stall_s: float  # wait of the steps per checkpoint
    write_s: float  # from the beginning of a save to its commit
    restart_s: float  # from a failure until steps advance again
    snapshot_s: float = 0.0  # wait of the steps per snapshot
    snapshot_steps: float = 0.0  # steps between snapshots


def costs_of(run: RunDir) -> Costs | None:
    """Return the average costs of a run's checkpoints, snapshots and failures; None before the first of them."""
    writes, breaks = [], 0
    for event in events.read_events(run):
        if isinstance(event, events.Checkpoint):
            writes.append(event.seconds)
        breaks += isinstance(event, events.RoundBroken)
    newest = next(newest_json_lines(run.metrics), {})
    snapshots, snapshot_s = newest.get("snapshots", 0), newest.get("snapshot_s", 0.0)
    if not newest or not (writes or snapshots):
        return None
    return Costs(
        stall_s=(newest.get("stall_s", 0.0) - snapshot_s) / len(writes) if writes else 0.0,
        write_s=fmean(writes or [0.0]),
        restart_s=newest.get("recover_s", 0.0) / breaks if breaks else 0.0,
        snapshot_s=snapshot_s / snapshots if snapshots else 0.0,
        snapshot_steps=newest["step"] / snapshots if snapshots else 0.0,
    )


def slowest_save_s(run: RunDir) -> float:
    """Return the seconds of a run's slowest save, from its beginning to its commit; 0 before the first."""
    return max((e.seconds for e in events.newest_of(run, events.Checkpoint)), default=0.0)


@dataclass(frozen=True)
class Failures:
    """How often machines have broken rounds, according to the records of runs."""

    count: int = 0
    node_days: float = 0.0
    runs: int = 0


def failures_of(runs: Sequence[RunDir]) -> Failures:
    """Count the rounds of the newest runs that a machine has broken, and sum up the node time of all their rounds.

    A machine has broken a round if it was lost, or if it was blamed for the failure.
    """
    count, node_s = 0, 0.0
    for run in runs[-_RUNS:]:
        nodes, since, was_lost = 0, 0.0, False
        for event in events.seldom_events(Tail(run.events)):
            match event:
                case events.NodeLost():
                    was_lost = True
                case events.RoundStarted():
                    nodes, since, was_lost = len(event.nodes), event.time, False
                case events.RoundBroken() | events.AttemptEnded():
                    count += isinstance(event, events.RoundBroken) and (was_lost or event.blamed is not None)
                    node_s, nodes = node_s + nodes * (event.time - since), 0
    return Failures(count, node_s / 86400, len(runs[-_RUNS:]))


class Starts:
    """Account, over a run's attempts, for the time spent on neither steps nor the recovery from a failure."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._since: float | None = None  # when the current part began; None if there is none
        self._is_recovering = False
        self._load_s = 0.0  # of this round
        self._stepped_at: float | None = None  # time of the newest line of metrics in this round
        self._saved_at = self._save_s = 0.0  # of the newest checkpoint

    def apply(self, event: events.Event) -> None:
        """Account for the time until an event."""
        match event:
            case events.Submitted():
                self._is_recovering = False
            case events.AttemptStarted():
                self._since = None if self._is_recovering else event.time
            case events.RoundStarted():
                self._load_s = 0.0
                self._add("nodes", event.time)
            case events.Resumed():
                self._load_s = event.seconds
            case events.TrainingBegun():
                self._add("processes", event.time - event.imports_s - event.group_s - event.model_s)
                self._add("imports", event.time - event.group_s - event.model_s)
                self._add("process group", event.time - event.model_s)
                self._add("model and data", event.time - self._load_s)
                self._add("loading", event.time)
                self._since = None
            case events.Checkpoint():
                self._saved_at, self._save_s = event.time, event.seconds
            case events.RoundBroken():
                self._is_recovering, self._since, self._stepped_at = True, None, None
            case events.AttemptEnded() if self._stepped_at is not None:
                self._since = max(self._stepped_at, self._saved_at - self._save_s)
                self._add("last save", self._saved_at)
                self._add("leaving", event.time)
                self._since = self._stepped_at = None

    def measure(self, stepped_at: float) -> None:
        """Note the time of a line of the metrics."""
        self._stepped_at, self._is_recovering = stepped_at, False

    def breakdown(self, start_s: float) -> str:
        """List the parts of goodput's time for starting and stopping; empty if no rank has reported any."""
        known = {what: s for what, s in self.parts.items() if s >= _SHORT_S}
        if known and (other_s := start_s - sum(known.values())) >= _SHORT_S:
            known["other"] = other_s
        return ", ".join(f"{what} {s:.1f}s" for what, s in known.items())

    def _add(self, what: str, until: float) -> None:
        """End the current part and begin the next."""
        if self._since is not None:
            self.parts[what] = self.parts.get(what, 0.0) + max(0.0, until - self._since)
            self._since = max(self._since, until)


class StepClock:
    """Account for the time of a run's steps, over all restarts.

    Every line of metrics.jsonl has the sums, so that reading the newest line suffices.
    """

    def __init__(self, run: RunDir):
        self._run = run
        self._step: int | None = None  # of the newest line that counts; None until `resume` has found one
        self._sums = dict.fromkeys((*_SUMS, "lost_s", "recover_s"), 0.0)

    def add(
        self, step: int, done_at: float, step_s: float, stall_s: float, snapshot_s: float = 0.0
    ) -> dict[str, float]:
        """Add a logged step, which stands for the unlogged ones before it; return the sums for its line.

        Args:
            step: number of the step.
            done_at: when it was done, seconds since 1970.
            step_s: its duration in seconds.
            stall_s: the part of `step_s` that it waited for checkpoints.
            snapshot_s: the part of `stall_s` that it waited for a snapshot.
        """
        if self._step is None:
            self.resume(step - 1, done_at - step_s)
        stands_for = step - (self._step or 0)
        self._step = step
        took = (step_s * stands_for - stall_s, stall_s, snapshot_s, float(snapshot_s > 0))
        self._sums |= {name: self._sums[name] + seconds for name, seconds in zip(_SUMS, took, strict=True)}
        return dict(self._sums)

    def resume(self, done: int, now: float) -> None:
        """Continue the sums of earlier starts after `done` steps; their later steps are repeated and count as lost.

        The time from their last line to the failure was lost; the time since the failure counts as recovery.
        """
        newest: JsonObject = {}
        before: JsonObject = {}
        for record in newest_json_lines(self._run.metrics):
            newest = newest or record
            if record.get("step", 0) <= done:
                before = record
                break
        self._step = before.get("step", 0)
        self._sums |= {name: before.get(name, 0.0) for name in _SUMS}
        kept_s = (done - self._step) * before.get("step_s", 0.0)  # of steps that were not logged
        lost_s = sum(newest.get(name, 0.0) - before.get(name, 0.0) for name in _SUMS[:2]) - kept_s
        recover_s = 0.0
        failed_at, queue_s = self._failed_since(newest.get("time", now))
        if failed_at is not None:
            lost_s += max(0.0, failed_at - newest.get("time", failed_at))
            recover_s = max(0.0, now - failed_at - queue_s)
        self._sums["lost_s"] = newest.get("lost_s", 0.0) + max(0.0, lost_s)
        self._sums["recover_s"] = newest.get("recover_s", 0.0) + recover_s

    def _failed_since(self, last: float) -> tuple[float | None, float]:
        """Return the time of the first failure after `last` (None: none), and the seconds in the queue since then."""
        failed_at, queued_at, queue_s = None, 0.0, 0.0
        new = takewhile(lambda event: event.time > last, events.newest_events(self._run))
        for event in reversed([*new]):
            match event:
                case events.Submitted():
                    failed_at = None
                case events.RoundBroken() if failed_at is None:
                    failed_at, queue_s = event.failed_at or event.time, 0.0
                case events.AttemptEnded():
                    queued_at = event.time
                case events.AttemptStarted() if queued_at:
                    queue_s += event.time - queued_at
        return failed_at, queue_s
