"""A sweep in containers: one job at a time, and nothing of a job is in Docker before its turn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_jobs.run.directory import RunDir
from tests.jobs import Watched, cli
from tests.launchers.docker.daemon import docker
from tests.sweeps.test_sweeps import SMALL

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def test_jobs_in_containers_wait_for_their_turn(image: str, tmp_path: Path) -> None:
    def containers() -> list[str]:
        return docker("ps", "--all", "--filter", "name=fsdp-turn", "--format", "{{.Names}}").split()

    place = ("cluster=docker", f"cluster.image={image}")
    done = cli(tmp_path, "--multirun", "name=turn", *place, *SMALL, "steps=100000,4")
    assert done.returncode == 0 and "2  submitted" in done.stdout, done.stdout + done.stderr
    try:
        first, second = (Watched(RunDir(tmp_path / "runs" / f"turn-00{i}")) for i in (0, 1))
        first.until_step(2)
        states = [row["state"] for row in json.loads(cli(tmp_path, "sweep", "status", "turn", "--json").stdout)]
        assert states == ["running", "queued"]
        assert not [name for name in containers() if "turn-001" in name]
        assert "stopped: cancelled; saved at step" in cli(tmp_path, "cancel", "turn-000").stdout
        second.until(lambda: bool(second.events("done")), "its turn, and its end", 120)
        second.until(lambda: not containers(), "the removal of what was in Docker")
    finally:
        cli(tmp_path, "sweep", "cancel", "turn", "--now")
