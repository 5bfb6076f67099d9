"""The two ends of the talk through pods' logs, and the place that two pods must not hold at once."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_jobs.launchers.kubernetes import pod
from fsdp_jobs.launchers.kubernetes.labels import begin, first_attempt
from fsdp_jobs.launchers.kubernetes.mirror import Mirror
from fsdp_jobs.launchers.kubernetes.pod import Place, Teller, seed
from fsdp_jobs.run.directory import RunDir, write_atomic
from fsdp_jobs.run.events import append_line
from fsdp_jobs.run.tail import read_json_lines
from fsdp_jobs.run.verdict import Verdict


class Logs:
    """In the API's place: pods that have said something."""

    def __init__(self) -> None:
        self.said: dict[str, list[str]] = {}

    def log(self, name: str, _container: str, **_options: int) -> Iterator[str]:
        yield from self.said[name]

    def pod(self, name: str, state: str = "running") -> dict[str, object]:
        statuses = [{"name": "coordinator", "state": {state: {}}}]
        labels = {"fsdp-jobs/role": "coordinator"}
        return {"metadata": {"name": name, "uid": name, "labels": labels}, "status": {"containerStatuses": statuses}}


def test_what_pods_tell_is_the_same_here_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    there, here = RunDir(tmp_path / "there"), RunDir(tmp_path / "here")
    there.node(1, 0).mkdir(parents=True)
    for step in range(1, 4):
        append_line(there.metrics, {"step": step, "word": "Größe"})
    append_line(there.events, {"event": "submitted"})  # each side has its own
    append_line(there.events, {"event": "round_started"})
    there.rank_log(1, 0, 3).write_text("a line\n\n@odd: one\n")
    Verdict("done", "stop", "all steps are done").write(there, 1)
    with Teller(there) as teller:
        teller.files("*.jsonl")
        teller.files("attempts/*/node-0/rank-*.log")
        teller.repeat(teller.tell_whole_files)
    said = capfd.readouterr().out.splitlines()

    logs = Logs()
    strange = ["@../../etc/passwd:1 x", "@submit/token:1 x", "Traceback (most recent call last):"]
    logs.said["first"] = [*said[: len(said) // 2], *strange]
    logs.said["second"] = said  # the next pod tells everything again
    Mirror(here).pull(logs, [logs.pod("first")])  # type: ignore[arg-type]
    Mirror(here).pull(logs, [logs.pod("first", "terminated"), logs.pod("second", "terminated")])  # type: ignore[arg-type]
    assert here.metrics.read_bytes() == there.metrics.read_bytes()
    assert here.rank_log(1, 0, 3).read_bytes() == there.rank_log(1, 0, 3).read_bytes()
    assert [e["event"] for e in read_json_lines(here.events)] == ["round_started"]
    assert Verdict.read(here, 1) == Verdict.read(there, 1)
    known = {"metrics.jsonl", "events.jsonl", "attempts", "submit"}
    assert {f.name for f in here.path.iterdir()} == known and not (tmp_path / "etc").exists()
    logs.said.clear()
    Mirror(here).pull(logs, [logs.pod("first", "terminated"), logs.pod("second", "terminated")])  # type: ignore[arg-type]


def test_a_pod_takes_a_place_when_the_one_before_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_BEAT_S", 0.2), ("_POLL_S", 0.1), ("_GONE_S", 2.0)):
        monkeypatch.setattr(pod, name, seconds)
    file = tmp_path / "node-0"
    taken = threading.Event()

    def successor() -> None:
        with Place(file):
            taken.set()

    with Place(file):
        time.sleep(0.5)
        thread = threading.Thread(target=successor)
        thread.start()
        assert not taken.wait(4)  # longer than silence would take
    assert taken.wait(30)  # it said goodbye
    thread.join()
    assert not file.exists()
    file.write_text("a pod that was killed")
    began = time.monotonic()
    with Place(file):
        assert time.monotonic() - began >= 1.9


def test_files_are_brought_once_and_those_of_an_earlier_submission_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, mounts = RunDir(tmp_path / "runs" / "x"), tmp_path / "mounts"
    monkeypatch.setattr(pod, "JOB_FILES", str(mounts))
    monkeypatch.setattr(pod, "TOKEN_FILES", str(mounts))
    write_atomic(run.shape, "of another model")
    write_atomic(run.stop_request, "cancelled")
    write_atomic(run.attempt(4) / "coordinator.log", "")
    for name, text in (("config.yaml", "steps: 1"), ("plan.json", "{}"), ("token", "secret")):
        write_atomic(mounts / name, text)
    seed(run)
    begin(run, "x-1")
    assert (run.config.read_text(), run.token.read_text()) == ("steps: 1", "secret")
    assert run.token.stat().st_mode & 0o777 == 0o600
    assert not run.shape.exists() and not run.stop_request.exists()
    assert (first_attempt(run, "x-1"), first_attempt(run, "x-2")) == (5, None)
    assert [json.loads(line)["event"] for line in run.events.read_text().splitlines()] == ["submitted"]
    write_atomic(mounts / "config.yaml", "steps: 2")
    seed(run)  # the token is the same: submission itself has written here, or this pod's predecessor
    assert run.config.read_text() == "steps: 1"
