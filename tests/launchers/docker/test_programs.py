"""Users' programs in containers: a container of each is killed, and they go on from what they had saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import programs
from tests.launchers.docker.daemon import docker
from tests.launchers.docker.test_jobs import docker_job

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

HERE = ("nodes=2", "nproc_per_node=1", "cluster.cpus=1", "elastic.join_window_s=5")
STEPS = 80


def test_a_program_without_the_library_loses_a_container(image: str, tmp_path: Path) -> None:
    programs.copied(tmp_path)
    with docker_job(tmp_path, "plain", image, *programs.PLAIN.overrides(STEPS), *HERE, tiny=False) as plain:
        plain.until(lambda: programs.PLAIN.has_saved(plain), "a step after the first save", 150)
        docker("kill", plain.container("node-1"))
        assert plain.wait().verdict == "done", plain.story()
        programs.PLAIN.check_went_on(plain, STEPS)
        assert (plain.run.path / "own" / "newest").read_text() == str(STEPS), "it works in the run directory"


@pytest.mark.soak
@pytest.mark.parametrize("name", ["library", *programs.MORE])
def test_every_program_loses_a_container(image: str, tmp_path: Path, name: str) -> None:
    programs.copied(tmp_path)
    program = {"library": programs.LIBRARY, **programs.MORE}[name]
    with docker_job(tmp_path, name, image, *program.overrides(STEPS), *HERE, tiny=False) as job:
        job.until(lambda: program.has_saved(job), "a step after the first save", 240)
        docker("kill", job.container("node-1"))
        assert job.wait().verdict == "done", job.story()
        program.check_went_on(job, STEPS)
