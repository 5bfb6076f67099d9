"""A run's metrics and events as the columns and marks that charts are drawn from. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fsdp_jobs.run.directory import RunDir, read_json_lines

_MOST_POINTS = 2000  # of a curve: a chart has no more pixels
MARKS = {
    "round_broken": "fault",
    "checkpoint": "checkpoint",
    "checkpoint_skipped": "damaged checkpoint",
    "resumed": "resumed",
}


@dataclass
class Mark:
    """Something that happened at a moment."""

    seconds: float  # since the run's first submission
    kind: str  # one of MARKS' values
    step: int  # that the run was at
    text: str


@dataclass
class History:
    """All that was recorded of a run."""

    began: float = 0.0  # seconds since 1970
    steps: list[dict[str, Any]] = field(default_factory=list)  # as recorded, in the order of recording
    attempts: list[tuple[int, float, float]] = field(default_factory=list)  # number, first and last second
    marks: list[Mark] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)  # events round_started

    @classmethod
    def of(cls, run: RunDir) -> History:
        events = list(read_json_lines(run.events))
        history = cls(steps=[{"attempt": 0, **r} for r in read_json_lines(run.metrics) if {"step", "time"} <= r.keys()])
        if not events:
            return history
        history.began = events[0]["time"]
        history.rounds = [e for e in events if e["event"] == "round_started"]
        for record in history.steps:
            record["seconds"] = record["time"] - history.began
        numbers = sorted({e["attempt"] for e in events if e["attempt"] >= 0})
        for number in numbers:
            times = [e["time"] - history.began for e in events if e["attempt"] == number]
            history.attempts.append((number, min(times), max(times)))
        history.marks = list(_marks(events, history.began))
        return history

    def lives(self) -> list[list[dict[str, Any]]]:
        """The records in stretches without a step back."""
        found: list[list[dict[str, Any]]] = []
        for record in self.steps:
            if not found or record["step"] <= found[-1][-1]["step"] or record["attempt"] != found[-1][-1]["attempt"]:
                found.append([])
            found[-1].append(record)
        return found

    def newest(self) -> list[dict[str, Any]]:
        """One record a step, the newest where one was done again, in the order of steps."""
        by_step = {record["step"]: record for record in self.steps}
        return [by_step[step] for step in sorted(by_step)]


def _marks(events: list[dict[str, Any]], began: float) -> Iterator[Mark]:
    step = 0
    for event in events:
        kind = MARKS.get(event["event"])
        step = event.get("step", step)
        if kind is None:
            continue
        text = event.get("why", "")
        yield Mark(event["time"] - began, kind, step, "; ".join(text) if isinstance(text, list) else str(text))


def thinned(records: list[dict[str, Any]], x: str, y: str) -> tuple[list[float], list[float]]:
    """The columns x and y of those records that have both; means of neighbours where there are too many."""
    pairs = [(float(r[x]), float(r[y])) for r in records if r.get(y) is not None]
    width = max(1, -(-len(pairs) // _MOST_POINTS))
    blocks = [pairs[i : i + width] for i in range(0, len(pairs), width)]
    return [b[-1][0] for b in blocks], [sum(p[1] for p in b) / len(b) for b in blocks]
