"""Read a run's status, only from its run directory. No torch."""

from __future__ import annotations

import heapq
import math
import statistics
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.events import Event, parse_events, seldom_events
from fsdp_jobs.run.goodput import Goodput, Starts
from fsdp_jobs.run.record import JsonObject
from fsdp_jobs.run.state import State
from fsdp_jobs.run.table import counted
from fsdp_jobs.run.tail import Tail

ENDED = (State.DONE, State.STOPPED, State.FAILED)
DAMAGED = "damaged"  # its records are not as they were written
OVER = (*ENDED, DAMAGED)  # states that do not change by themselves
WAITING, TRAINING, IDLE = "waiting to be started", "training", "nothing: it has ended"
_STILL_S, _STILL_LINES = 60.0, 5.0  # without a line of metrics.jsonl: seconds, and multiples of the time between lines
_ROUND_ENDS = (events.Submitted, events.AttemptStarted, events.RoundBroken, events.AttemptEnded)
_RECENT = 10  # steps whose median is the present speed
_GLANCE_BYTES = 1 << 13  # of metrics.jsonl, about twenty steps


@dataclass
class Break:
    """The end of a round that others follow, and its costs; unknown ones are shown as a dash."""

    time: float  # seconds since 1970
    why: str
    step: int  # steps done by then
    lost_steps: int | None  # of them, those to be repeated; None: only the program knows
    recovered_s: float | None = None  # until the next step was done; None before, or if none are reported
    is_planned: bool = False  # a node joined or left, and nothing failed

    @property
    def lost(self) -> str:
        return "- steps" if self.lost_steps is None else counted(self.lost_steps, "step")

    @property
    def recovered(self) -> str:
        return "-" if self.recovered_s is None else f"{self.recovered_s:.1f} s"


@dataclass
class RunStatus:
    """A run according to its events and metrics; `update` reads new ones."""

    run: RunDir
    steps: int | None = None  # number of steps to do; None: only the user's program knows
    state: str = "submitted"  # submitted | starting | running | recovering | saving | done | stopped | failed
    attempt: int = -1
    nodes: list[int] = field(default_factory=list)
    step: int = 0
    loss: float | None = None
    first_loss: float | None = None
    mfu: float | None = None
    committed: int = -1
    committed_at: float = 0.0  # seconds since 1970
    furthest: int = 0  # highest step ever reached
    lost_steps: int = 0  # steps repeated after failures
    breaks: list[Break] = field(default_factory=list)
    spikes: list[events.LossSpike] = field(default_factory=list)
    slow: list[events.SlowNode | events.SlowSteps] = field(default_factory=list)  # in the newest round
    corruptions: list[events.Corruption] = field(default_factory=list)
    reason: str = ""  # of the newest break or end
    doing: str = WAITING  # one sentence that details the state

    def __post_init__(self) -> None:
        self._events, self._metrics = Tail(self.run.events), Tail(self.run.metrics)
        self._in_round = False  # a step recorded outside of a round is the last of a broken one
        self.is_read = False  # its steps are read from a program's output
        self.waited_for = ""  # the cluster's newest reason; replaces `reason` until the next event
        self._newest: JsonObject = {}  # line of metrics.jsonl
        self._recent: deque[JsonObject] = deque(maxlen=_RECENT)
        self._line_s = 0.0  # seconds between the two newest lines
        self._between = 1  # steps from a line to the next
        self._last = self._before_s = self._queue_s = 0.0  # time of the newest event; seconds of earlier submissions
        self._begun: float | None = None  # time of the present submission
        self._queued: float | None = None  # when it entered the queue; None if it has left
        self._starts = Starts()

    def update(self) -> None:
        """Read new events and metrics."""
        self._read(parse_events(self._events.records()))

    def glance(self) -> None:
        """Read only what determines the present state and speed, much less for a long run; losses are left out."""
        self._metrics.skip(but=_GLANCE_BYTES)
        self._read(seldom_events(self._events))

    def _read(self, events: Iterable[Event]) -> None:
        """Update this status with new events and new lines of metrics.jsonl, in the order of their times."""
        happened: Iterable[tuple[float, Event | JsonObject]] = ((event.time, event) for event in events)
        measured = ((record.get("time", 0.0), record) for record in self._metrics.records())
        for at, entry in heapq.merge(happened, measured, key=lambda timed: timed[0]):
            if isinstance(entry, Event):
                self._starts.apply(entry)
                self._apply(entry)
            else:
                self._measure(entry, at)
                self._starts.measure(at)

    def _measure(self, record: JsonObject, at: float) -> None:
        self._line_s = at - self._newest.get("time", math.inf) if self._in_round else 0.0
        self._newest = record
        is_read = "tokens_per_s" not in record  # from a program's output, which does not show checkpoints
        self.steps = record.get("steps", self.steps) if is_read else self.steps
        resumed = record.get("resumed") if is_read else None
        self.is_read |= resumed is not None
        for b in self.breaks:
            if self._in_round and b.recovered_s is None:  # the job trains again
                b.recovered_s = at - b.time
                if resumed is not None:
                    b.lost_steps = max(0, b.step - resumed)
        step = record.get("step", self.step)
        if self.step < step:
            before, self._between = self.step, step - self.step
        else:
            before = step - self._between if resumed is None else resumed
        self.lost_steps += max(0, min(step, self.furthest) - max(0, before))
        self.step, self.loss = step, record.get("loss", self.loss)
        self.furthest = max(self.furthest, step)
        if self.first_loss is None:
            self.first_loss = self.loss
        self._recent.append(record)
        self.mfu = record.get("mfu")
        if self._in_round and self.state in ("submitted", "starting", "recovering"):
            self._enter("running", TRAINING)

    def _enter(self, state: str, doing: str, reason: str = "") -> None:
        self.state, self.doing, self.reason = state, doing, reason

    def _apply(self, event: Event) -> None:
        self.attempt = max(self.attempt, event.attempt)
        if isinstance(event, _ROUND_ENDS):
            self._in_round = False
        if isinstance(event, events.AttemptStarted | events.AttemptEnded) and self._queued is not None:
            self._queue_s += max(0.0, event.time - self._queued)
            self._queued = None
        match event:
            case events.Submitted():
                self._before_s = self._wall_s
                self._begun = self._queued = event.time
                self._recent.clear()  # nodes and speed were those of the former submission
                self.nodes, self.mfu = [], None
                self.steps = self.run.read_job().get("steps")
                self._enter("submitted", WAITING)
            case events.AttemptStarted():
                self._enter("starting", "waiting for nodes")
            case events.RoundStarted():
                self._in_round, self.slow = True, []
                if self.reason == self.waited_for:  # the job no longer waits
                    self.reason = ""
                self.nodes, ranks = event.nodes, counted(event.world_size, "rank")
                self.doing = f"{ranks} on {counted(len(self.nodes), 'node')}: starting"
                if self.steps is None:  # a program may not report steps
                    self._enter("running", f"the program runs on {ranks}")
            case events.Checkpoint():
                self.committed, self.committed_at = event.step, event.time
            case events.RoundBroken():
                self._enter("recovering", "waiting for nodes", event.why)
                done = max(event.step, self.step)
                lost = max(0, done - max(0, event.committed, self.committed))
                is_known = not self.is_read and (self.steps is not None or done > 0)
                at, lost_steps = event.failed_at or event.time, lost if is_known else None
                self.breaks.append(Break(at, event.why, done, lost_steps, is_planned=bool(event.is_planned)))
                self.furthest = max(self.furthest, done)
            case events.Resumed():
                for b in self.breaks:
                    if b.recovered_s is None:
                        b.lost_steps = max(0, b.step - event.step)
                self.step = event.step
            case events.LossSpike():
                self.spikes.append(event)
            case events.SlowNode() | events.SlowSteps():
                self.slow.append(event)
            case events.Corruption():
                self.corruptions.append(event)
            case events.Waiting():
                self.reason = self.waited_for = event.why
            case events.StopRequested():
                self._enter("saving", "saving before it stops", event.why)
            case events.AttemptEnded(decision="requeue"):
                self._queued = event.time
                self._enter("starting", "waiting to be restarted", event.reason)
            case events.AttemptEnded():
                self._enter(State.from_verdict(event), IDLE, event.reason)
        self._last = event.time

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def waits_for_nodes(self) -> bool:
        """Return whether an attempt has begun but has no round now."""
        return self.state in ("starting", "recovering") and not self._in_round

    @property
    def tokens_per_s(self) -> float:
        """Return the present speed of all ranks; 0 if they report none."""
        return self._median("tokens_per_s")

    @property
    def step_s(self) -> float:
        """Return the seconds that a step takes now; 0 if they are not reported."""
        return self._median("step_s")

    def _median(self, key: str) -> float:
        values: list[float] = [line[key] for line in self._recent if line.get(key)]
        return statistics.median(values) if values else 0.0

    @property
    def goodput(self) -> Goodput:
        """Return the breakdown of the time of all attempts, up to the newest record."""
        parts = [self._newest.get(key, 0.0) for key in ("useful_s", "stall_s", "lost_s", "recover_s")]
        parts.append(self._queue_s)
        wall_s = max(self._wall_s, sum(parts))  # after `glance` the last steps of earlier submissions are not known
        return Goodput(wall_s, *parts)

    @property
    def _wall_s(self) -> float:
        """Return the seconds of all submissions, until the newest event or line of metrics."""
        newest_at = max(self._last, self._newest.get("time", 0.0))
        return self._before_s + (newest_at - self._begun if self._begun is not None else 0.0)

    @property
    def starting(self) -> str:
        """Return the breakdown of the time of starting and stopping; incomplete after `glance`."""
        return self._starts.breakdown(self.goodput.start_s if self.has_steps else 0.0)

    @property
    def has_steps(self) -> bool:
        """Return whether ranks report steps, or will."""
        return self.steps is not None or self.step > 0

    @property
    def eta_s(self) -> float | None:
        """Return the seconds to the last step at the present speed; None if unknown."""
        if self.steps is None or self.ended or not self.step_s:
            return None
        return max(0, self.steps - self.step) * self.step_s

    @property
    def still_s(self) -> float:
        """Return for how many seconds no step has been done; 0 if none is overdue."""
        still_s = time.time() - self._newest.get("time", math.inf)
        return still_s if self.doing == TRAINING and still_s > max(_STILL_S, _STILL_LINES * self._line_s) else 0.0

    @property
    def checkpoint_age_s(self) -> float | None:
        """Return seconds since the newest checkpoint; None before the first."""
        return max(0.0, time.time() - self.committed_at) if self.committed >= 0 else None


def steps_done(step: int, steps: int | None) -> str:
    """Format as `12/120`; if only the program knows the number of steps, as `12` or a dash."""
    if steps is None:
        return f"{step:,}" if step else "-"
    return f"{step:,}/{steps:,}"
