"""Real trackers, on files of this machine: one entry a job whatever it lives through, and no harm without one."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from msgspec.structs import replace

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.schema import dump_config
from fsdp_jobs.node.tracker import TrackerProcess, unsent_lines
from fsdp_jobs.observe.trackers.send import Sender
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.messages import NO_ROUND
from fsdp_jobs.run.tail import read_json_lines
from fsdp_jobs.run.threads import wait_until
from fsdp_jobs.run.verdict import KILLED, judge
from tests.jobs import Job, environment, job
from tests.recorded import HOSTILE, add_line, recorded_run

FILES = {"MLFLOW_ALLOW_FILE_STORE": "true"}  # MLflow's own word for its store in plain files
FEW = ("steps=120", "checkpoint.every_steps=20", "log_every_steps=2")


def test_a_tracker_whose_files_are_of_no_use_ends_no_agent(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    tracker = TrackerProcess(compose_job(["tracking=mlflow"]), run, 0, 0)
    tracker.run = RunDir(tmp_path / "recorded" / "config.yaml")  # where no folder can be made
    tracker.begin_round(replace(NO_ROUND, rank=0))
    tracker.run = run
    tracker.begin_round(replace(NO_ROUND, rank=0))
    run.tracking.write_text("{")
    tracker.close()


def send(run: RunDir, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "fsdp_jobs.observe.trackers.send", str(run.path)]
    return subprocess.run(argv, env=environment(run.path, **env), capture_output=True, text=True, timeout=60)


def test_a_folder_from_which_nothing_can_be_sent_is_named(tmp_path: Path) -> None:
    for run in (RunDir(tmp_path / "gone"), recorded_run(tmp_path)):
        done = send(run)
        assert done.returncode == 2 and f"{run.path}: no run with" in done.stderr and "Traceback" not in done.stderr


def killed_and_recovered(tracked: Job) -> None:
    """The node with rank 0 is killed once half of the steps are done."""
    tracked.until(tracked.run.tracking.exists, "the tracker's entry")
    tracked.until_step(50)
    tracked.agent(0).kill()
    assert tracked.wait().verdict == "done"
    assert tracked.events("resumed") and not tracked.events("tracking_failed"), tracked.story()
    assert unsent_lines(tracked.run) == 0


@pytest.mark.integration
def test_mlflow_has_one_run_with_all_steps_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    where = (tmp_path / "store").as_uri()
    given = ("tracking=mlflow", f"tracking.uri={where}", "tracking.project=ours")
    with job(tmp_path, "tracked", *FEW, *given, nodes="1", nproc=1, **FILES) as tracked:
        killed_and_recovered(tracked)
    client = MlflowClient(where)
    (entry,) = client.search_runs([client.get_experiment_by_name("ours").experiment_id])
    assert entry.info.run_name == "tracked" and entry.info.status == "FINISHED"
    assert entry.data.tags["fsdp_jobs.reason"] == "done: all 120 steps are done"
    assert entry.data.params["optim.lr"] == "0.001" and "notify.command" not in entry.data.params
    newest = {m.step: m.value for m in sorted(client.get_metric_history(entry.info.run_id, "loss"), key=_when)}
    assert newest == tracked.losses()
    assert sorted(newest) == list(range(2, 121, 2))


def _when(metric: Any) -> int:
    return int(metric.timestamp)


@pytest.mark.integration
def test_wandb_has_one_run_in_two_lives(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    write_atomic(run.config, dump_config(compose_job(["name=recorded", "tracking=wandb"])))
    for step in (21, 22):
        add_line(run.metrics, {"step": step, "time": 130.0 + step, "loss": 1 / step})
        sent = send(run, WANDB_MODE="offline")
        assert sent.returncode == 0, sent.stdout + sent.stderr
    assert in_wandb(run) == {m["step"]: m["loss"] for m in read_json_lines(run.metrics)}


@pytest.mark.integration
def test_wandb_gets_again_what_a_killed_client_had_not_written(tmp_path: Path) -> None:
    """As `cancel --now` and the loss of a node kill it: W&B's client writes its file in blocks of 32 KiB."""
    run = recorded_run(tmp_path)
    write_atomic(run.config, dump_config(compose_job(["name=recorded", "tracking=wandb"])))
    argv = [sys.executable, "-m", "fsdp_jobs.observe.trackers.send", str(run.path), "--beside-agent"]
    env = environment(run.path, WANDB_MODE="offline")
    with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as sender:
        assert wait_until(run.tracking.exists, 60)
        time.sleep(2)  # the lines follow at once
        family = psutil.Process(sender.pid).children(recursive=True)
        for process in (sender, *family):
            process.kill()
    sent = send(run, WANDB_MODE="offline")
    assert sent.returncode == 0, sent.stdout + sent.stderr
    assert in_wandb(run) == {m["step"]: m["loss"] for m in read_json_lines(run.metrics)}
    assert unsent_lines(run) == 0


@pytest.mark.soak
@pytest.mark.integration
def test_wandb_has_one_run_after_a_kill(tmp_path: Path) -> None:
    with job(tmp_path, "tracked", *FEW, "tracking=wandb", nodes="1", nproc=1, WANDB_MODE="offline") as tracked:
        killed_and_recovered(tracked)
    assert in_wandb(tracked.run) == tracked.losses()


def in_wandb(run: RunDir) -> dict[int, float]:
    """Step -> loss of the one run that two senders, one after the other, have written."""
    folders = sorted((run.path / "wandb").glob("offline-run-*"))
    known = json.loads(run.tracking.read_text())["id"]
    assert len(folders) == 2 and all(f.name.endswith(f"-{known}") for f in folders)
    logged: dict[int, float] = {}
    for folder in folders:
        for record in wandb_records(folder / f"run-{known}.wandb"):
            items = {"".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            if "loss" in items:
                logged[items["step"]] = items["loss"]
    return logged


def wandb_records(file: Path) -> Iterator[Any]:
    """What is in a run's file: LevelDB's log format, of W&B's messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, rest = file.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:  # blocks are filled with zeros
            place += 32768 - place % 32768
            continue
        size, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        rest += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(rest)
            rest = b""


@pytest.mark.integration
def test_a_tracker_that_never_answers_costs_nothing_but_its_farewell(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        where = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        given = ("steps=20", "tracking=mlflow", f"tracking.uri={where}")
        with job(tmp_path, "deaf", *given, nodes="1", nproc=1) as tracked:
            assert tracked.wait().verdict == "done"
        gone = time.time()
    (ended,) = tracked.events("attempt_ended")
    assert gone - ended["time"] < 20
    assert any("20 lines were not sent" in e["why"] for e in tracked.events("tracking_failed")), tracked.story()


@pytest.mark.integration
def test_a_job_that_is_killed_is_so_in_mlflow_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = recorded_run(tmp_path)
    where = (tmp_path / "store").as_uri()
    write_atomic(run.config, dump_config(compose_job(["name=recorded", "tracking=mlflow", f"tracking.uri={where}"])))
    lines = run.events.read_text().splitlines(keepends=True)
    run.events.write_text("".join(line for line in lines if "attempt_ended" not in line))
    run.verdict(run.last_attempt()).unlink(missing_ok=True)
    assert send(run).returncode == 0  # as the agent's sender, which dies with the job
    judge(run, KILLED)
    client = MlflowClient(where)
    (entry,) = client.search_runs([client.get_experiment_by_name("fsdp_jobs").experiment_id])
    assert wait_until(lambda: client.get_run(entry.info.run_id).info.status == "KILLED", 60)


@pytest.mark.integration
def test_what_was_not_sent_is_sent_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    run = recorded_run(tmp_path)
    where = (tmp_path / "store").as_uri()
    write_atomic(run.config, dump_config(compose_job(["name=recorded", "tracking=mlflow", f"tracking.uri={where}"])))
    add_line(run.metrics, {"step": 21, "time": 130.0, "val:loss[0]": 1.0, "a//b/": 2.0, "": 3.0,
                           "val:loss(0)": 4.0, "val_loss_0_": 5.0})  # fmt: skip
    refused = send(run)  # MLflow wants its own word first
    assert refused.returncode == 1 and "MLFLOW_ALLOW_FILE_STORE" in refused.stderr
    assert unsent_lines(run) == 23
    for _ in range(2):  # the second time there is nothing left
        sent = send(run, **FILES)
        assert sent.returncode == 0, sent.stdout + sent.stderr
    assert unsent_lines(run) == 0
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(where)
    (entry,) = client.search_runs([client.get_experiment_by_name("fsdp_jobs").experiment_id])
    assert len(client.get_metric_history(entry.info.run_id, "loss")) == 22
    assert {"val_loss_0_", "a/b", "_"} <= entry.data.metrics.keys(), entry.data.metrics
    assert {1.0, 4.0, 5.0} <= {v for k, v in entry.data.metrics.items() if k.startswith("val_loss_0_")}
    assert HOSTILE not in json.dumps(entry.data.params)
    assert entry.data.tags["fsdp_jobs.run.directory"] == str(run.path)


@pytest.mark.integration
def test_a_server_that_fails_between_requests_has_one_run_with_all_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = recorded_run(tmp_path)
    where = (tmp_path / "store").as_uri()
    write_atomic(run.config, dump_config(compose_job(["name=recorded", "tracking=mlflow", f"tracking.uri={where}"])))
    with monkeypatch.context() as failing:
        failing.setattr(MlflowClient, "log_batch", mock.Mock(side_effect=OSError("the server is away")))
        sender = Sender(run, 0)
        assert not sender.flush() and not sender.flush()
    assert Sender(run, 0).flush()  # of a sender that was killed
    client = MlflowClient(where)
    (entry,) = client.search_runs([client.get_experiment_by_name("fsdp_jobs").experiment_id])
    assert entry.data.params["optim.lr"] == "0.001" and "loss" in entry.data.metrics
