"""What a run is doing, from its run directory alone. No torch."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.events import Event, seldom_events
from fsdp_jobs.run.table import duration
from fsdp_jobs.run.tail import Tail

ENDED = ("done", "stopped", "failed")
_GLANCE_BYTES = 1 << 12  # of metrics.jsonl, about a dozen steps


@dataclass
class Break:
    """One failure, and what it cost."""

    time: float  # seconds since 1970
    why: str
    lost_steps: int  # done since the newest checkpoint
    recovered_s: float | None = None  # until the next step was done; None while it is not


@dataclass
class RunStatus:
    """A run as its events and metrics tell it; `update` reads what is new."""

    run: RunDir
    is_program: bool = False  # the user's, whose steps are not the configuration's
    state: str = "submitted"  # submitted | starting | running | recovering | saving | done | stopped | failed
    attempt: int = -1
    nodes: list[int] = field(default_factory=list)
    world_size: int = 0
    strategy: str = ""
    step: int = 0
    loss: float | None = None
    first_loss: float | None = None
    tokens_per_s: float = 0.0
    mfu: float | None = None
    step_s: float = 0.0
    committed: int = -1
    committed_at: float = 0.0  # seconds since 1970
    furthest: int = 0  # step ever reached
    lost_steps: int = 0  # steps done again after failures
    breaks: list[Break] = field(default_factory=list)
    reason: str = ""  # of the newest break or end
    doing: str = "waiting to be started"  # one sentence more than the state says

    def __post_init__(self) -> None:
        self._events, self._metrics = Tail(self.run.events), Tail(self.run.metrics)

    def update(self) -> list[Event]:
        """Read what is new; returns the new events."""
        new = [Event.parse(record) for record in self._events.records()]
        for event in new:
            self._apply(event)
        for record in self._metrics.records():
            self._measure(record)
        return new

    def glance(self) -> None:
        """Read only what the present state and speed depend on, which is much less of a long run; losses stay out."""
        for event in seldom_events(self._events):
            self._apply(event)
        self._metrics.skip(but=_GLANCE_BYTES)
        for record in self._metrics.records():
            self._measure(record)

    def _measure(self, record: dict[str, Any]) -> None:
        for b in reversed(self.breaks):
            if b.recovered_s is not None or record["time"] < b.time:
                break
            b.recovered_s = record["time"] - b.time
        self.furthest = max(self.furthest, self.step)
        step = record.get("step", self.step)
        if step <= self.furthest:
            self.lost_steps += 1
        self.step, self.loss = step, record.get("loss", self.loss)
        self.first_loss = self.loss if self.first_loss is None else self.first_loss
        speed = record.get("tokens_per_s", 0.0)
        self.tokens_per_s = speed if not self.tokens_per_s else 0.8 * self.tokens_per_s + 0.2 * speed
        took = record.get("step_s", 0.0)
        self.step_s = took if not self.step_s else 0.8 * self.step_s + 0.2 * took
        self.mfu = record.get("mfu")
        if self.state in ("submitted", "starting", "recovering"):
            self.state, self.doing = "running", "training"

    def _apply(self, event: Event) -> None:
        self.attempt = max(self.attempt, event.attempt)
        match event:
            case events.Submitted():
                self.is_program = event.program or self.is_program
                self.state, self.reason, self.doing = "submitted", "", "waiting to be started"
            case events.AttemptStarted():
                self.state, self.reason, self.doing = "starting", "", "waiting for nodes"
            case events.RoundStarted():
                self._start_round(event)
            case events.Checkpoint():
                self.committed, self.committed_at = event.step, event.time
            case events.RoundBroken():
                self.state, self.reason, self.doing = "recovering", event.why, "waiting for nodes"
                self.breaks.append(Break(event.time, event.why, max(0, event.step - max(0, event.committed))))
            case events.Waiting():
                self.reason = event.why
            case events.StopRequested():
                self.state, self.reason, self.doing = "saving", event.why, "saving before it stops"
            case events.AttemptEnded(decision="requeue"):
                self.state, self.reason, self.doing = "starting", event.reason, "waiting to be restarted"
            case events.AttemptEnded():
                self.state = {"done": "done", "preempted": "stopped"}.get(event.verdict, "failed")
                self.reason, self.doing = event.reason, "nothing: it has ended"

    def _start_round(self, event: events.RoundStarted) -> None:
        self.is_program = event.program or self.is_program
        self.nodes, self.world_size = event.nodes, event.world_size
        self.doing = f"{self.world_size} ranks on {len(self.nodes)} nodes are starting"
        self.strategy = f"{event.strategy} over {event.shard_group}"
        if self.is_program:  # it need not report any steps
            self.state, self.doing = "running", f"the program runs on {self.world_size} ranks"
            for b in self.breaks:
                b.recovered_s = event.time - b.time if b.recovered_s is None else b.recovered_s

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def eta_s(self, steps: int) -> float | None:
        """Seconds to the last step at the present speed; None when nobody knows."""
        known = self.step_s and not self.ended and not self.is_program
        return max(0, steps - self.step) * self.step_s if known else None

    def step_of(self, steps: int) -> str:
        """`12/120`; of a program, `12` or a dash."""
        if self.is_program:
            return f"{self.step:,}" if self.step else "-"
        return f"{self.step:,}/{steps:,}"

    def checkpoint_age(self) -> str:
        """`5s ago`, or a dash before the first."""
        return f"{duration(time.time() - self.committed_at)} ago" if self.committed >= 0 else "-"
