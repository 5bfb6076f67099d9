"""deploy/compose.yaml as a user runs it: scaled down and up while it trains, healthy, cancelled, and taken up again."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.processes import free_port
from fsdp_jobs.run.verdict import Verdict
from tests.jobs import ROOT, Watched
from tests.launchers.docker.daemon import docker
from tests.world import TINY, undisturbed_losses

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

_PROJECT = "fsdp-compose-test"
_SLURM_IMAGE = "fsdp_jobs-test-slurm"
_PORT = free_port()  # 8265 may be another dashboard's
_TASK = ("optim.decay_steps=1000", "data.global_batch=12")
_JOB = ("nodes=1:3", "nproc_per_node=1", "steps=100000", "elastic.join_window_s=4", *TINY, *_TASK)


def compose(*args: str, image: str, job: tuple[str, ...] = _JOB) -> str:
    """What a docker-compose command prints."""
    command = ["docker-compose", "--project-name", _PROJECT, "--file", str(ROOT / "deploy/compose.yaml"), *args]
    env = {**os.environ, "IMAGE": image, "SLURM_IMAGE": _SLURM_IMAGE, "JOB": " ".join(job), "CPUS": "0.5"}
    env["DASHBOARD_PORT"] = str(_PORT)
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def services(image: str) -> Iterator[Watched]:
    """The services up with two nodes, and their run as this machine sees it; taken down at the end."""
    try:
        compose("up", "--detach", "--scale", "node=2", image=image)
        volume = docker("volume", "inspect", "--format", "{{.Mountpoint}}", f"{_PROJECT}_runs")
        yield Watched(RunDir(Path(volume) / "job"))
    finally:
        compose("down", "--volumes", "--timeout", "5", image=image)


def _in_the_dashboard() -> str:
    """What the dashboard tells of the run, by the address in its service's log; empty while there is none."""
    logs = subprocess.run(["docker", "logs", f"{_PROJECT}_dashboard_1"], capture_output=True, text=True).stdout
    token = re.search(rf"http://localhost:{_PORT}/\?token=(\S+)", logs)
    if token is None:
        return ""
    address = {"base_url": f"http://127.0.0.1:{_PORT}", "follow_redirects": True}
    with suppress(httpx.TransportError), httpx.Client(**address) as client:  # the token becomes a cookie
        return client.get(f"/?token={token[1]}").text + client.get("/api/runs/job").text
    return ""


def test_services_scale_heal_and_go_on(services: Watched, image: str, tmp_path: Path) -> None:
    def until_nodes(nodes: int) -> None:
        def there() -> bool:
            rounds = services.events("round_started")
            if not rounds or len(rounds[-1]["nodes"]) != nodes or not services.metrics():
                return False
            return bool(services.metrics()[-1]["time"] > rounds[-1]["time"])

        services.until(there, f"a step on {nodes} nodes", 150)

    until_nodes(2)
    compose("up", "--detach", "--scale", "node=1", image=image)
    until_nodes(1)
    compose("up", "--detach", "--scale", "node=3", image=image)
    until_nodes(3)
    coordinator = docker("ps", "--quiet", "--filter", f"name={_PROJECT}[_-]coordinator")
    pid = int(docker("inspect", "--format", "{{.State.Pid}}", coordinator))
    assert pid > 1
    compiled = "import _ctypes, ctypes, shutil; ctypes.CDLL(shutil.copy(_ctypes.__file__, '/tmp'))"
    docker("exec", coordinator, "python", "-c", compiled)  # as torch.compile and Triton do
    os.kill(pid, 9)  # a crash: what docker kill ends, no restart policy starts again
    services.until(lambda: bool(services.events("adopted")), "the coordinator is started again, and adopts the round")

    healthy = ("ps", "--quiet", "--filter", f"name={_PROJECT}", "--filter", "health=healthy")
    services.until(lambda: len(docker(*healthy).split()) == 4, "everybody is healthy", 60)
    said = docker("exec", coordinator, "fsdp-jobs", "cancel", "job", check=False)  # ends with its container
    assert "job stopped: cancelled; saved at step" in said, said
    verdict = Verdict.read(services.run, services.run.last_attempt())
    assert verdict is not None and (verdict.verdict, verdict.decision) == ("preempted", "stop")

    compose("--profile", "dashboard", "up", "--detach", "dashboard", image=image)
    services.until(lambda: "cancelled; saved at step" in _in_the_dashboard(), "the run in the dashboard", 60)
    assert "app.js" in _in_the_dashboard()

    reached = services.step()
    losses = {step: loss for step, loss in services.losses().items() if step <= 150}
    assert losses == pytest.approx(undisturbed_losses(tmp_path, 1, 1, *_TASK, f"steps={len(losses)}"), rel=1e-5)

    rest = tuple(f"steps={reached + 10}" if o.startswith("steps=") else o for o in _JOB)
    compose("up", "--detach", "--scale", "node=1", image=image, job=rest)
    services.until(lambda: services.step() == reached + 10, "the rest of the steps", 150)
    assert services.events("resumed")[-1]["step"] == reached


@pytest.fixture
def slurm_cluster(image: str) -> Iterator[str]:
    """The profile `slurm` up with two nodes; yields its controller's container. Taken down at the end."""
    build = ["docker", "build", "--network=host", f"--build-arg=IMAGE={image}", "--tag", _SLURM_IMAGE]
    environment = {**os.environ, "DOCKER_BUILDKIT": "0"}
    done = subprocess.run(
        [*build, str(ROOT / "deploy/slurm/containers")], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    profile = ("--profile", "slurm")
    try:
        compose(*profile, "up", "--detach", "--scale", "slurm-node=2", "slurm-controller", "slurm-node", image=image)
        yield docker("ps", "--quiet", "--filter", f"name={_PROJECT}[_-]slurm-controller")
    finally:
        compose(*profile, "down", "--volumes", "--timeout", "5", image=image)


def test_the_slurm_profile_runs_a_job_through_the_slurm_launcher(slurm_cluster: str, tmp_path: Path) -> None:
    assert docker("inspect", "--format", "{{.HostConfig.Privileged}}", slurm_cluster) == "false"
    volume = docker("volume", "inspect", "--format", "{{.Mountpoint}}", f"{_PROJECT}_runs")
    watched = Watched(RunDir(Path(volume) / "job"))
    idle = ("exec", slurm_cluster, "sinfo", "--noheader", "--states=idle", "--format=%D")
    watched.until(lambda: docker(*idle, check=False) == "2", "two idle nodes", 120)
    here = ("cluster=slurm", "hardware=cpu", "cluster.accelerator=cpu", "nodes=2", "nproc_per_node=1", "steps=40")
    job = ("python", "-m", "fsdp_jobs", *here, "name=job", "attach=true", *TINY, *_TASK)
    said = docker("exec", slurm_cluster, *job, timeout=300)
    assert "submitted slurm_fsdp://compose/" in said and "job: done" in said, said
    hosts = watched.events("round_started")[-1]["hosts"]
    assert len(set(hosts)) == 2
    assert watched.losses() == pytest.approx(undisturbed_losses(tmp_path, 1, 1, *_TASK, "steps=40"), rel=1e-5)
    accounted = docker("exec", slurm_cluster, "sacct", "--allocations", "--noheader", "--format=JobName,State")
    assert accounted.split()[0] == "job"
