"""What cannot be submitted to Docker: all that is wrong on one screen, nothing started and nothing written."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker as sdk
import pytest
import yaml
from docker.errors import DockerException

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.launchers.docker.containers import connected
from fsdp_jobs.launchers.docker.validate import _gpus
from tests.jobs import called, environment, hear_ctrl_c
from tests.launchers.docker.daemon import docker

pytestmark = pytest.mark.integration


def refusal(folder: Path, *overrides: str, **env: str) -> str:
    """What the command says to something that it refuses."""
    done = called(folder, "cluster=docker", *overrides, **env)
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert "Traceback" not in said and len(said.splitlines()) < 25
    assert not (folder / "runs").exists(), "it wrote something"
    return said


def has_no_container(image: str, seconds: float) -> None:
    """Docker removes the one that was tried, in a moment."""
    deadline = time.monotonic() + seconds
    while left := docker("ps", "--all", "--quiet", "--filter", f"ancestor={image}"):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def test_no_daemon(tmp_path: Path) -> None:
    said = refusal(tmp_path, DOCKER_HOST="unix:///nowhere/docker.sock")
    assert "Docker at unix:///nowhere/docker.sock: no Docker daemon answers" in said
    assert "systemctl start docker" in said


def test_without_a_daemon_a_dry_run_shows_the_containers(tmp_path: Path) -> None:
    job = ("cluster=docker", "nodes=2", "name=a", "dry_run=true", "--output", "yaml")
    shown = called(tmp_path, *job, DOCKER_HOST="unix:///nowhere/docker.sock")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    content = yaml.safe_load(shown.stdout)
    assert [c["hostname"] for c in content["containers"]] == ["coordinator", "node-0", "node-1"]
    for words in ("no Docker daemon answers", "not checked: the image", "assumed: a daemon that runs as root", "FITS"):
        assert words in shown.stderr, shown.stderr
    assert not (tmp_path / "runs").exists()
    small = called(tmp_path, *job, "cluster.memory=64m", DOCKER_HOST="unix:///nowhere/docker.sock")
    assert small.returncode == 2 and "ranks need" in small.stderr, "what the keys say alone is checked all the same"
    elsewhere = called(tmp_path, *job, DOCKER_HOST="ssh://somewhere.example")
    assert elsewhere.returncode == 2 and "is not a socket of this machine" in elsewhere.stderr


def test_doctor_says_whether_the_image_works(image: str, tmp_path: Path) -> None:
    done = called(tmp_path, "doctor", "cluster=docker", f"cluster.image={image}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"{image}: fsdp_jobs \S+ torch 2\.", done.stdout) and " CPUs, " in done.stdout, done.stdout
    has_no_container(image, 30)
    other = called(tmp_path, "doctor", "cluster=docker", "cluster.image=fsdp_jobs-test-base")
    assert other.returncode == 1 and "-> docker build -t fsdp_jobs-test-base" in other.stdout, other.stdout
    none = called(tmp_path, "doctor", "cluster=docker", "cluster.image=nobody/has-this:1", "hardware=h100")
    assert none.returncode == 1 and "this Docker has no such image" in none.stdout, none.stdout
    assert "the job needs 16 GPUs, one per rank; this machine has" in none.stdout, none.stdout


def test_gpus_need_nvidias_runtime_or_its_hook_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose_job(["cluster=docker", "nodes=1", "nproc_per_node=2", "hardware=h100"])
    monkeypatch.setenv("PATH", str(tmp_path))
    (problem,) = _gpus(config, {"Runtimes": {"runc": {}}}, ["0", "1"])
    assert "nvidia-container-toolkit" in problem.instead
    (tmp_path / "nvidia-container-runtime-hook").touch(mode=0o755)
    assert not [*_gpus(config, {"Runtimes": {"runc": {}}}, ["0", "1"])], "the toolkit, with no runtime configured"
    assert [*_gpus(config, {"Runtimes": {"nvidia": {}}}, ["0"])], "a GPU too few"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_doctor_that_is_interrupted_leaves_no_container(image: str, tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-m", "fsdp_jobs", "doctor", "cluster=docker", f"cluster.image={image}"]
    piped = {"stdout": subprocess.PIPE, "text": True, "preexec_fn": hear_ctrl_c}
    running = ("ps", "--quiet", "--filter", f"ancestor={image}")
    with subprocess.Popen(command, cwd=tmp_path, env=environment(tmp_path), **piped) as doctor:  # type: ignore[call-overload]
        while not docker(*running):
            assert doctor.poll() is None, doctor.communicate()[0]
        doctor.send_signal(number)
        said = doctor.communicate()[0]
    assert "Python is started in it" in said, said
    has_no_container(image, 120)


def test_doctor_without_a_daemon(tmp_path: Path) -> None:
    done = called(tmp_path, "doctor", "cluster=docker", DOCKER_HOST="unix:///nowhere/docker.sock")
    assert done.returncode == 1 and "no Docker daemon answers" in done.stdout, done.stdout + done.stderr
    assert "-> start Docker Desktop, or: sudo systemctl start docker" in done.stdout


def test_simulated_socket_without_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_kwargs: Any) -> None:
        raise DockerException("Error while fetching server API version: PermissionError(13, 'Permission denied')")

    monkeypatch.setattr(sdk, "APIClient", refuse)
    with pytest.raises(BadInput, match="usermod -aG docker"), connected():
        pass


def test_no_image_and_too_little_of_everything_at_once(docker_daemon: None, tmp_path: Path) -> None:
    little = ("cluster.image=nobody/has-this:1", "cluster.memory=64m", "cluster.shm=4k", "cluster.cpus=4096")
    missing = ("cluster.pass_env=[NO_SUCH_VARIABLE]", "cluster.mounts=[/no/such/folder:/data, data]")
    said = " ".join(refusal(tmp_path, *little, *missing, "nodes=5000").split())
    for part in (
        "cluster.image=nobody/has-this:1: this Docker has no such image",
        "docker build -t nobody/has-this:1 -f deploy/Dockerfile .",
        "cluster.memory=64m: the plan's 2 ranks need",
        "cluster.shm=4k: the plan's 2 ranks need",
        "cluster.cpus=4096: Docker has",
        "nodes=5000: the plan expects them to need",
        "cluster.pass_env=[NO_SUCH_VARIABLE]: is not in your environment",
        "there is no /no/such/folder on this machine",
        "cluster.mounts=[data]: is not from:to",
    ):
        assert part in said, said


def test_a_full_disk_is_named_and_gets_its_room_back(docker_daemon: None, small_disk: Path, tmp_path: Path) -> None:
    """An image of nothing is enough: the code is copied before it is used."""
    subprocess.run("tar c -T /dev/null | docker import - fsdp_jobs-test-nothing", shell=True, check=True)
    (tmp_path / "large.py").write_text("#" * (9 << 20))
    job = ("cluster=docker", "cluster.image=fsdp_jobs-test-nothing", "name=full", f"runs_dir={small_disk}")
    try:
        refused = called(tmp_path, *job)
    finally:
        docker("rmi", "fsdp_jobs-test-nothing")
    assert refused.returncode == 2, refused.stdout + refused.stderr
    said = f"{small_disk}/full/.code.new/large.py: No space left on device -> make room there"
    assert said in " ".join(refused.stderr.split()), refused.stderr
    assert shutil.disk_usage(small_disk).free > 7 << 20


@pytest.fixture
def strangers(image: str) -> Iterator[None]:
    """A container and a network of somebody else, under the names that a run called `mine` would use."""
    docker("create", "--name", "fsdp-mine-node-1", image, "true")
    docker("network", "create", "fsdp-mine")
    yield
    docker("rm", "fsdp-mine-node-1")
    docker("network", "rm", "fsdp-mine")


def test_names_that_are_taken(image: str, strangers: None, tmp_path: Path) -> None:
    said = " ".join(refusal(tmp_path, f"cluster.image={image}", "name=mine").split())
    assert "container fsdp-mine-node-1: already exists, and belongs to something other than a job of fsdp_jobs" in said
    assert "docker rm -f fsdp-mine-node-1" in said
    assert "network fsdp-mine: already exists, and belongs to something other than a job of fsdp_jobs" in said
    assert "docker network rm fsdp-mine" in said


@pytest.mark.parametrize("name", ["Upper/Case", "a b", "x:y:z", "@", "--privileged", ""])
def test_names_that_no_image_can_have(docker_daemon: None, tmp_path: Path, name: str) -> None:
    assert f"cluster.image={name}: " in " ".join(refusal(tmp_path, f"cluster.image='{name}'").split())


def test_the_chosen_context_names_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `docker context create` and `docker context use` write it."""
    config = tmp_path / "docker"
    chosen = config / "contexts" / "meta" / hashlib.sha256(b"far").hexdigest() / "meta.json"
    chosen.parent.mkdir(parents=True)
    chosen.write_text(
        json.dumps({"Name": "far", "Metadata": {}, "Endpoints": {"docker": {"Host": "unix:///far/docker.sock"}}})
    )
    (config / "config.json").write_text(json.dumps({"currentContext": "far"}))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    far = "Docker at unix:///far/docker.sock: no Docker daemon answers"
    assert far in refusal(tmp_path, DOCKER_CONFIG=str(config))
    (config / "config.json").write_text("{}")
    assert far in refusal(tmp_path, DOCKER_CONFIG=str(config), DOCKER_CONTEXT="far")
    gone = refusal(tmp_path, DOCKER_CONFIG=str(config), DOCKER_CONTEXT="gone")
    assert "Docker context gone: there is no such context" in gone
    chosen.write_text("{")
    damaged = refusal(tmp_path, DOCKER_CONFIG=str(config), DOCKER_CONTEXT="far")
    assert "Docker context far: cannot be read: Detected corrupted meta file" in damaged
    here = refusal(tmp_path, DOCKER_CONFIG=str(config), DOCKER_CONTEXT="far", DOCKER_HOST="unix:///nowhere.sock")
    assert "Docker at unix:///nowhere.sock" in here, "as with the docker command, DOCKER_HOST comes first"


def test_another_machines_docker(docker_daemon: None, tmp_path: Path) -> None:
    socket = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")
    assert Path(socket).exists()
    for where in ("ssh://somewhere.example", "tcp://127.0.0.1:2375"):
        said = refusal(tmp_path, DOCKER_HOST=where)
        assert f"DOCKER_HOST={where}: is not a socket of this machine" in said and "unset DOCKER_HOST" in said
