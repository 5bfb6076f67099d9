"""Where the time went, from records a run might have left."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.events import append_line
from fsdp_jobs.run.goodput import Goodput, StepClock
from fsdp_jobs.run.status import RunStatus

STOP = {"verdict": "done", "decision": "stop", "reason": "all steps are done"}
REQUEUE = {"verdict": "preempted", "decision": "requeue", "reason": "SIGTERM"}


def _event(run: RunDir, time: float, event: str, **details: object) -> None:
    append_line(run.events, {"time": time, "event": event, "attempt": 0, **details})


def _goodput_of(run: RunDir) -> Goodput:
    """Its goodput, which a glance must see as well as reading everything."""
    glanced, read = RunStatus(run), RunStatus(run)
    glanced.glance()
    read.update()
    assert glanced.goodput == read.goodput
    return read.goodput


def _life(run: RunDir, steps: range, seconds: float, stall: float = 0.0) -> None:
    """A life of the trainer, as it logs."""
    clock = StepClock(run)
    for step in steps:
        append_line(run.metrics, {"step": step, "step_s": seconds, **clock.add(step, seconds, stall)})


def test_the_parts_add_up_and_the_night_between_two_submissions_does_not_count(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    _event(run, 100, "submitted")
    _event(run, 105, "attempt_started")
    _life(run, range(1, 4), 2.0, stall=0.5)
    _life(run, range(2, 4), 2.5)  # done again after a failure
    _event(run, 130, "attempt_ended", **STOP)
    _event(run, 9000, "submitted")
    _event(run, 9001, "attempt_started")
    _life(run, range(4, 5), 2.0)
    _event(run, 9010, "attempt_ended", **REQUEUE)
    _event(run, 9014, "attempt_started")
    _event(run, 9020, "attempt_ended", **STOP)
    goodput = _goodput_of(run)
    assert goodput.wall_s == 30 + 20
    assert goodput.queue_s == 5 + 1 + 4
    assert goodput.lost_s == 4.0
    assert goodput.stall_s == 0.5
    assert goodput.useful_s == 1.5 + 2.5 + 2.5 + 2.0
    parts = goodput.useful_s + goodput.stall_s + goodput.lost_s + goodput.queue_s + goodput.start_s
    assert parts == pytest.approx(goodput.wall_s)


def test_steps_that_were_not_logged_count_and_a_life_without_a_logged_step_costs_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    _event(run, 0, "submitted")
    _life(run, range(10, 41, 10), 1.0)
    _life(run, range(0), 1.0)
    _life(run, range(30, 51, 10), 1.0)  # from the checkpoint of step 20
    _event(run, 100, "checkpoint", step=20)
    _event(run, 110, "checkpoint", step=40)
    goodput = _goodput_of(run)
    assert (goodput.useful_s, goodput.lost_s, goodput.wall_s) == (50.0, 20.0, 110)


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    assert _goodput_of(RunDir(tmp_path)).fraction == 0.0
