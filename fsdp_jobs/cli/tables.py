"""Many runs at a glance, a row each: from run directories, and one question to each launcher. No torch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp_jobs.config.schema import plain_values
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.goodput import goodput_of
from fsdp_jobs.run.status import RunStatus
from fsdp_jobs.run.table import duration, table_lines
from fsdp_jobs.submit.submit import states_of

_NUMBERS = ("step", "loss", "tok/s", "eta", "goodput")
_HEADINGS = ("run", "state", "attempt", "nodes", *_NUMBERS, "checkpoint", "what happened last")


@dataclass(frozen=True)
class Row:
    """A run now. What is not known, or has no meaning for it, is None."""

    run: str
    handle: str
    state: str  # queued, or a word of RunStatus.state
    attempt: int | None
    nodes: int
    nodes_asked: str  # 4, or 2:8
    step: int
    steps: int | None
    loss: float | None
    tokens_per_s: float | None
    eta_s: float | None
    checkpoint_step: int | None
    checkpoint_age_s: float | None
    goodput: float | None  # 0 to 1
    reason: str  # of the newest break or end, or why it waits: then the scheduler's own words

    def cells(self) -> list[str]:
        return [
            self.run,
            self.state,
            "-" if self.attempt is None else str(self.attempt),
            f"{self.nodes}/{self.nodes_asked}",
            f"{self.step:,}/{self.steps:,}" if self.steps is not None else f"{self.step:,}" if self.step else "-",
            "-" if self.loss is None else f"{self.loss:.4f}",
            "-" if self.tokens_per_s is None else f"{self.tokens_per_s:,.0f}",
            duration(self.eta_s),
            "-" if self.goodput is None else f"{self.goodput:.0%}",
            "-" if self.checkpoint_age_s is None else f"{duration(self.checkpoint_age_s)} ago",
            self.reason,
        ]


class Overview:
    """Runs and how far they have been read: each look reads what is new."""

    def __init__(self, runs: Sequence[RunDir]):
        self._statuses = [RunStatus(run) for run in runs]
        for status in self._statuses:
            status.glance()
        self._jobs = {run.name: run.read_job() for run in runs}
        self._final: dict[str, Row] = {}

    def rows(self) -> list[Row]:
        """Every run now, in the order given."""
        open_ = [s for s in self._statuses if s.run.name not in self._final]
        words = states_of(open_)
        rows = {s.run.name: self._row(s, state, reason) for s, (state, reason) in zip(open_, words, strict=True)}
        self._final |= {s.run.name: rows[s.run.name] for s in open_ if s.ended}
        return [rows.get(s.run.name) or self._final[s.run.name] for s in self._statuses]

    def _row(self, status: RunStatus, state: str, reason: str) -> Row:
        job = self._jobs[status.run.name]
        asked = job if "steps" in job else plain_values(status.run.config)
        saved, goodput = status.committed >= 0, goodput_of(status.run)
        steps = None if status.is_program else int(asked["steps"])
        return Row(
            run=status.run.name,
            handle=job["handle"],
            state=state,
            attempt=status.attempt if status.attempt >= 0 else None,
            nodes=len(status.nodes),
            nodes_asked=str(asked["nodes"]),
            step=status.step,
            steps=steps,
            loss=status.loss,
            tokens_per_s=status.tokens_per_s or None,
            eta_s=None if steps is None or state in ("stopped", "failed") else status.eta_s(steps),
            checkpoint_step=status.committed if saved else None,
            checkpoint_age_s=time.time() - status.committed_at if saved else None,
            goodput=goodput.fraction if goodput.useful_s else None,
            reason=reason,
        )


def lines_of(rows: Sequence[Row], width: int | None) -> Iterator[str]:
    """Yield the lines of a table of runs, as `table_lines` does."""
    return table_lines(_HEADINGS, [row.cells() for row in rows], _NUMBERS, width)
