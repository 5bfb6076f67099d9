"""Read a run's metrics and events as the curves and marks of charts. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.tail import sampled_json_lines

_MAX_POINTS = 2000  # of a curve: a chart has no more pixels
_MARKS: dict[type[events.Event], str] = {
    events.RoundBroken: "fault",
    events.Checkpoint: "checkpoint",
    events.CheckpointSkipped: "damaged checkpoint",
    events.Resumed: "resumed",
    events.LossSpike: "loss spike",
}


@dataclass
class History:
    """Everything a run has recorded, with the seconds since its first submission."""

    steps: list[dict[str, Any]] = field(default_factory=list)  # lines of metrics.jsonl, of a long run some of them
    attempts: list[tuple[int, float, float]] = field(default_factory=list)  # number, first and last second
    marks: dict[str, list[float]] = field(default_factory=dict)  # fault, checkpoint, ... -> the seconds of each
    rounds: list[events.RoundStarted] = field(default_factory=list)

    @classmethod
    def of(cls, run: RunDir) -> History:
        """Read a run; one that has no events yet has an empty history."""
        history, recorded = cls(), list(events.read_events(run))
        began = recorded[0].time if recorded else 0.0
        times: dict[int, list[float]] = {}
        for event in recorded:
            seconds = event.time - began
            times.setdefault(event.attempt, []).append(seconds)
            if type(event) in _MARKS:
                history.marks.setdefault(_MARKS[type(event)], []).append(seconds)
            if isinstance(event, events.RoundStarted):
                history.rounds.append(event)
        history.attempts = [(number, min(at), max(at)) for number, at in sorted(times.items()) if number >= 0]
        for record in reversed(list(sampled_json_lines(run.metrics, _MAX_POINTS))):
            if {"step", "time"} <= record.keys():
                history.steps.append({"attempt": 0, **record, "seconds": record["time"] - began})
        return history

    def stretches(self) -> list[list[dict[str, Any]]]:
        """Return the records in stretches of one attempt without a step back."""
        pairs = enumerate(pairwise(self.steps), start=1)
        cuts = [i for i, (a, b) in pairs if b["step"] <= a["step"] or b["attempt"] != a["attempt"]]
        return [self.steps[first:end] for first, end in pairwise([0, *cuts, len(self.steps)])]

    def newest(self) -> list[dict[str, Any]]:
        """One record per step, the newest where a step was repeated, in the order of steps."""
        by_step = {record["step"]: record for record in self.steps}
        return [by_step[step] for step in sorted(by_step)]
