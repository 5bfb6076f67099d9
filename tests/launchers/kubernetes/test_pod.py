"""Publishing through pods' logs and mirroring it."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_jobs.launchers.kubernetes import mirror, pod
from fsdp_jobs.launchers.kubernetes.labels import pods_write_here
from fsdp_jobs.launchers.kubernetes.pod import CoordinatorsPublisher, Publisher, seed
from fsdp_jobs.run.directory import RunDir, rank_logs
from fsdp_jobs.run.events import append_lines
from fsdp_jobs.run.files import read_json, try_lock, write_atomic, write_json
from fsdp_jobs.run.identity import Identity
from fsdp_jobs.run.record import JsonObject
from fsdp_jobs.run.tail import Tail, read_json_lines
from fsdp_jobs.run.verdict import EXIT_DONE, EXIT_FAILED, Verdict
from tests.nfs import nfs_client


class Logs:
    """In the API's place: logs of pods."""

    def __init__(self) -> None:
        self.lines: dict[str, list[str]] = {}

    def log(self, name: str, _container: str, _since_s: int | None) -> Iterator[str]:
        yield from self.lines[name]

    def time(self) -> float:
        return 0.0

    def pod(self, name: str, state: str = "running") -> dict[str, object]:
        statuses = [{"name": "coordinator", "state": {state: {}}}]
        labels = {"fsdp-jobs/role": "coordinator"}
        return {"metadata": {"name": name, "uid": name, "labels": labels}, "status": {"containerStatuses": statuses}}


def test_what_pods_publish_is_mirrored_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = RunDir(tmp_path / "there"), RunDir(tmp_path / "here")
    there.node(1, 0).mkdir(parents=True)
    here.submit.mkdir(parents=True)
    for step in range(1, 4):
        append_lines(there.metrics, {"step": step, "word": "Größe"})
    append_lines(there.events, {"event": "submitted"})  # each side has its own
    append_lines(there.events, {"event": "round_started"})
    there.rank_log(1, 0, 3).write_text("a line\n\n@odd: one\n")
    shutil.copytree(there.attempt(1), there.path / "attempts" / "1.bak")  # a user's copy
    (there.path / "samples.jsonl").write_text('{"text": "of a program"}\n')
    Verdict("done", "stop", "all steps are done").write(there, 1)
    monkeypatch.setattr(pod, "POD_INFO", str(tmp_path))
    (tmp_path / "annotations").touch()
    with CoordinatorsPublisher(there), Publisher(there, ["attempts/*/node-0/rank-*.log"]):
        pass
    published = capfd.readouterr().out.splitlines(keepends=True)
    assert not [line for line in published if "samples" in line or "1.bak" in line], "nobody copies that"

    logs = Logs()
    strange = ["@../../etc/passwd:1 x\n", "@submit/token:1 x\n", "Traceback (most recent call last):\n"]
    strange.append('@events.jsonl:1 {"event": "round2026-11-23 WARNING link: in the middle of a long line\n')
    logs.lines["first"] = [*strange, *published[: len(published) // 2]]
    logs.lines["second"] = published  # the next pod publishes everything again
    mirror.pull(here, logs, [logs.pod("first")])  # type: ignore[arg-type]
    mirror.pull(here, logs, [logs.pod("first", "terminated"), logs.pod("second", "terminated")])  # type: ignore[arg-type]
    assert here.metrics.read_bytes() == there.metrics.read_bytes()
    assert here.rank_log(1, 0, 3).read_bytes() == there.rank_log(1, 0, 3).read_bytes()
    assert [e["event"] for e in read_json_lines(here.events)] == ["round_started"]
    assert Verdict.read(here, 1) == Verdict.read(there, 1)
    known = {"metrics.jsonl", "events.jsonl", "attempts", "submit"}
    assert {f.name for f in here.path.iterdir()} == known and not (tmp_path / "etc").exists()
    logs.lines.clear()
    mirror.pull(here, logs, [logs.pod("first", "terminated"), logs.pod("second", "terminated")])  # type: ignore[arg-type]


def test_of_lines_that_the_kubelet_has_dropped_the_rest_is_mirrored(tmp_path: Path) -> None:
    here, logs = RunDir(tmp_path), Logs()
    here.submit.mkdir()
    lines = [f'@metrics.jsonl:{12 * step} {{"step": {step}}}\n' for step in range(1, 6)]
    for kept in (lines[:2], lines[3:], lines):  # the last: a new coordinator publishes everything again
        logs.lines["pod"] = kept
        mirror.pull(here, logs, [logs.pod("pod")])  # type: ignore[arg-type]
    assert [m["step"] for m in read_json_lines(here.metrics)] == [1, 2, 4, 5]


def test_commands_that_mirror_at_once_are_killed_or_cut_off_copy_no_line_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, logs = RunDir(tmp_path), Logs()
    here.submit.mkdir()
    lines = [f'@metrics.jsonl:{12 * step} {{"step": {step}}}\n' for step in range(1, 6)]
    logs.lines = {"first": lines[:2], "second": [*lines[:3], lines[3][:-5]]}
    with (here.submit / "mirror.lock").open("a") as held:
        assert try_lock(held)
        mirror.pull(here, logs, [logs.pod("first")])  # type: ignore[arg-type]
    assert not here.metrics.exists(), "the other command copies"
    monkeypatch.setattr(mirror, "_AT_ONCE", 1)
    with pytest.raises(KeyError):  # as a signal would end it, between two pods
        mirror.pull(here, logs, [logs.pod("first"), logs.pod("killed")])  # type: ignore[arg-type]
    mirror.pull(here, logs, [logs.pod("first"), logs.pod("second")])  # type: ignore[arg-type]
    logs.lines["second"] = lines
    mirror.pull(here, logs, [logs.pod("second")])  # type: ignore[arg-type]
    assert [m["step"] for m in read_json_lines(here.metrics)] == [1, 2, 3, 4, 5]


def test_how_far_the_logs_of_many_pods_are_copied_is_written_whole_only_at_both_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a thousand pods with nine files each it is half a megabyte: after each pod that took half a minute."""
    here, logs, written = RunDir(tmp_path), Logs(), list[Path]()
    here.submit.mkdir()
    logs.lines = {f"{n}": [f"@attempts/0/node-{n}/rank-{n}.log:2 x\n"] for n in range(20)}

    def noted(file: Path, values: JsonObject) -> None:
        written.append(file)
        write_json(file, values)

    monkeypatch.setattr(mirror, "write_json", noted)
    here.mirrored.with_suffix(".jsonl").write_text('{"offsets": {"attempts/0/node-7/rank-7.log": 2}}\n{"offs')
    mirror.pull(here, logs, [logs.pod(name) for name in logs.lines])  # type: ignore[arg-type]
    assert written == [here.mirrored] * 2
    copied = {int(file.stem.removeprefix("rank-")) for file in here.path.glob(rank_logs())}
    assert copied == {*range(20)} - {7}, "a command that was killed had copied that one"
    assert not here.mirrored.with_suffix(".jsonl").exists()
    assert len(read_json(here.mirrored)["offsets"]) == 20


def test_a_claim_that_is_away_for_a_while_ends_no_publishing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, away = RunDir(tmp_path), [True]

    def sick(self: Tail, until: float = 1e18) -> Iterator[bytes]:
        if away:
            away.clear()
            raise OSError(5, "Input/output error")
        yield from whole(self, until)

    whole = Tail.lines
    monkeypatch.setattr(Tail, "lines", sick)
    append_lines(run.metrics, {"step": 1})
    with Publisher(run, ["*.jsonl"]) as publisher:
        publisher.join(2 * pod._POLL_S)
    assert '@metrics.jsonl:12 {"step": 1}' in capfd.readouterr().out and not away


def test_files_are_brought_once_and_those_of_an_earlier_submission_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, mounts = RunDir(tmp_path / "runs" / "x"), tmp_path / "mounts"
    monkeypatch.setattr(pod, "JOB_FILES", str(mounts))
    monkeypatch.setattr(pod, "TOKEN_FILES", str(mounts))
    write_atomic(run.shape, "of another model")
    write_atomic(run.stop_request, "cancelled")
    write_atomic(run.attempt(4) / "coordinator.log", "")
    job = json.dumps({"handle": "of the one before", "first_attempt": 2, "submission": "s", "pending": "x"})
    for name, text in (("config.yaml", "steps: 1"), ("plan.json", "{}"), ("job.json", job), ("token", "secret")):
        write_atomic(mounts / name, text)
    seed(run)
    write_atomic(run.written_by, "x-1")
    assert (run.config.read_text(), run.token.read_text()) == ("steps: 1", "secret")
    assert run.token.stat().st_mode & 0o777 == 0o600
    assert not run.shape.exists() and not run.stop_request.exists()
    assert (pods_write_here(run, "x-1"), pods_write_here(run, "x-2")) == (True, False)
    assert run.read_job() == {
        "first_attempt": 5,
        "submission": "s",
    }  # the claim has more attempts than the submit machine knows
    assert [json.loads(line)["event"] for line in run.events.read_text().splitlines()] == ["submitted"]
    write_atomic(mounts / "config.yaml", "steps: 2")
    seed(run)  # the token is the same: submission itself has written here, or this pod's predecessor
    assert run.config.read_text() == "steps: 1" and run.first_attempt() == 5


def test_a_run_of_another_user_on_the_same_claim_is_refused_and_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, mounts, word = RunDir(tmp_path / "runs" / "x"), tmp_path / "mounts", tmp_path / "word"
    for name, value in (("JOB_FILES", mounts), ("TOKEN_FILES", mounts), ("TERMINATION_LOG", word)):
        monkeypatch.setattr(pod, name, str(value))
    for name, text in (("config.yaml", "steps: 1"), ("job.json", "{}"), ("token", "ada's")):
        write_atomic(mounts / name, text)
    ada = Identity("1", "ada", 1001, "login", "/home/ada/runs/x", "same")
    write_atomic(mounts / run.identity.name, ada.to_json())
    seed(run)
    before = {f: f.read_bytes() for f in run.path.rglob("*") if f.is_file()}

    write_atomic(mounts / run.identity.name, replace(ada, id="2", user="bob", uid=1002).to_json())
    write_atomic(mounts / "token", "bob's")
    assert pod.coordinate(run, "bobs-app", []) == EXIT_FAILED
    said = json.loads(word.read_text())
    assert said["decision"] == "stop" and "ada on login (/home/ada/runs/x)" in said["reason"], said
    assert {f: f.read_bytes() for f in run.path.rglob("*") if f.is_file()} == before

    write_atomic(mounts / run.identity.name, ada.to_json())
    write_atomic(mounts / "token", "ada's second")
    seed(run)
    assert run.token.read_text() == "ada's second"


def test_attempts_go_on_from_those_that_only_the_submit_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, mounts = RunDir(tmp_path / "runs" / "x"), tmp_path / "mounts"
    monkeypatch.setattr(pod, "JOB_FILES", str(mounts))
    monkeypatch.setattr(pod, "TOKEN_FILES", str(mounts))
    for name, text in (("config.yaml", "steps: 1"), ("job.json", '{"first_attempt": 3}'), ("token", "secret")):
        write_atomic(mounts / name, text)
    seed(run)  # onto a claim that was emptied
    assert run.first_attempt() == 3


def test_a_claim_that_fails_for_a_moment_ends_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its coordinator's pod ended with 1, which fails the job, and is tried no second time."""
    run, mounts, word = RunDir(tmp_path / "runs" / "x"), tmp_path / "mounts", tmp_path / "word"
    for name, value in (
        ("JOB_FILES", mounts),
        ("TOKEN_FILES", mounts),
        ("POD_INFO", mounts),
        ("TERMINATION_LOG", word),
    ):
        monkeypatch.setattr(pod, name, str(value))
    for name, text in (("config.yaml", "steps: 1"), ("job.json", "{}"), ("token", "secret"), ("annotations", "")):
        write_atomic(mounts / name, text)

    def sick_at_first(works: Callable[..., Any]) -> Callable[..., Any]:
        failures = [OSError(116, "Stale file handle")]

        def sick(*args: Any, **more: Any) -> Any:
            if failures:
                raise failures.pop()
            return works(*args, **more)

        return sick

    def attempts(*_: str) -> int:
        Verdict("done", "stop", "all steps are done").write(run, 0)
        return EXIT_DONE

    monkeypatch.setattr(pod.attempts, "main", attempts)
    for name in ("pods_write_here", "write_atomic", "seed"):
        monkeypatch.setattr(pod, name, sick_at_first(getattr(pod, name)))
    monkeypatch.setattr(Verdict, "read", sick_at_first(Verdict.read))
    monkeypatch.setattr(Path, "exists", sick_at_first(Path.exists))
    assert pod.coordinate(run, "app", []) == EXIT_DONE
    assert json.loads(word.read_text())["verdict"] == "done" and run.written_by.read_text() == "app"


def test_nodes_end_when_their_job_was_refused_before_its_files_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, mounts, word = RunDir(tmp_path / "runs" / "x"), tmp_path / "mounts", tmp_path / "word"
    for name, value in (("JOB_FILES", mounts), ("TOKEN_FILES", mounts), ("TERMINATION_LOG", word)):
        monkeypatch.setattr(pod, name, str(value))
    monkeypatch.setattr("fsdp_jobs.launchers.supervisor.MOMENT_S", 0.0)
    run.path.mkdir(parents=True)  # and nothing is mounted: the coordinator's pod dies of it
    node = threading.Thread(target=lambda: codes.append(pod.follow(run, "bobs-app", ["--node", "0"])))
    codes: list[int] = []
    node.start()
    with pytest.raises(FileNotFoundError):
        pod.coordinate(run, "bobs-app", [])
    node.join(20)
    assert codes == [EXIT_DONE], "with another code Kubernetes makes another pod, which waits as well"


def test_nodes_do_not_wait_for_ever_and_a_coordinator_that_comes_too_late_waits_for_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes makes no new pods for those that ended with 0, and nodes are waited for up to a week."""
    run, word = RunDir(tmp_path / "x"), tmp_path / "word"
    monkeypatch.setattr(pod, "TERMINATION_LOG", str(word))
    monkeypatch.setattr(pod, "_FILES_S", 0.0)
    assert pod.follow(run, "app", ["--node", "0"]) == EXIT_DONE
    assert pod.coordinate(run, "app", []) == EXIT_FAILED
    assert "nodes' pods have left" in json.loads(word.read_text())["reason"] and not run.path.exists()


def test_a_nodes_pod_sees_at_once_that_the_jobs_files_have_come_simulated_nfs(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with nfs_client():
        assert not pods_write_here(run, "app-1")
        subprocess.run(["sh", "-c", 'mkdir -p "${0%/*}"; printf app-1 > "$0"', run.written_by], check=True)
        assert pods_write_here(run, "app-1")
