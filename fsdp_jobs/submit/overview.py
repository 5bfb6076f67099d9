"""Sum up runs at a glance, as `status` and the dashboard show them. No torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_jobs.checkpoints.catalog import find_on_nodes, step_of
from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.launchers.base import Description
from fsdp_jobs.launchers.state import State
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.identity import owner_of
from fsdp_jobs.run.status import ENDED, IDLE, WAITING, RunStatus, steps_done
from fsdp_jobs.run.table import ago, counted, duration
from fsdp_jobs.submit.submitted import another_runs, describe, is_silent

DAMAGES = (BadInput, OSError, ValueError, TypeError, LookupError)  # of reading what is not as written

logger = logging.getLogger(__name__)
_noted: dict[str, str] = {}  # where -> the error noted last


def damage(where: str, error: Exception) -> str:
    """Say why something cannot be read; a daemon logs the traceback, once: it may be a programming error."""
    if isinstance(error, BadInput):
        return str(error.problems[0])
    if _noted.get(where) != repr(error):
        _noted[where] = repr(error)
        logger.info("%s: cannot be read", where, exc_info=error)
    return f"cannot be read: {type(error).__name__}: {error}"


@dataclass(frozen=True)
class RunSummary:
    """A run now. What is not known, or has no meaning for it, is None."""

    run: str
    handle: str
    state: str  # queued, damaged, or a word of RunStatus.state
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
    failures: int = 0  # that ended a round
    reason: str = ""  # of the newest failure or end, or why it waits: then the scheduler's own words
    owner: str | None = None  # None: this user

    @property
    def is_over(self) -> bool:
        """Return whether nothing more is to be expected of it."""
        return self.state in (*ENDED, "damaged")

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


def ask_launchers(handles: Sequence[str]) -> dict[str, Description]:
    """Return handle -> description of jobs, with one question to each launcher."""
    return dict(zip(handles, describe(handles), strict=True))


class Overview:
    """Runs, read further at every look.

    Args:
        ask: is called with the handles of runs that have not ended, and returns handle -> what its launcher says.
    """

    def __init__(self, ask: Callable[[Sequence[str]], Mapping[str, Description]] = ask_launchers):
        self._ask = ask
        self._statuses: dict[str, RunStatus] = {}
        self._owners: dict[str, str | None] = {}

    def look(self, runs: Sequence[RunDir]) -> list[RunSummary]:
        """Sum up every run as it is now, in the order given; one whose records are damaged says so."""
        read: dict[str, tuple[RunStatus, dict[str, Any]]] = {}
        rows: dict[str, RunSummary] = {}
        for run in runs:
            try:
                read[run.name] = self._read(run)
            except DAMAGES as e:
                rows[run.name] = RunSummary(run.name, "", "damaged", reason=damage(str(run.path), e))
        live = {name: job for name, (status, job) in read.items() if not status.ended or self._leaves(status.run)}
        others = {name: why for name in live if (why := another_runs(read[name][0].run))}
        answers = self._ask([job["handle"] for name, job in live.items() if name not in others])
        for name, (status, job) in read.items():
            strange = Description("", State.UNKNOWN, others[name]) if name in others else None
            answer = strange or answers.get(job["handle"])
            if status.ended and answer is not None and answer.state is State.SILENT:
                status.run.left.unlink(missing_ok=True)  # it is asked once: it may be gone for good
            try:
                rows[name] = summary_of(status, job, answer)
            except DAMAGES as e:
                rows[name] = RunSummary(name, "", "damaged", reason=damage(str(status.run.path), e))
        return [rows[run.name] for run in runs]

    def _leaves(self, run: RunDir) -> bool:
        """Whether the cluster may have something of a run that has ended; its launcher removes that when asked."""
        return self._owners[run.name] is None and run.left.exists()

    def _read(self, run: RunDir) -> tuple[RunStatus, dict[str, Any]]:
        """Read a run further; return its status, and what was submitted with `handle` and `nodes`."""
        job = run.read_job()
        if not isinstance(job["handle"], str):
            raise TypeError(f"{run.job}: the handle is {job['handle']!r}, not a text")
        status = self._statuses.pop(run.name, None)  # kept only if it can be read further
        if status is None:
            status = RunStatus(run)
            status.glance()
            self._owners[run.name] = owner_of(run)
        status.update()
        self._statuses[run.name] = status
        return status, {"handle": job["handle"], "nodes": job["nodes"], "owner": self._owners[run.name]}


def summary_of(status: RunStatus, job: Mapping[str, Any], described: Description | None) -> RunSummary:
    """Sum up a run: `job` has its `handle` and `nodes`, `described` what its launcher says, if it was asked."""
    state, reason = state_of(status, described)
    owner = job.get("owner")
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
        failures=len(status.breaks),
        reason=reason,
        owner=owner and owner.partition(" on ")[0],
    )


def story_of(status: RunStatus, state: str) -> Iterator[tuple[str, str]]:
    """Yield (heading, sentence): what each failure cost, what is not as it should be, what the run does now.

    Args:
        status: read from the beginning, not at a glance.
        state: of its summary, for which its launcher was asked.
    """
    for b in status.breaks:
        stamp = time.strftime("%b %d %H:%M:%S", time.localtime(b.time))
        yield stamp, f"{b.why}: {b.lost} steps lost, training again after {b.recovered}"
    for host, why in status.run.excluded_hosts().items():
        yield host, f"is excluded: {why}"
    if status.spikes:
        yield "loss", f"{counted(len(status.spikes), 'spike')}, the last: {status.spikes[-1].sentence()}"
    for slow in status.slow:
        yield "slow", f"{time.strftime('%H:%M', time.localtime(slow.time))} {slow.sentence()}"
    for corruption in status.corruptions:
        yield "corrupt", str(corruption.sentence())
    if on_nodes := [n for n in map(step_of, find_on_nodes(status.run.checkpoints)) if n > status.committed]:
        yield "checkpoint", f"step {on_nodes[0]} is only on the nodes' own disks: the next resume copies it"
    doing = f"no step for {duration(still)}" if (still := status.still_s) else status.doing
    yield "now", IDLE if state in ENDED else WAITING if state == State.QUEUED.value else doing
    if status.has_steps:
        yield "goodput", goodput_of(status)
    if starting := status.starting:
        yield "starting", starting


def goodput_of(status: RunStatus) -> str:
    """Tell where a run's time went, and what its plan had predicted."""
    from fsdp_jobs.plan.plan import Plan  # a table of runs needs none

    plan = Plan.of(status.run)
    predicted = f"; {plan.expected.goodput:.1%} predicted" if plan is not None and plan.time is not None else ""
    return f"{status.goodput}{predicted}"


def state_of(status: RunStatus, job: Description | None) -> tuple[str, str]:
    """Return state and reason of a run by its own record and its launcher's description; None if it was not asked."""
    if job is not None:
        status.update()  # the launcher may have fetched more of the record
    if status.ended or job is None or job.state is State.RUNNING:
        return status.state, status.reason
    if is_silent(status.run, job):
        return status.state, job.message if job.state is State.SILENT else f"of {owner_of(status.run)}"
    if job.state is State.QUEUED:
        return State.QUEUED.value, job.message
    state = job.state if job.state in (State.STOPPED, State.DONE) else State.FAILED
    return state.value, job.message or ("" if state is State.DONE else "its launcher no longer runs it: resume it")
