"""deploy/compose.yaml as a user runs it: scaled down and up while it trains, healthy, cancelled, and taken up again."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_jobs.events import Verdict
from fsdp_jobs.run_dir import RunDir
from tests.docker.daemon import docker
from tests.docker.test_jobs import undisturbed
from tests.jobs import ROOT, Watched
from tests.world import TINY

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

_PROJECT = "fsdp-compose-test"
_TASK = ("optim.decay_steps=1000", "data.global_batch=12")
_JOB = ("nodes=1:4", "nproc_per_node=1", "steps=100000", "elastic.join_window_s=4", *TINY, *_TASK)


def compose(*args: str, image: str, job: tuple[str, ...] = _JOB) -> str:
    """What a docker-compose command prints."""
    command = ["docker-compose", "--project-name", _PROJECT, "--file", str(ROOT / "deploy/compose.yaml"), *args]
    env = {**os.environ, "IMAGE": image, "JOB": " ".join(job), "CPUS": "0.5"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def services(image: str) -> Iterator[Watched]:
    """The services up with three nodes, and their run as this machine sees it; taken down at the end."""
    try:
        compose("up", "--detach", "--scale", "node=3", image=image)
        volume = docker("volume", "inspect", "--format", "{{.Mountpoint}}", f"{_PROJECT}_runs")
        yield Watched(RunDir(Path(volume) / "job"))
    finally:
        compose("down", "--volumes", "--timeout", "5", image=image)


def test_services_scale_heal_and_go_on(services: Watched, image: str, tmp_path: Path) -> None:
    def until_nodes(nodes: int) -> None:
        def there() -> bool:
            rounds = services.events("round_started")
            if not rounds or len(rounds[-1]["nodes"]) != nodes or not services.metrics():
                return False
            return bool(services.metrics()[-1]["time"] > rounds[-1]["time"])

        services.until(there, f"a step on {nodes} nodes", 150)

    until_nodes(3)
    compose("up", "--detach", "--scale", "node=2", image=image)
    until_nodes(2)
    compose("up", "--detach", "--scale", "node=4", image=image)
    until_nodes(4)
    coordinator = docker("ps", "--quiet", "--filter", f"name={_PROJECT}[_-]coordinator")
    pid = int(docker("inspect", "--format", "{{.State.Pid}}", coordinator))
    assert pid > 1
    os.kill(pid, 9)  # a crash: what docker kill ends, no restart policy starts again
    services.until(lambda: bool(services.events("adopted")), "the coordinator is started again, and adopts the round")

    healthy = ("ps", "--quiet", "--filter", f"name={_PROJECT}", "--filter", "health=healthy")
    services.until(lambda: len(docker(*healthy).split()) == 5, "everybody is healthy", 60)
    said = docker("exec", coordinator, "fsdp-jobs", "cancel", "job")
    assert "job stopped: cancelled; saved at step" in said, said
    verdict = Verdict.read(services.run, services.run.last_attempt())
    assert verdict is not None and (verdict.verdict, verdict.decision) == ("preempted", "stop")

    reached = services.step()
    losses = {step: loss for step, loss in services.losses().items() if step <= 150}
    assert losses == pytest.approx(undisturbed(tmp_path, *_TASK, f"steps={len(losses)}"), rel=1e-5)

    rest = tuple(f"steps={reached + 10}" if o.startswith("steps=") else o for o in _JOB)
    compose("up", "--detach", "--scale", "node=2", image=image, job=rest)
    services.until(lambda: services.step() == reached + 10, "the rest of the steps", 150)
    assert services.events("resumed")[-1]["step"] == reached
