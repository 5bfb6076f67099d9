"""The state of a job: one answer for launchers, `status` and TorchX."""

from __future__ import annotations

from enum import StrEnum

from fsdp_jobs.run.verdict import Verdict


class State(StrEnum):
    """What a launcher and the run directory together know of a job."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"
    UNKNOWN = "unknown"  # the launcher has no job of this id
    SILENT = "silent"  # the launcher does not answer, or another machine has to ask it

    @property
    def is_active(self) -> bool:
        return self in (State.QUEUED, State.RUNNING)

    @classmethod
    def from_verdict(cls, verdict: Verdict | None) -> State:
        """Return the state of a job that no longer runs; without a verdict it has failed, e.g. with its machine."""
        ends = {"done": cls.DONE, "preempted": cls.STOPPED}
        return ends.get(verdict.verdict, cls.FAILED) if verdict is not None else cls.FAILED
