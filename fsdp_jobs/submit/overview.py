"""Sum up runs at a glance, as `status` and the dashboard show them. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fsdp_jobs.launchers.base import Description
from fsdp_jobs.launchers.state import State
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.identity import owner_of
from fsdp_jobs.run.status import ENDED, RunStatus, steps_done
from fsdp_jobs.run.table import ago, duration
from fsdp_jobs.submit.submitted import describe, is_silent


@dataclass(frozen=True)
class RunSummary:
    """A run now. What is not known, or has no meaning for it, is None."""

    run: str
    handle: str
    state: str  # queued, or a word of RunStatus.state
    attempt: int | None
    nodes: int
    nodes_asked: str  # 4, or 2:8
    step: int | None
    steps: int | None
    loss: float | None
    tokens_per_s: float | None
    eta_s: float | None
    checkpoint_step: int | None
    checkpoint_age_s: float | None
    goodput: float | None  # 0 to 1
    reason: str  # of the newest failure or end, or why it waits: then the scheduler's own words

    def cells(self) -> dict[str, str]:
        """Return heading -> text, for a table."""
        return {
            "run": self.run,
            "state": self.state,
            "attempt": "-" if self.attempt is None else str(self.attempt),
            "nodes": f"{self.nodes}/{self.nodes_asked}",
            "step": steps_done(self.step or 0, self.steps),
            "loss": "-" if self.loss is None else f"{self.loss:.4f}",
            "tok/s": "-" if self.tokens_per_s is None else f"{self.tokens_per_s:,.0f}",
            "eta": duration(self.eta_s),
            "goodput": "-" if self.goodput is None else f"{self.goodput:.0%}",
            "checkpoint": ago(self.checkpoint_age_s),
            "reason": self.reason,
        }


def ask_launchers(statuses: Sequence[RunStatus]) -> dict[str, Description]:
    """Return handle -> description of runs, with one question to each launcher."""
    handles = [str(status.run.read_job()["handle"]) for status in statuses]
    return dict(zip(handles, describe(handles), strict=True))


class Overview:
    """Runs, read further at every look.

    Args:
        ask: is called with the runs that have not ended, and returns handle -> what its launcher says.
    """

    def __init__(self, ask: Callable[[Sequence[RunStatus]], Mapping[str, Description]] = ask_launchers):
        self._ask = ask
        self._statuses: dict[str, RunStatus] = {}

    def look(self, runs: Sequence[RunDir]) -> list[RunSummary]:
        """Sum up every run as it is now, in the order given."""
        statuses = []
        for run in runs:
            if run.name not in self._statuses:
                self._statuses[run.name] = RunStatus(run)
                self._statuses[run.name].glance()
            statuses.append(self._statuses[run.name])
            statuses[-1].update()
        answers = self._ask([status for status in statuses if not status.ended])
        return [_summary(status, answers) for status in statuses]


def _summary(status: RunStatus, answers: Mapping[str, Description]) -> RunSummary:
    job, goodput = status.run.read_job(), status.goodput
    state, reason = state_of(status, answers.get(job["handle"]))
    return RunSummary(
        run=status.run.name,
        handle=job["handle"],
        state=state,
        attempt=status.attempt if status.attempt >= 0 else None,
        nodes=len(status.nodes),
        nodes_asked=job["nodes"],
        step=status.step if status.has_steps else None,
        steps=status.steps,
        loss=status.loss,
        tokens_per_s=status.tokens_per_s or None,
        eta_s=None if state in ENDED else status.eta_s,
        checkpoint_step=status.committed if status.committed >= 0 else None,
        checkpoint_age_s=status.checkpoint_age_s,
        goodput=goodput.fraction if goodput.useful_s else None,
        reason=reason,
    )


def state_of(status: RunStatus, job: Description | None) -> tuple[str, str]:
    """Return state and reason of a run by its own record and its launcher's description; None if it was not asked."""
    status.update()  # the launcher may have fetched more of the record
    if status.ended or job is None or job.state is State.RUNNING:
        return status.state, status.reason
    if is_silent(status.run, job):
        return status.state, job.message if job.state is State.SILENT else f"of {owner_of(status.run)}"
    if job.state is State.QUEUED:
        return State.QUEUED.value, job.message
    state = job.state if job.state in (State.STOPPED, State.DONE) else State.FAILED
    hint = "" if state is State.DONE else "its launcher no longer runs it: resume it"
    return state.value, job.message or hint
