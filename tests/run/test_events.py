"""Events keep their format on disk, whatever wrote them, and say what happened."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.tail import Tail, read_json_lines
from fsdp_jobs.run.threads import start_thread

KINDS = (
    *("submitted", "attempt_started", "round_started", "adopted", "round_broken", "node_lost", "stalled"),
    *("machine_excluded", "process_restarted", "given_up", "taken_away", "node_asked_for", "resumed", "checkpoint"),
    *(
        "checkpoint_on_nodes",
        "checkpoint_failed",
        "checkpoint_skipped",
        "snapshots_begun",
        "loss_spike",
        "stop_requested",
        "waiting",
        "done",
        "code_changed",
        "training_begun",
    ),
    *("attempt_ended", "notify_failed", "tracking_failed", "slow_node", "slow_steps", "corruption", "continued"),
)


def test_the_names_on_disk_are_these() -> None:
    assert sorted(events.Event.KINDS) == sorted(KINDS)


def test_an_event_is_read_as_it_was_recorded(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    events.record(run, 2, events.RoundBroken("rank 1 failed", step=12, committed=10, round=3))
    line = json.loads(run.events.read_text())
    expected = {"event": "round_broken", "attempt": 2, "round": 3, "why": "rank 1 failed", "step": 12, "committed": 10}
    assert line.pop("time") > 0 and line == expected
    (event,) = events.read_events(run)
    assert isinstance(event, events.RoundBroken) and (event.attempt, event.round) == (2, 3)
    assert event.sentence() == "rank 1 failed; at step 12, newest checkpoint 10"


def test_unknown_kinds_and_fields_are_no_obstacle(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    events.append_lines(run.events, {"time": 1.0, "event": "from_the_future", "attempt": 4, "what": "?"})
    events.append_lines(run.events, {"time": 2.0, "event": "stop_requested", "attempt": 4, "why": "SIGTERM", "by": "?"})
    unknown, stop = events.read_events(run)
    assert type(unknown) is events.Event and unknown.attempt == 4 and unknown.sentence() is None
    assert stop.sentence() == "asked to save and stop: SIGTERM"


def test_a_line_that_was_cut_costs_no_other(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.events.write_bytes('{"time": 1.0, "event": "stop_requested", "attempt": 0, "why": "Größ'.encode()[:-1])
    for why in ("SIGTERM", "SIGINT"):
        events.record(run, 0, events.StopRequested(why))
    assert [event.sentence() for event in events.read_events(run)] == [
        "asked to save and stop: SIGTERM",
        "asked to save and stop: SIGINT",
    ]


def test_a_full_disk_costs_a_record_and_not_the_job(caplog: pytest.LogCaptureFixture) -> None:
    events.append_lines(Path("/dev/full"), {"step": 1})
    assert "OSError" in caplog.text and "/dev/full" in caplog.text


def test_a_tail_goes_on_where_it_was_left(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    assert list(tail.lines()) == []
    tail.path.write_text("one\ntwo\nthr")
    lines = tail.lines()
    assert next(lines) == b"one"
    lines.close()
    assert list(tail.lines()) == [b"two"] and tail.unfinished() == b"thr"
    with tail.path.open("a") as f:
        f.write("ee\n")
    before = tail.offset
    assert list(tail.lines()) == [b"three"] and list(tail.lines()) == []
    tail.offset = before  # whoever could not use the lines reads them again
    assert list(tail.lines()) == [b"three"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python's, of forks beside threads
def test_a_process_that_is_forked_while_a_line_is_written_does_not_keep_the_file_locked(tmp_path: Path) -> None:
    """A DataLoader's workers are: rank 0 and the coordinator then waited for their end to write a line."""
    file, is_locked, has_forked = tmp_path / "lines.jsonl", threading.Event(), threading.Event()

    def is_due() -> bool:
        is_locked.set()
        return has_forked.wait(10)

    first = start_thread(partial(events.append_lines, file, {"step": 1}, is_due=is_due), "first")
    assert is_locked.wait(10)
    if not (worker := os.fork()):
        time.sleep(60)
        os._exit(0)
    try:
        has_forked.set()
        first.join(10)
        start_thread(partial(events.append_lines, file, {"step": 2}), "second").join(5)
        assert [line["step"] for line in read_json_lines(file)] == [1, 2]
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
