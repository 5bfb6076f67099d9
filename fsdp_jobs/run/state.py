"""Define the states of a job, shared by launchers, `status` and TorchX."""

from __future__ import annotations

from enum import StrEnum

from fsdp_jobs.run.events import AttemptEnded
from fsdp_jobs.run.verdict import Verdict


class State(StrEnum):
    """A job's state, according to its launcher and its run directory."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"
    UNKNOWN = "unknown"  # the launcher has no job with this id
    SILENT = "silent"  # the launcher does not answer, or can be queried only from another machine

    @property
    def is_active(self) -> bool:
        return self in (State.QUEUED, State.RUNNING)

    @classmethod
    def from_verdict(cls, verdict: Verdict | AttemptEnded | None) -> State:
        """Return the state of a job that no longer runs; FAILED without a verdict, e.g. if its machine was lost."""
        ends = {"done": cls.DONE, "preempted": cls.STOPPED}
        return ends.get(verdict.verdict, cls.FAILED) if verdict is not None else cls.FAILED
