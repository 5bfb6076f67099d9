"""Where a run's time went. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.table import duration
from fsdp_jobs.run.tail import newest_json_lines, read_json_lines


@dataclass(frozen=True)
class Goodput:
    """Seconds, over all attempts of a run; the parts add up to `wall_s`."""

    wall_s: float  # from the first submission to the last event, time between submissions left out
    useful_s: float  # steps that counted
    stall_s: float  # steps that waited for checkpoints
    lost_s: float  # steps done again later
    queue_s: float  # submitted, and not started yet
    start_s: float  # everything else: starting, recovering, loading, stopping

    @property
    def fraction(self) -> float:
        """Return the useful part of the wall time, 0 to 1."""
        return self.useful_s / self.wall_s if self.wall_s else 0.0

    def __str__(self) -> str:
        return (
            f"{self.fraction:.0%} of {duration(self.wall_s)}: useful {duration(self.useful_s)}, "
            f"checkpoints {self.stall_s:.1f}s, lost {self.lost_s:.1f}s, queue {duration(self.queue_s)}, "
            f"starting and restarting {duration(self.start_s)}"
        )


@dataclass(frozen=True)
class Costs:
    """What failures and checkpoints have cost on a run, in seconds."""

    stall_s: float  # that steps waited, per checkpoint
    write_s: float  # from the beginning of a save to its commit
    restart_s: float  # from a failure to the next step; 0: nothing has failed yet


def costs_of(run: RunDir) -> Costs | None:
    """Return the median costs of a run; None before its first checkpoint."""
    writes, broken, restarts = [], list[float](), []
    for event in events.read_events(run):
        if isinstance(event, events.Checkpoint):
            writes.append(event.seconds)
        elif isinstance(event, events.RoundBroken):
            broken.append(event.failed_at or event.time)
    newest = next(newest_json_lines(run.metrics), None)
    if not writes or newest is None:
        return None
    steps = iter(read_json_lines(run.metrics) if broken else [])
    for moment in broken:
        after = next((r["time"] for r in steps if r.get("time", 0.0) > moment), None)
        restarts += [] if after is None else [after - moment]
    return Costs(newest.get("stall_s", 0.0) / len(writes), median(writes), median(restarts) if restarts else 0.0)


class StepClock:
    """Sums up where the time of a run's steps went, over all restarts.

    Every line of metrics.jsonl carries the sums, so that the newest one is enough.
    """

    def __init__(self, run: RunDir):
        self._run = run
        self._step: int | None = None  # of the newest line; None before the first since this start
        self.useful_s = self.stall_s = self.lost_s = 0.0

    def add(self, step: int, step_s: float, stall_s: float) -> dict[str, float]:
        """Add a logged step, which stands for those before it that were not logged; returns what its line carries.

        Args:
            step: number of the step.
            step_s: seconds it took.
            stall_s: those of them that it waited for a checkpoint.
        """
        if self._step is None:
            self._continue_before(step)
        stands_for = step - (self._step or 0)
        self._step = step
        self.useful_s += step_s * stands_for - stall_s
        self.stall_s += stall_s
        return {"useful_s": self.useful_s, "stall_s": self.stall_s, "lost_s": self.lost_s}

    def _continue_before(self, step: int) -> None:
        """Continue the sums of earlier starts; what they did from this step on is done again, and so was lost."""
        newest: dict[str, Any] | None = None
        for record in newest_json_lines(self._run.metrics):
            newest = newest or record
            if record.get("step", 0) < step:
                self._step = record.get("step", 0)
                self.useful_s, self.stall_s = record.get("useful_s", 0.0), record.get("stall_s", 0.0)
                break
        if newest is not None:
            done = newest.get("useful_s", 0.0) + newest.get("stall_s", 0.0)
            self.lost_s = newest.get("lost_s", 0.0) + max(0.0, done - self.useful_s - self.stall_s)
