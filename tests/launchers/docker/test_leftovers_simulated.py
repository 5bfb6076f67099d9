"""What is left of a job in Docker, and who removes it: the daemon is simulated, its containers are only described."""

from __future__ import annotations

import errno
import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from docker.errors import APIError
from requests import Response

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.schema import dump_config
from fsdp_jobs.launchers.detached import DetachedLauncher
from fsdp_jobs.launchers.docker import containers, supervisor
from fsdp_jobs.launchers.docker.scheduler import DockerLauncher
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.events import Waiting, newest_of
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.status import RunStatus
from tests.recorded import recorded_run


class Daemon:
    """In the place of a Docker client."""

    def __init__(self, **running: bool):
        self.running = {name.replace("_", "-"): state for name, state in running.items()}
        self.removed: list[str] = []
        self.exit_code, self.disk_is_full = 75, False
        self.are_going = False  # another command removes them, and has not done so yet

    def containers(self, **_: Any) -> list[dict[str, Any]]:
        return [{"Id": name} for name in self.running]

    def inspect_container(self, name: str) -> dict[str, Any]:
        state = {"Pid": int(self.running[name]), "ExitCode": self.exit_code}
        return {"Id": name, "State": state, "Config": {"Hostname": name}}

    def start(self, name: str) -> None:
        if self.disk_is_full:
            raise APIError("500 Server Error", Response(), "write .tmp-hostconfig.json: no space left on device")
        self.running[name] = True

    def kill(self, name: str) -> None:
        if not self.running[name]:
            raise APIError("409 Client Error: container is not running", Response())
        self.running[name] = False

    def logs(self, name: str, **_: Any) -> bytes:
        return b"ERROR coordinator cannot work here\nPermissionError: [Errno 13] Permission denied: '/runs/left'\n"

    def remove_container(self, name: str, **_: Any) -> None:
        if name not in self.removed and self.are_going:
            self.removed.append(name)
            response = Response()
            response.status_code = 409  # as seen: "removal of container ... is already in progress"
            raise APIError("409 Client Error", response)
        assert not self.running[name], "Podman first gives it `elastic.stop_grace_s` to stop"
        del self.running[name]
        self.removed.append(name)

    def networks(self, **_: Any) -> list[dict[str, Any]]:
        return []


def docker_run(folder: Path, *overrides: str) -> RunDir:
    run = recorded_run(folder, "left")
    write_atomic(run.config, dump_config(compose_job(["cluster=docker", "name=left", "nodes=2", *overrides])))
    write_atomic(run.job, json.dumps({**run.read_job(), "submission": "1"}))
    return run


def running(folder: Path) -> RunDir:
    """A run whose last event, its end, has not come."""
    run = docker_run(folder)
    run.events.write_text("".join(run.events.read_text().splitlines(keepends=True)[:-1]))
    return run


def test_a_container_that_somebody_removed_is_named_once_its_loss_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_MISSED_S", 0.2)
    run = running(tmp_path)
    watching = supervisor.Supervisor(run)
    for _ in range(6):
        assert not watching.poll(Daemon(coordinator=True, node_0=True))
        time.sleep(0.1)
    status = RunStatus(run)
    status.update()
    assert len(list(newest_of(run, Waiting))) == 1
    assert "the container of node-1 was removed" in status.reason


def test_a_container_that_cannot_be_restarted_is_named_until_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As seen with a full data-root: the others train on, or wait."""
    monkeypatch.setattr(supervisor, "_MISSED_S", 0.2)
    run = running(tmp_path)
    watching, daemon = supervisor.Supervisor(run), Daemon(coordinator=False, node_0=False, node_1=True)
    status = RunStatus(run)
    status.update()
    before = len(list(newest_of(run, Waiting)))
    daemon.exit_code, daemon.disk_is_full = 137, True
    for _ in range(6):
        assert not watching.poll(daemon)
        time.sleep(0.1)
    status.update()
    assert len(list(newest_of(run, Waiting))) == before + 2
    assert "Docker cannot restart the container of node-0" in status.reason and "no space left" in status.reason
    daemon.disk_is_full = False
    watching.poll(daemon)
    status.update()
    assert not status.reason and all(daemon.running.values())


def test_a_supervisor_outlives_errors_of_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody restarts containers that die, or removes them at the end."""
    daemon, run = Daemon(coordinator=False, node_0=False), docker_run(tmp_path)
    answers = iter([OSError(errno.ESTALE, "Stale file handle"), OSError(errno.EIO, "Input/output error")])

    def last_attempt(of: RunDir) -> int:
        for error in answers:
            raise error
        return known(of)

    known = RunDir.last_attempt
    monkeypatch.setattr(RunDir, "last_attempt", last_attempt)
    monkeypatch.setattr(supervisor, "connected", lambda: nullcontext(daemon))
    monkeypatch.setattr(supervisor, "_RETRY_S", 0.01)
    supervisor.supervise(run)
    assert not daemon.running


@pytest.mark.parametrize(("app_id", "keep", "left"), [("left-1", False, 0), ("left-1", True, 2), ("left-0", False, 2)])
def test_a_cancel_of_what_has_ended_removes_what_no_supervisor_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, app_id: str, keep: bool, left: int
) -> None:
    daemon = Daemon(coordinator=False, node_0=False)
    monkeypatch.setattr(containers, "connected", lambda: nullcontext(daemon))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run, launcher = docker_run(tmp_path, f"cluster.keep={keep}"), DockerLauncher()
    launcher.remember(app_id, run)
    assert launcher.end(app_id) is None, "it had ended"
    assert len(daemon.running) == left, "of its own submission, unless the user keeps them"


def test_a_cancel_that_asks_another_docker_than_the_jobs_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the supervisor and reported the job as killed, whose containers trained on."""
    ended: list[RunDir] = []
    monkeypatch.setattr(containers, "connected", lambda: nullcontext(Daemon()))
    monkeypatch.setattr(DetachedLauncher, "is_alive", lambda _, run: True)
    monkeypatch.setattr(DetachedLauncher, "kill", lambda _, run: ended.append(run))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run, launcher = docker_run(tmp_path), DockerLauncher()
    launcher.remember("left-1", run)
    with pytest.raises(BadInput, match="has no container of left"):
        launcher.end("left-1")
    assert not ended


def test_containers_that_another_command_is_removing_are_waited_for(tmp_path: Path) -> None:
    daemon = Daemon(coordinator=True, node_0=False)
    daemon.are_going = True
    containers.remove(daemon, docker_run(tmp_path))
    assert not daemon.running


def test_why_a_coordinator_cannot_work_is_the_reason(tmp_path: Path) -> None:
    """A daemon that maps users, or that confines containers by SELinux, keeps them from the run directory."""
    run = running(tmp_path)
    for verdict in run.verdicts():
        verdict.unlink()
    supervisor.Supervisor(run).poll(Daemon(coordinator=False, node_0=True))
    status = RunStatus(run)
    status.update()
    assert "PermissionError: [Errno 13] Permission denied: '/runs/left'" in status.reason
