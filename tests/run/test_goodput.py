"""Where the time went, from records a run might have left."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_jobs.observe.answers import curves
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.events import append_lines
from fsdp_jobs.run.goodput import Failures, Goodput, StepClock, failures_of
from fsdp_jobs.run.status import RunStatus

STOP = {"verdict": "done", "decision": "stop", "reason": "all steps are done"}
REQUEUE = {"verdict": "preempted", "decision": "requeue", "reason": "SIGTERM"}


def _event(run: RunDir, time: float, event: str, **details: object) -> None:
    append_lines(run.events, {"time": time, "event": event, "attempt": 0, **details})


def _goodput_of(run: RunDir) -> Goodput:
    """Its goodput, which a glance must see as well as reading everything."""
    glanced, read = RunStatus(run), RunStatus(run)
    glanced.glance()
    read.update()
    assert glanced.goodput == read.goodput
    return read.goodput


def _life(run: RunDir, steps: range, seconds: float, stall: float = 0.0, done: int = 0) -> None:
    """A life of the trainer after `done` steps, as it logs."""
    clock = StepClock(run)
    clock.resume(done, 0.0)
    for step in steps:
        append_lines(run.metrics, {"step": step, "step_s": seconds, **clock.add(step, 0.0, seconds, stall)})


def test_the_parts_add_up_and_the_night_between_two_submissions_does_not_count(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    _event(run, 100, "submitted")
    _event(run, 105, "attempt_started")
    _life(run, range(1, 4), 2.0, stall=0.5)
    _life(run, range(2, 4), 2.5, done=1)  # done again after a failure
    _event(run, 130, "attempt_ended", **STOP)
    _event(run, 9000, "submitted")
    _event(run, 9001, "attempt_started")
    _life(run, range(4, 5), 2.0, done=3)
    _event(run, 9010, "attempt_ended", **REQUEUE)
    _event(run, 9014, "attempt_started")
    _event(run, 9020, "attempt_ended", **STOP)
    goodput = _goodput_of(run)
    assert goodput.wall_s == 30 + 20
    assert goodput.queue_s == 5 + 1 + 4
    assert goodput.lost_s == 4.0
    assert goodput.stall_s == 0.5
    assert goodput.useful_s == 1.5 + 2.5 + 2.5 + 2.0
    parts = goodput.useful_s + goodput.stall_s + goodput.lost_s + goodput.recover_s + goodput.queue_s + goodput.start_s
    assert parts == pytest.approx(goodput.wall_s)


def test_a_job_that_was_cancelled_while_it_waited_has_waited(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    _event(run, 100, "submitted")
    _event(run, 3700, "attempt_ended", verdict="preempted", decision="stop", reason="cancelled while it waited")
    _event(run, 9000, "submitted")
    _event(run, 9010, "attempt_started")
    _event(run, 9020, "attempt_ended", **STOP)
    goodput = _goodput_of(run)
    assert (goodput.wall_s, goodput.queue_s, goodput.start_s) == (3600 + 20, 3600 + 10, 10)


def test_a_job_whose_machine_died_without_a_word_ran_until_its_last_step(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for submitted, done in ((100, 0), (9000, 50)):
        _event(run, submitted, "submitted")
        _event(run, submitted, "attempt_started")
        clock = StepClock(run)
        clock.resume(done, submitted)
        for step in range(done + 1, done + 51):
            at = submitted + 2.0 * (step - done)
            append_lines(run.metrics, {"step": step, "step_s": 2.0, "time": at, **clock.add(step, at, 2.0, 0.0)})
    assert _goodput_of(run).fraction == 1.0
    assert [round(gap) for _, gap in curves(run)["gaps"]] == [0, 9000 - 200]


def test_steps_that_were_not_logged_count_and_a_life_without_a_logged_step_costs_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    _event(run, 0, "submitted")
    _life(run, range(10, 41, 10), 1.0)
    _life(run, range(0), 1.0)
    _life(run, range(30, 51, 10), 1.0, done=20)  # from the checkpoint of step 20
    _event(run, 100, "checkpoint", step=20)
    _event(run, 110, "checkpoint", step=40)
    goodput = _goodput_of(run)
    assert (goodput.useful_s, goodput.lost_s, goodput.wall_s) == (50.0, 20.0, 110)


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    assert _goodput_of(RunDir(tmp_path)).fraction == 0.0


def test_every_second_has_the_cause_that_it_truly_had(tmp_path: Path) -> None:
    """A run told second by second: the parts are what the truth says, and add up to all of it."""
    run, now = RunDir(tmp_path), 100.0
    truth = dict.fromkeys(("useful", "stall", "lost", "recover", "queue", "start"), 0.0)

    def spend(seconds: float, cause: str) -> None:
        nonlocal now
        now, truth[cause] = now + seconds, truth[cause] + seconds

    def train(first: int, last: int, lost_from: int) -> None:
        """Steps of 2 s, each of which waits half a second for a checkpoint."""
        clock = StepClock(run)
        clock.resume(first - 1, now)
        for step in range(first, last + 1):
            for seconds, cause in ((1.5, "useful"), (0.5, "stall")):
                spend(seconds, "lost" if step >= lost_from else cause)
            line = {"step": step, "step_s": 2.0, "time": now, **clock.add(step, now, 2.0, 0.5, 0.25)}
            append_lines(run.metrics, line)

    def fail(notices: float) -> None:
        failed_at = now
        spend(notices, "recover")
        _event(run, now, "round_broken", why="a rank died", step=0, committed=0, failed_at=failed_at)

    _event(run, now, "submitted")
    spend(7, "queue")
    _event(run, now, "attempt_started")
    spend(11, "start")
    train(1, 6, lost_from=5)
    spend(1.2, "lost")  # within step 7
    fail(notices=3)
    spend(5, "recover")
    fail(notices=0)  # another one, before a step was done
    spend(4, "recover")
    train(5, 9, lost_from=9)
    fail(notices=1)
    _event(run, now, "attempt_ended", **REQUEUE)
    spend(13, "queue")
    _event(run, now, "attempt_started")
    spend(6, "recover")
    train(9, 10, lost_from=11)
    spend(2, "start")  # all ranks leave on request
    _event(run, now, "attempt_ended", **REQUEUE)
    spend(8, "queue")
    _event(run, now, "attempt_started")
    spend(3, "start")
    train(11, 12, lost_from=13)
    spend(2, "start")
    _event(run, now, "attempt_ended", **STOP)
    goodput = _goodput_of(run)
    assert {cause: getattr(goodput, f"{cause}_s") for cause in truth} == pytest.approx(truth)
    assert sum(truth.values()) == pytest.approx(goodput.wall_s) == pytest.approx(now - 100)


def test_starting_and_stopping_are_told_in_parts_that_add_up(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    placed = {"nodes": [0], "hosts": ["a"], "strategy": "no_shard", "shard_group": 1, "world_size": 1}

    def start(time: float, load_s: float) -> None:
        """An attempt whose nodes take 2 s, its processes 3, and its ranks 4 + 5 + 6 s and what loading takes."""
        _event(run, time, "attempt_started")
        _event(run, time + 2, "round_started", round=0, **placed)
        begun = time + 2 + 3 + 4 + 5 + 6 + load_s
        if load_s:
            _event(run, begun - 6, "resumed", step=2, samples=8, world_size=1, seconds=load_s)
        _event(run, begun, "training_begun", imports_s=4, group_s=5, model_s=6 + load_s)
        clock, first = StepClock(run), 3 if load_s else 1
        clock.resume(first - 1, begun)
        for step in (first, first + 1):
            done_at = begun + 10 * (step - first + 1)
            append_lines(run.metrics, {"step": step, "step_s": 10, "time": done_at, **clock.add(step, done_at, 10, 0)})

    _event(run, 100, "submitted")
    start(100, load_s=0)
    _event(run, 147, "checkpoint", step=2, bytes=1, seconds=7)
    _event(run, 148, "attempt_ended", **REQUEUE)
    start(200, load_s=9)
    _event(run, 250, "round_broken", why="a rank died", step=4, committed=2)
    _event(run, 251, "attempt_ended", **REQUEUE)
    start(260, load_s=1)  # of which the recovery is another part
    _event(run, 303, "attempt_ended", **STOP)
    status = RunStatus(run)
    status.update()
    assert status.starting == (
        "nodes 4.0s, processes 6.0s, imports 8.0s, process group 10.0s, model and data 12.0s, loading 9.0s, "
        "last save 7.0s, leaving 3.0s"
    )


def test_the_failures_of_nodes_and_their_time_are_counted(tmp_path: Path) -> None:
    placed = {"strategy": "no_shard", "shard_group": 1, "world_size": 4, "hosts": ["a", "b", "c", "d"]}
    runs = [RunDir(tmp_path / name) for name in ("one", "two")]
    for run in runs:
        run.path.mkdir()
        _event(run, 0, "round_started", nodes=[0, 1, 2, 3], **placed)
        _event(run, 86_400, "round_broken", why="an error of the program", step=0, committed=0)
        _event(run, 90_000, "round_started", nodes=[0, 1], **placed)
        _event(run, 90_000 + 43_200, "round_broken", why="ECC", step=0, committed=0, blamed="a")
        _event(run, 140_000, "round_started", nodes=[0], **placed)
        _event(run, 140_000 + 43_200, "node_lost", node=0, host="a", why="it is silent")
        _event(run, 140_000 + 43_200, "round_broken", why="node 0 was lost", step=0, committed=0)
        _event(run, 190_000, "round_started", nodes=[0], **placed)
        _event(run, 190_000 + 43_200, "round_broken", why="an error of the program", step=0, committed=0)
    assert failures_of(runs) == Failures(4, 2 * (4 + 1 + 0.5 + 0.5), 2)
    assert failures_of([]) == Failures()


def test_the_time_of_a_program_without_steps_is_not_called_starting(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    placed = {"nodes": [0], "hosts": ["a"], "strategy": "no_shard", "shard_group": 1, "world_size": 1}
    _event(run, 100, "submitted")
    _event(run, 100, "attempt_started")
    _event(run, 102, "round_started", round=0, **placed)
    _event(run, 9000, "attempt_ended", **STOP)
    status = RunStatus(run)
    status.update()
    assert status.starting == "nodes 2.0s"
