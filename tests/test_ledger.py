"""Where the time went, from records a run might have left."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_jobs.events import append_line
from fsdp_jobs.ledger import ledger_of
from fsdp_jobs.run_dir import RunDir


def _event(run: RunDir, time: float, event: str, **details: object) -> None:
    append_line(run.events, {"time": time, "event": event, "attempt": 0, **details})


def _step(run: RunDir, step: int, seconds: float, stall: float = 0.0) -> None:
    append_line(run.metrics, {"step": step, "step_s": seconds, "checkpoint_stall_s": stall})


def test_the_parts_add_up_and_the_night_between_two_submissions_does_not_count(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    _event(run, 100, "submitted")
    _event(run, 105, "attempt_started")
    for step in (1, 2, 3):
        _step(run, step, 2.0, stall=0.5)
    for step in (2, 3):  # done again after a failure
        _step(run, step, 2.5)
    _event(run, 130, "attempt_ended", decision="stop")
    _event(run, 9000, "submitted")
    _event(run, 9001, "attempt_started")
    _step(run, 4, 2.0)
    _event(run, 9010, "attempt_ended", decision="requeue")
    _event(run, 9014, "attempt_started")
    _event(run, 9020, "attempt_ended", decision="stop")
    ledger = ledger_of(run)
    assert ledger.wall_s == 30 + 20
    assert ledger.queue_s == 5 + 1 + 4
    assert ledger.lost_s == 4.0
    assert ledger.stall_s == 0.5
    assert ledger.useful_s == 1.5 + 2.5 + 2.5 + 2.0
    parts = ledger.useful_s + ledger.stall_s + ledger.lost_s + ledger.queue_s + ledger.start_s
    assert parts == pytest.approx(ledger.wall_s)


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    assert ledger_of(RunDir(tmp_path)).goodput == 0.0
