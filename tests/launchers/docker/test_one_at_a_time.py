"""One set of containers per name, however many commands submit it at once and wherever one of them is killed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_jobs.run.directory import RunDir
from tests.jobs import called, cli, environment, killed_at
from tests.launchers.docker.daemon import docker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture
def one(image: str, tmp_path: Path) -> Iterator[list[str]]:
    """A job that sleeps; its containers do not outlive the test."""
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(600)")
    name = f"one{tmp_path.name[-3:]}"
    where = ["cluster=docker", f"cluster.image={image}"]
    yield [f"name={name}", "script=sleeps.py", "nodes=1", "nproc_per_node=1", "attach=false", *where]
    called(tmp_path, "cancel", name, "--now")


def containers(folder: Path) -> list[str]:
    label = f"label=fsdp_jobs.run.directory={folder}/runs/{folder_name(folder)}"
    return sorted(docker("ps", "--all", "--filter", label, "--format", "{{.Names}}").split())


def folder_name(folder: Path) -> str:
    return f"one{folder.name[-3:]}"


@pytest.mark.parametrize("count", [4, pytest.param(50, marks=pytest.mark.soak)])
def test_of_many_submissions_of_one_name_at_once_exactly_one_is_taken(
    one: list[str], tmp_path: Path, count: int
) -> None:
    command, env = [*killed_at(0), *one], environment(tmp_path)
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    commands = [
        subprocess.Popen(command, cwd=tmp_path, env=env, **piped)  # type: ignore[call-overload]
        for _ in range(count)
    ]
    said = [process.communicate()[0] for process in commands]
    assert sorted(process.returncode for process in commands) == [0] + [2] * (count - 1), "\n".join(said)
    assert sum("is in use by the live job docker_fsdp://" in text for text in said) == count - 1, "\n".join(said)
    assert len(containers(tmp_path)) == 2


@pytest.mark.parametrize(
    ("pattern", "number", "jobs"),
    [("queued.json", 1, 0), ("docker.supervisor", 1, 1), ("supervisor.json", 1, 1), ("job.json", 2, 1)],
)
def test_a_submission_that_is_killed_is_found_again(
    one: list[str], tmp_path: Path, pattern: str, number: int, jobs: int
) -> None:
    """Before the first container; before the supervisor, and after it; before the answer is recorded."""
    command = [*killed_at(number, pattern), *one]
    assert subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True).returncode == -9
    run = RunDir(tmp_path / "runs" / folder_name(tmp_path))
    assert run.pending_launcher == "docker_fsdp" and len(containers(tmp_path)) == 2 * jobs
    rows = json.loads(called(tmp_path, "status", "--json").stdout)
    assert len(rows) == jobs, rows
    again = cli(tmp_path, *one)
    assert again.returncode == (2 if jobs else 0), again.stdout + again.stderr
    assert len(containers(tmp_path)) == 2
