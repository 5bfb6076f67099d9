"""What a run is doing, from its run directory alone. No torch."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_jobs.run.directory import RunDir

ENDED = ("done", "stopped", "failed")
_CHECKPOINT = b'"event": "checkpoint",'
_GLANCE_BYTES = 1 << 12  # of metrics.jsonl, about a dozen steps


class Tail:
    """New objects of a growing .jsonl file, each time it is asked."""

    def __init__(self, path: Path):
        self.path, self.place = path, 0

    def new(self) -> Iterator[dict[str, Any]]:
        return map(json.loads, self.lines())

    def lines(self) -> Iterator[bytes]:
        if not self.path.exists():
            return
        with self.path.open("rb") as f:
            f.seek(self.place)
            for line in f:
                if not line.endswith(b"\n"):
                    break
                self.place += len(line)
                yield line

    def skip(self, but: int) -> None:
        """Leave out what is there now, but for about so many bytes at its end."""
        if self.path.exists() and self.path.stat().st_size > self.place + but:
            with self.path.open("rb") as f:
                f.seek(-but, os.SEEK_END)
                f.readline()
                self.place = f.tell()


def seldom_events(run: RunDir) -> Iterator[dict[str, Any]]:
    """A run's events, without checkpoints that another one follows at once: a long run has thousands of those."""
    return _seldom(Tail(run.events))


def _seldom(events: Tail) -> Iterator[dict[str, Any]]:
    before = b""
    for line in events.lines():
        if before and not (_CHECKPOINT in before and _CHECKPOINT in line):
            yield json.loads(before)
        before = line
    if before:
        yield json.loads(before)


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
    is_program: bool = False  # of the user's, which says of its steps what it likes
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

    def update(self) -> list[dict[str, Any]]:
        """Read what is new; returns the new events."""
        events = list(self._events.new())
        for event in events:
            self._take(event)
        for record in self._metrics.new():
            self._measure(record)
        return events

    def glance(self) -> None:
        """Read only what state, place and speed depend on now, which is much less of a long run; losses stay out."""
        for event in _seldom(self._events):
            self._take(event)
        self._metrics.skip(but=_GLANCE_BYTES)
        for record in self._metrics.new():
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

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        self.attempt = max(self.attempt, event["attempt"])
        self.is_program = event.get("program", self.is_program)
        if kind in ("submitted", "attempt_started"):
            self.state = "submitted" if kind == "submitted" else "starting"
            self.reason = ""
            self.doing = "waiting to be started" if kind == "submitted" else "waiting for nodes"
        elif kind == "round_started":
            self.nodes, self.world_size = event["nodes"], event["world_size"]
            self.doing = f"{self.world_size} ranks on {len(self.nodes)} nodes are starting"
            self.strategy = f"{event['strategy']} over {event['shard_group']}"
            if self.is_program:  # it need not say any more than that it runs
                self.state, self.doing = "running", f"the program runs on {self.world_size} ranks"
                for b in self.breaks:
                    b.recovered_s = event["time"] - b.time if b.recovered_s is None else b.recovered_s
        elif kind == "checkpoint":
            self.committed, self.committed_at = event["step"], event["time"]
        elif kind == "round_broken":
            self.state, self.reason, self.doing = "recovering", event["why"], "waiting for nodes"
            lost = max(0, event["step"] - max(0, event["committed"]))
            self.breaks.append(Break(event["time"], event["why"], lost))
        elif kind == "waiting":
            self.reason = event["why"]
        elif kind == "stop_requested":
            self.state, self.reason, self.doing = "saving", event["why"], "saving, to leave"
        elif kind == "attempt_ended":
            self.doing = "waiting to be started again" if event["decision"] == "requeue" else "nothing: it has ended"
            ended = {"done": "done", "preempted": "stopped"}.get(event["verdict"], "failed")
            self.state = "starting" if event["decision"] == "requeue" else ended
            self.reason = event["reason"]

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


def duration(seconds: float | None) -> str:
    """`2h05m`, `3m20s`, `12s`, or a dash."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"
