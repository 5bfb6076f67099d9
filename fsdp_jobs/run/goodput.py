"""Where a run's time went. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean
from typing import Any

from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.table import duration
from fsdp_jobs.run.tail import Tail, newest_json_lines

_SUMS = ("useful_s", "stall_s", "capture_s", "captures")  # of the steps that count, in each line of metrics.jsonl
_SHORT_S = 0.05  # what takes less is not worth a word
_RUNS = 20  # newest ones that tell how often a cluster's nodes fail


@dataclass(frozen=True)
class Goodput:
    """Seconds, over all attempts of a run; the parts add up to `wall_s`."""

    wall_s: float  # from the first submission to the last event, time between submissions left out
    useful_s: float  # steps that counted
    stall_s: float  # steps that waited for checkpoints
    lost_s: float  # steps done again later, and those that a failure cut off
    recover_s: float  # from a failure to where steps go on
    queue_s: float  # submitted, and not started yet
    start_s: float  # everything else: starting, loading, stopping

    @property
    def fraction(self) -> float:
        """Return the useful part of the wall time, 0 to 1."""
        return self.useful_s / self.wall_s if self.wall_s else 0.0

    def __str__(self) -> str:
        return (
            f"{self.fraction:.0%} of {duration(self.wall_s)}: useful {duration(self.useful_s)}, "
            f"checkpoints {self.stall_s:.1f}s, lost {self.lost_s:.1f}s, recovering {self.recover_s:.1f}s, "
            f"queue {duration(self.queue_s)}, starting and stopping {duration(self.start_s)}"
        )


@dataclass(frozen=True)
class Costs:
    """What failures and checkpoints have cost on a run, in seconds; 0 for what has not happened yet."""

    stall_s: float  # that steps waited, per checkpoint
    write_s: float  # from the beginning of a save to its commit
    restart_s: float  # from a failure to where steps go on
    capture_s: float = 0.0  # that steps waited, per capture
    capture_steps: float = 0.0  # from capture to capture


def costs_of(run: RunDir) -> Costs | None:
    """Return what a run's checkpoints, captures and failures have cost on average; None before the first of them."""
    writes, breaks = [], 0
    for event in events.read_events(run):
        if isinstance(event, events.Checkpoint):
            writes.append(event.seconds)
        breaks += isinstance(event, events.RoundBroken)
    newest = next(newest_json_lines(run.metrics), {})
    captures, captured_s = newest.get("captures", 0), newest.get("capture_s", 0.0)
    if not newest or not (writes or captures):
        return None
    return Costs(
        stall_s=(newest.get("stall_s", 0.0) - captured_s) / len(writes) if writes else 0.0,
        write_s=fmean(writes or [0.0]),
        restart_s=newest.get("recover_s", 0.0) / breaks if breaks else 0.0,
        capture_s=captured_s / captures if captures else 0.0,
        capture_steps=newest["step"] / captures if captures else 0.0,
    )


@dataclass(frozen=True)
class Failures:
    """How often machines have ended rounds, by the records of runs."""

    count: int = 0
    node_days: float = 0.0
    runs: int = 0


def failures_of(runs: Sequence[RunDir]) -> Failures:
    """Count the rounds of the newest runs that a machine has ended, and the time of the nodes in all of their rounds.

    A machine has when it was lost, or when the failure was charged to it.
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
    """Sums up, over a run's attempts, where the time went that is neither steps nor the recovery from a failure."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._since: float | None = None  # when the part began that goes on; None while none does
        self._is_recovering = False
        self._load_s = 0.0  # of this round
        self._stepped_at: float | None = None  # by the newest line of this round
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
        """Take note of a line of the metrics."""
        self._stepped_at, self._is_recovering = stepped_at, False

    def told(self, start_s: float) -> str:
        """Name the parts of what goodput says of starting and stopping; nothing where no rank has told."""
        known = {what: s for what, s in self.parts.items() if s >= _SHORT_S}
        other_s = start_s - sum(known.values())
        parts = known | ({"other": other_s} if known and other_s >= _SHORT_S else {})
        return ", ".join(f"{what} {s:.1f}s" for what, s in parts.items())

    def _add(self, what: str, until: float) -> None:
        """End a part, and begin the next."""
        if self._since is not None:
            self.parts[what] = self.parts.get(what, 0.0) + max(0.0, until - self._since)
            self._since = max(self._since, until)


class StepClock:
    """Sums up where the time of a run's steps went, over all restarts.

    Every line of metrics.jsonl carries the sums, so that the newest one is enough.
    """

    def __init__(self, run: RunDir):
        self._run = run
        self._step: int | None = None  # of the newest line that counts; None until this start has resumed from one
        self._sums = dict.fromkeys((*_SUMS, "lost_s", "recover_s"), 0.0)

    def add(self, step: int, done_at: float, step_s: float, stall_s: float, capture_s: float = 0.0) -> dict[str, float]:
        """Add a logged step, which stands for those before it that were not logged; returns what its line carries.

        Args:
            step: number of the step.
            done_at: when, seconds since 1970.
            step_s: seconds it took.
            stall_s: those of them that it waited for checkpoints.
            capture_s: those of these that it waited for a capture.
        """
        if self._step is None:
            self.resume(step - 1, done_at - step_s)
        stands_for = step - (self._step or 0)
        self._step = step
        took = (step_s * stands_for - stall_s, stall_s, capture_s, float(capture_s > 0))
        self._sums |= {name: self._sums[name] + seconds for name, seconds in zip(_SUMS, took, strict=True)}
        return dict(self._sums)

    def resume(self, done: int, now: float) -> None:
        """Continue the sums of earlier starts after `done` steps; what they did beyond is done again, and so was lost.

        Of the time since their last line, that until the failure was lost, and the rest went into recovering.
        """
        newest: dict[str, Any] = {}
        before: dict[str, Any] = {}
        for record in newest_json_lines(self._run.metrics):
            newest = newest or record
            if record.get("step", 0) <= done:
                before = record
                break
        self._step = before.get("step", 0)
        self._sums |= {name: before.get(name, 0.0) for name in _SUMS}
        kept_s = (done - self._step) * before.get("step_s", 0.0)  # in steps that were not logged
        lost_s = sum(newest.get(name, 0.0) - before.get(name, 0.0) for name in _SUMS[:2]) - kept_s
        recover_s = 0.0
        failed_at, queue_s = self._failed_since(newest.get("time", now))
        if failed_at is not None:
            lost_s += max(0.0, failed_at - newest.get("time", failed_at))
            recover_s = max(0.0, now - failed_at - queue_s)
        self._sums["lost_s"] = newest.get("lost_s", 0.0) + max(0.0, lost_s)
        self._sums["recover_s"] = newest.get("recover_s", 0.0) + recover_s

    def _failed_since(self, last: float) -> tuple[float | None, float]:
        """Return when the first failure after `last` was, and the seconds in the queue since; None for no failure."""
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
