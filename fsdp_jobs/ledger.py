"""Where a run's time went. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_jobs.run_dir import RunDir, read_json_lines
from fsdp_jobs.status import duration


@dataclass(frozen=True)
class Ledger:
    """Seconds, over all attempts of a run; the parts add up to `wall_s`."""

    wall_s: float  # from the first submission to the last event, time between submissions left out
    useful_s: float  # steps that counted
    stall_s: float  # steps waiting for checkpoints
    lost_s: float  # steps done again later
    queue_s: float  # submitted, and not started yet
    start_s: float  # everything else: starting, recovering, loading, leaving

    @property
    def goodput(self) -> float:
        """The useful part of the wall time, 0 to 1."""
        return self.useful_s / self.wall_s if self.wall_s else 0.0

    def __str__(self) -> str:
        return (
            f"{self.goodput:.0%} of {duration(self.wall_s)}: useful {duration(self.useful_s)}, "
            f"checkpoints {self.stall_s:.1f}s, lost {self.lost_s:.1f}s, queue {duration(self.queue_s)}, "
            f"starting and restarting {duration(self.start_s)}"
        )


def ledger_of(run: RunDir) -> Ledger:
    """The ledger of a run up to now, from its events and metrics. With `log_every_steps` above 1, each logged
    step stands for the ones before it."""
    wall = queue = 0.0
    begun: float | None = None  # of the present submission
    waiting: float | None = None  # since when it has been in the queue
    last = 0.0
    for event in read_json_lines(run.events):
        now, kind = event["time"], event["event"]
        if kind == "submitted":
            wall += last - begun if begun is not None else 0.0
            begun = waiting = now
        elif kind == "attempt_started" and waiting is not None:
            queue += now - waiting
            waiting = None
        elif kind == "attempt_ended" and event["decision"] == "requeue":
            waiting = now
        last = now
    wall += last - begun if begun is not None else 0.0

    useful: dict[int, tuple[float, float]] = {}  # step -> seconds of its newest record, stall among them
    lost = 0.0
    before = 0
    for record in read_json_lines(run.metrics):
        step = record["step"]
        stands_for = step - before if step > before else 1
        before = step
        lost += useful.get(step, (0.0, 0.0))[0]
        useful[step] = record["step_s"] * stands_for, record["checkpoint_stall_s"]
    stall = sum(s for _, s in useful.values())
    counted = sum(s for s, _ in useful.values()) - stall
    return Ledger(wall, counted, stall, lost, queue, max(0.0, wall - counted - stall - lost - queue))
