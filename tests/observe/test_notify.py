"""Somebody is told that an attempt has ended: once, by a real command and a real server, or it is said that they were
not."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from fsdp_jobs.launchers.supervisor import Attempt
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.tail import read_json_lines
from fsdp_jobs.run.verdict import Verdict, notify
from tests.jobs import cli, job

DONE = Verdict("done", "stop", "all 4 steps are done")
AGAIN = Verdict("infrastructure", "requeue", "lost a node")


@contextmanager
def server(status: int = 200, delay_s: float = 0.0) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A chat's webhook: its URL, and what was posted to it."""
    posted: list[dict[str, Any]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            time.sleep(delay_s)
            self.send_response(status)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    listening.daemon_threads = True
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}/services/very-secret", posted
    finally:
        listening.shutdown()


def run_with(folder: Path, **settings: object) -> RunDir:
    run = RunDir(folder / "told")
    known = {"command": None, "webhook": None, "on": ["done", "preempted", "infrastructure", "stalled", "user_error"]}
    write_atomic(run.config, json.dumps({"notify": {**known, **settings}}))
    run.attempt(0).mkdir(parents=True)
    return run


@contextmanager
def notified() -> Iterator[None]:
    """Wait for the notifications that begin in it, as an interpreter does that ends."""
    before = set(psutil.Process().children())
    yield
    notifying = set(psutil.Process().children()) - before  # by id: a process that has just begun shows no command
    assert not psutil.wait_procs(notifying, timeout=15)[1]


def close(run: RunDir, verdict: Verdict) -> list[dict[str, Any]]:
    """End the attempt; returns the notifications that failed."""
    with notified():
        verdict.close(run, 0)
    return [e for e in read_json_lines(run.events) if e["event"] == "notify_failed"]


def test_a_verdict_stands_where_no_process_can_be_started(tmp_path: Path) -> None:
    run = run_with(tmp_path, command="true")
    with mock.patch("sys.executable", str(tmp_path / "gone")):
        (failed,) = close(run, DONE)
    assert failed["way"] == "command" and "it cannot be started: " in failed["why"]
    assert run.verdict(0).exists()


def test_whoever_judges_again_is_not_heard_twice(tmp_path: Path) -> None:
    run = run_with(tmp_path, command=f"echo $FSDP_JOBS_VERDICT >> {tmp_path}/told.txt")
    for verdict in (AGAIN, DONE, DONE):
        assert not close(run, verdict)
    assert (tmp_path / "told.txt").read_text() == "done\n"


@pytest.mark.parametrize("is_recorded", [False, True])
def test_what_a_killed_coordinator_has_not_told_is_told_in_its_place(tmp_path: Path, is_recorded: bool) -> None:
    run = run_with(tmp_path, command=f"echo $FSDP_JOBS_VERDICT >> {tmp_path}/told.txt")
    DONE.write(run, 0)
    if is_recorded:
        events.record(run, 0, events.AttemptEnded(DONE.verdict, DONE.decision, DONE.reason, step=4))
    attempt = Attempt(run, 0)
    attempt.start("coordinator", ["false"], os.environ)
    for _ in range(2):
        with notified():
            attempt.finish(10)
    assert (tmp_path / "told.txt").read_text() == "done\n"
    (ended,) = events.read_events(run)
    assert isinstance(ended, events.AttemptEnded) and ended.reason == DONE.reason


def test_each_finding_of_a_corruption_is_told(tmp_path: Path) -> None:
    """The first may be that two nodes differ, and the second which of them is wrong."""
    run = run_with(tmp_path, command=f"echo $FSDP_JOBS_REASON >> {tmp_path}/told.txt", on=["corruption"])
    for why in ("two nodes differ", "node 1 was wrong"):
        with notified():
            notify(run, 0, "corruption", why)
    assert (tmp_path / "told.txt").read_text() == "two nodes differ\nnode 1 was wrong\n"


def test_a_requeue_is_told_when_it_was_asked_for(tmp_path: Path) -> None:
    run = run_with(tmp_path, command=f"echo $FSDP_JOBS_DECISION >> {tmp_path}/told.txt", on=["requeue"])
    for verdict in (AGAIN, DONE):
        assert not close(run, verdict)
    assert (tmp_path / "told.txt").read_text() == "requeue\n"


def test_what_does_not_work_is_said_without_the_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (url, expected) in enumerate(
        (
            ("http://127.0.0.1:9/services/very-secret", "does not answer"),
            ("chat.example/very-secret", "HOOK holds no address that begins with https:// or http://"),
            ("", "HOOK is not in the environment"),
        )
    ):
        run = run_with(tmp_path / str(number), command="exit 3", webhook="env:HOOK")
        monkeypatch.setenv("HOOK", url)
        failed = {e["way"]: e["why"] for e in close(run, DONE)}
        assert failed["command"] == "ended with 3"
        assert expected in failed["webhook"] and "secret" not in failed["webhook"]


@pytest.mark.integration
def test_the_end_of_a_job_is_told_and_what_hangs_does_not_keep_it(tmp_path: Path) -> None:
    few = ("steps=4", f"notify.command='env | grep FSDP_JOBS_ >> {tmp_path}/told.txt; sleep 100'")
    with server(delay_s=100) as (url, posted):
        with job(tmp_path, "told", *few, "notify.webhook=env:HOOK", nodes="1", nproc=1, HOOK=url) as told:
            assert told.wait().verdict == "done"
        (message,) = posted
        assert message["handle"].startswith("local_fsdp://") and message["attempt"] == 0
        assert message["text"] == "told: done, stop: all 4 steps are done (attempt 0)"
        assert all(word in (tmp_path / "told.txt").read_text() for word in ("RUN=told", "VERDICT=done", "ATTEMPT=0"))
        (ended,) = told.events("attempt_ended")
        failed = {e["way"]: e for e in told.events("notify_failed")}
        assert set(failed) == {"command", "webhook"}
        assert all(e["time"] - ended["time"] < 12 for e in failed.values())
        files = [f for f in told.run.path.rglob("*") if f.is_file() and f.stat().st_size < 1_000_000]
        assert not [f for f in files if b"very-secret" in f.read_bytes()]


@pytest.mark.integration
def test_a_job_that_fails_tells_why(tmp_path: Path) -> None:
    few = ("steps=4", "elastic.stop_on_nan_loss=true", "optim.lr=1e38", "notify.webhook=env:HOOK")
    with server() as (url, posted):
        with job(tmp_path, "bad", *few, nodes="1", nproc=1, HOOK=url) as bad:
            verdict = bad.wait()
        (message,) = posted
        assert message["verdict"] == verdict.verdict == "user_error"
        assert message["reason"] == verdict.reason
        assert not bad.events("notify_failed")


def test_settings_that_cannot_be_are_refused_before_anything_starts(tmp_path: Path) -> None:
    done = cli(tmp_path, "notify.webhook=https://chat/very-secret", "notify.on=[don]")
    assert done.returncode == 2
    assert "did you mean done" in done.stderr and "env:CHAT_URL" in done.stderr and "very-secret" not in done.stderr


def test_a_webhook_that_has_moved_is_said_to_have_had_no_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server(status=301) as (url, posted):
        monkeypatch.setenv("HOOK", url)
        (failed,) = close(run_with(tmp_path, webhook="env:HOOK"), DONE)
    assert len(posted) == 1 and failed["why"] == "the server answered 301 Moved Permanently"
