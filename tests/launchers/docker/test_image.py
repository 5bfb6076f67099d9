"""The image of deploy/Dockerfile: what it needs, what is in it, and what is not."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.launchers.docker.daemon import SECRET, docker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

_NOTHING = ("--network=none", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges")


def test_it_runs_as_nobody_in_particular_and_writes_nothing(image: str) -> None:
    assert json.loads(docker("inspect", image))[0]["Config"]["User"] == "1000:1000"
    plan = ("python", "-m", "fsdp_jobs", "plan", "nodes=2")
    for user in ("1000:1000", "4242:0"):
        assert "no_shard on 4" in docker("run", "--rm", *_NOTHING, f"--user={user}", image, *plan)
    trains = "import torch, fsdp_jobs.train.trainer; print(torch.ones(2).sum().item())"
    assert docker("run", "--rm", *_NOTHING, image, "python", "-c", trains) == "2.0"


def test_its_first_process_reaps_and_passes_signals_on(image: str) -> None:
    program = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); "
    program += "print('ready', flush=True); signal.pause()"
    name = docker("run", "--detach", *_NOTHING, image, "python", "-c", program)
    try:
        while not docker("logs", name):
            assert docker("inspect", "--format", "{{.State.Running}}", name) == "true"
        assert "dumb-init" in docker("exec", name, "cat", "/proc/1/comm")
        docker("stop", "--time=60", name)
        assert docker("inspect", "--format", "{{.State.ExitCode}}", name) == "7"
    finally:
        docker("rm", "--force", name)


def test_a_secret_of_the_builders_environment_is_in_no_layer(image: str) -> None:
    (secret,) = SECRET.values()
    assert secret not in docker("history", "--no-trunc", image) + docker("inspect", image)
    search = f"docker save {image} | grep --count --text --fixed-strings {secret}"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", search], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (1, "0"), done.stderr
