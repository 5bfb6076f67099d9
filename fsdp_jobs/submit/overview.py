"""Sum up runs, as `status` and the dashboard show them. No torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fsdp_jobs.checkpoints.catalog import find_on_nodes, step_of
from fsdp_jobs.config.errors import BadInput, name_file, one_line
from fsdp_jobs.launchers.base import Description
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.identity import owner_of
from fsdp_jobs.run.record import JsonObject
from fsdp_jobs.run.state import State
from fsdp_jobs.run.status import DAMAGED, ENDED, IDLE, OVER, WAITING, RunStatus, steps_done
from fsdp_jobs.run.table import counted, duration, percent
from fsdp_jobs.submit.submitted import another_runs, describe, is_silent

VERDICT_S = 10.0  # longest time from the end of a killed job's first process to its verdict, written after the last
UNREADABLE = "unreadable"
DAMAGES = (BadInput, OSError, ValueError, TypeError, LookupError)  # raised when a record is not as it was written

logger = logging.getLogger(__name__)
_noted: dict[str, str] = {}  # where -> newest logged error


def damage(where: str, error: Exception) -> str:
    """Describe why something cannot be read; a daemon logs the traceback once, as it may be a programming error."""
    if isinstance(error, BadInput):
        return one_line(error.problems[0])
    if isinstance(error, OSError):
        name_file(error)
    if _noted.get(where) != repr(error):
        _noted[where] = repr(error)
        logger.info("%s: cannot be read", where, exc_info=error)
    return f"cannot be read: {type(error).__name__}: {error}"


@dataclass(frozen=True)
class RunSummary:
    """The present state of a run. Values that are unknown or do not apply are None."""

    run: str
    handle: str
    state: str  # queued, damaged, unreadable (at present), or a word of RunStatus.state
    attempt: int | None = None
    nodes: int = 0
    nodes_asked: str = "-"  # 4, or 2:8
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None  # 0 to 1
    eta_s: float | None = None
    checkpoint_step: int | None = None
    checkpoint_at: float | None = None  # seconds since 1970
    checkpoint_age_s: float | None = None
    goodput: float | None = None  # 0 to 1
    failures: int = 0  # that broke a round
    reason: str = ""  # of the newest failure or end; while it waits, the scheduler's message
    owner: str | None = None  # None: this user

    @property
    def is_over(self) -> bool:
        """Return whether the run will not change any more."""
        return self.state in OVER

    def cells(self) -> dict[str, str]:
        """Return heading -> text, for a table."""
        return {
            "run": self.run,
            "state": self.state,
            "attempt": "-" if self.attempt is None else str(self.attempt),
            "nodes": f"{self.nodes}/{self.nodes_asked}",
            "step": steps_done(self.step or 0, self.steps),
            "loss": "-" if self.loss is None else f"{self.loss:#.5g}",
            "tok/s": "-" if self.tokens_per_s is None else f"{self.tokens_per_s:,.0f}",
            "eta": duration(self.eta_s),
            "goodput": "-" if self.goodput is None else percent(self.goodput),
            "checkpoint": "-" if self.checkpoint_age_s is None else f"{duration(self.checkpoint_age_s)} ago",
            "reason": self.reason,
        }


class Overview:
    """Summaries of runs; each look reads only new records.

    Args:
        ask: returns handle -> its launcher's description, for the handles of runs that have not ended.
        patience_s: how long a run whose launcher no longer runs its job keeps its recorded state.
    """

    def __init__(self, ask: Callable[[Sequence[str]], Mapping[str, Description]] = describe, patience_s: float = 0.0):
        self._ask, self._patience_s = ask, patience_s
        self._gone: dict[Path, tuple[float, Description | None]] = {}  # by run directory: since when, and what was told
        self._known: dict[Path, tuple[int, RunStatus, str | None]] = {}  # by run directory, with the run's owner

    def look(self, runs: Sequence[RunDir]) -> dict[RunDir, RunSummary]:
        """Sum up every run as it is now, in the order given; damaged records are reported in the summary."""
        read: dict[RunDir, tuple[JsonObject, RunStatus, str | None]] = {}
        rows: dict[RunDir, RunSummary] = {}
        asked: list[str] = []
        others: dict[RunDir, Description] = {}
        for run in runs:
            try:
                job, status, owner = self._read(run)
                # A query also lets the launcher remove what is left of a run that has ended.
                if not status.ended or (owner is None and run.left.exists()):
                    if why := another_runs(run):
                        others[run] = Description(State.UNKNOWN, why)
                    else:
                        asked.append(job["handle"])
                read[run] = job, status, owner
            except DAMAGES as e:
                rows[run] = _damaged(run, e)
        answers = self._ask(asked)
        for run, (job, status, owner) in read.items():
            answer = others.get(run) or answers.get(job["handle"])
            if status.ended and owner is None and answer is not None and answer.state is State.SILENT:
                with suppress(OSError):
                    run.left.unlink()  # ask only once: the launcher may never answer again
            try:
                rows[run] = summary_of(status, job, answer, owner)
                if not rows[run].is_over or status.ended:
                    self._gone.pop(run.path, None)
                    continue
                since, told = self._gone.setdefault(run.path, (time.monotonic(), answer))  # later it may be forgotten
                is_patient = time.monotonic() - since < self._patience_s
                rows[run] = summary_of(status, job, None if is_patient else told, owner)
            except DAMAGES as e:
                rows[run] = _damaged(run, e)
        return {run: rows[run] for run in runs}

    def _read(self, run: RunDir) -> tuple[JsonObject, RunStatus, str | None]:
        """Read a run's new records; return the record of its newest submission, its status and its owner."""
        job = run.read_job()
        if not isinstance(job["handle"], str):
            raise TypeError(f"{run.job}: the handle is {job['handle']!r}, not a text")
        begun = run.identity.stat().st_mtime_ns if run.identity.exists() else 0  # a removed run's name may be reused
        known, status, owner = self._known.pop(run.path, (0, None, None))  # put back only if reading succeeds
        if status is None or known != begun:
            status, owner = RunStatus(run), owner_of(run)
            status.glance()
        status.update()
        self._known[run.path] = begun, status, owner
        return job, status, owner


def _damaged(run: RunDir, error: Exception) -> RunSummary:
    """Sum up a run that cannot be read; after most OSErrors it may be readable again soon."""
    owner = None
    with suppress(*DAMAGES):
        owner = owner_of(run)
    is_passing = isinstance(error, OSError) and not isinstance(error, PermissionError)
    state = UNREADABLE if is_passing else DAMAGED
    return RunSummary(run.name, "", state, reason=damage(str(run.path), error), owner=owner and _name_of(owner))


def _name_of(owner: str) -> str:
    return owner.partition(" on ")[0]


def summary_of(
    status: RunStatus, job: JsonObject, described: Description | None, owner: str | None = None
) -> RunSummary:
    """Sum up a run.

    Args:
        status: from the run directory.
        job: the record of its newest submission.
        described: its launcher's description, if it was queried.
        owner: None for this user.
    """
    state, reason = state_of(status, described)
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
        mfu=status.mfu,
        eta_s=None if state in ENDED else status.eta_s,
        checkpoint_step=status.committed if status.committed >= 0 else None,
        checkpoint_at=status.committed_at or None,
        checkpoint_age_s=status.checkpoint_age_s,
        goodput=goodput.fraction if (goodput := status.goodput).useful_s else None,
        failures=sum(not b.is_planned for b in status.breaks),
        reason=reason,
        owner=owner and _name_of(owner),
    )


def story_of(status: RunStatus, state: str) -> Iterator[tuple[str, str]]:
    """Yield (heading, sentence): the cost of each failure, present problems, and what the run does now.

    Args:
        status: read from the beginning, without `glance`.
        state: of its summary, for which its launcher was queried.
    """
    for b in status.breaks:
        stamp = f"{datetime.fromtimestamp(b.time):%b %d %H:%M:%S}"
        yield stamp, f"{b.why.rstrip('.')}: {b.lost} lost, training again after {b.recovered}"
    for host, why in status.run.excluded_hosts().items():
        yield host, f"is excluded: {why}"
    if status.spikes:
        yield "loss", f"{counted(len(status.spikes), 'spike')}, the last: {status.spikes[-1].sentence()}"
    for slow in status.slow:
        yield "slow", f"{datetime.fromtimestamp(slow.time):%H:%M} {slow.sentence()}"
    for corruption in status.corruptions:
        yield "corrupt", str(corruption.sentence())
    with suppress(OSError):  # the checkpoints are closed to this user, or elsewhere; the rest is known
        on_nodes = map(step_of, find_on_nodes(status.run.checkpoints, ()))
        if newer := [step for step in on_nodes if step > status.committed]:
            yield "checkpoint", f"step {newer[0]} is only on the nodes' own disks: the next resume copies it"
    doing = f"no step for {duration(still)}" if (still := status.still_s) else status.doing
    yield "now", IDLE if state in ENDED else WAITING if state == State.QUEUED else doing
    yield from goodput_of(status)


def goodput_of(status: RunStatus) -> Iterator[tuple[str, str]]:
    """Yield (heading, sentence): the breakdown of a run's time, and its plan's prediction."""
    from fsdp_jobs.plan.plan import Plan  # slow to import, and a table of runs needs none

    if status.has_steps:
        plan = Plan.of(status.run)
        predicted = percent(plan.expected.goodput, 1) if plan is not None and plan.time is not None else ""
        yield "goodput", f"{status.goodput}{predicted and f'; {predicted} predicted'}"
    if starting := status.starting:
        yield "starting", starting


def state_of(status: RunStatus, job: Description | None) -> tuple[str, str]:
    """Return a run's state and reason from its records and, unless None, its launcher's description."""
    if job is not None:
        status.update()  # the launcher may have fetched further records
    if status.ended or job is None:
        return status.state, status.reason
    if job.state is State.RUNNING:
        return status.state, status.reason or job.message
    if is_silent(status.run, job):
        return status.state, job.message if job.state is State.SILENT else f"of {owner_of(status.run)}"
    if job.state is State.QUEUED:
        return State.QUEUED, job.message
    state = job.state if job.state in ENDED else State.FAILED
    return state, job.message or ("" if state is State.DONE else "its launcher no longer runs it: resume it")
