"""Docker daemons unlike the one of the tests: their answers are simulated."""

from __future__ import annotations

import http.server
import json
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.launchers.base import Job
from fsdp_jobs.launchers.docker.containers import translate
from fsdp_jobs.launchers.docker.validate import examine
from fsdp_jobs.plan.plan import make_plan
from fsdp_jobs.run.directory import RunDir
from tests.jobs import cli

PLAIN = {"NCPU": 8, "MemTotal": 1 << 36, "CpuCfsQuota": True, "SecurityOptions": ["name=seccomp,profile=default"]}


@pytest.mark.parametrize(
    ("daemon", "overrides", "expected"),
    [
        ({}, (), {"user": "1234:1235", "userns_mode": None, "nano_cpus": 2_000_000_000}),
        ({"SecurityOptions": ["name=rootless"], "CpuCfsQuota": False}, (), {"user": "0:0", "nano_cpus": 0}),
        ({"Rootless": True}, (), {"user": "0:0"}),
        ({"Rootless": False}, (), {"user": "1234:1235"}),
        ({"CpuCfsQuota": False}, ("cluster.cpus=4",), {"nano_cpus": 4_000_000_000}),  # Docker says why it cannot
        ({"SecurityOptions": ["name=userns"]}, (), {"user": "1234:1235", "userns_mode": "host"}),
    ],
)
def test_containers_of_a_daemon_that_limits_or_maps_otherwise(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    daemon: dict[str, Any],
    overrides: tuple[str, ...],
    expected: dict[str, Any],
) -> None:
    """Rootless Docker, Podman 4.3 rootless and not, a daemon without CPU limits, user namespaces."""
    monkeypatch.setattr("os.getuid", lambda: 1234)
    monkeypatch.setattr("os.getgid", lambda: 1235)
    config = compose_job(["cluster=docker", "cluster.snapshot_mb=0", "nproc_per_node=2", "nodes=1", *overrides])
    request = translate(Job(config, RunDir(tmp_path / "x"), make_plan(config)), {**PLAIN, **daemon}, [])
    node = request.containers[1]
    said = {"user": node["user"], **node["host_config"]}
    assert {key: said[key] for key in expected} == expected
    assert "label=disable" in said["security_opt"], "SELinux keeps mounts closed, and Podman 4.3 does not say it is on"


def test_doctor_says_that_a_daemon_limits_nothing() -> None:
    """As seen of rootless Docker on cgroup v1, which takes the limits and ignores them."""
    api = MagicMock(**{"info.return_value": {**PLAIN, "ServerVersion": "20.10.24", "MemoryLimit": False}})
    warning = [finding for finding in examine(api, compose_job(["cluster=docker"])) if finding.state == "warning"]
    assert [finding.what for finding in warning] == ["limits"]


class _Daemon(http.server.BaseHTTPRequestHandler):
    """Answers which version it has; everything else with an error, or by hanging up."""

    protocol_version = "HTTP/1.1"
    hangs_up = False

    def _answer(self) -> None:
        version = self.path.endswith("/version")
        if self.hangs_up and not version:
            self.close_connection = True
            return
        said = json.dumps({"ApiVersion": "1.41"} if version else {"message": "no space left on device"}).encode()
        self.send_response(200 if version else 500)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    do_GET = do_POST = _answer

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[str]:
    with socketserver.ThreadingUnixStreamServer(str(tmp_path / "socket"), _Daemon) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"unix://{tmp_path}/socket"
        server.shutdown()


@pytest.mark.parametrize("hangs_up", [False, True])
def test_a_daemon_that_fails_in_the_middle_of_a_command(
    socket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs_up: bool
) -> None:
    monkeypatch.setattr(_Daemon, "hangs_up", hangs_up)
    words = "Remote end closed connection" if hangs_up else "no space left on device"
    for verb, code in (("submit", 2), ("doctor", 1)):
        done = cli(tmp_path, verb, "cluster=docker", "name=x", DOCKER_HOST=socket)
        said = done.stdout + done.stderr
        assert done.returncode == code and words in said and "Traceback" not in said, said
    assert not (tmp_path / "runs").exists()
