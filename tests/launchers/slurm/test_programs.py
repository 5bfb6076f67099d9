"""Users' programs on a real SLURM cluster: killed, and resumed by a round and by an attempt."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import programs
from tests.launchers.slurm.lab import Lab, SlurmJob, slurm_job

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

HERE = ("nodes=2", "nproc_per_node=1", "elastic.join_window_s=5")
STEPS = 80


def until_done(job: SlurmJob, check: Callable[[SlurmJob, int], None]) -> None:
    job.until(lambda: job.state() in ("COMPLETED", "FAILED"), "the end", 240)
    assert job.verdict(job.run.last_attempt()).verdict == "done", job.story()
    check(job, STEPS)


def test_a_plain_program_loses_an_agent(lab: Lab, tmp_path: Path) -> None:
    programs.copied(tmp_path)
    with slurm_job(lab, tmp_path, "plain", *programs.PLAIN.overrides(STEPS), *HERE, tiny=False) as plain:
        plain.until(lambda: programs.PLAIN.has_saved(plain), "a step after the first save", 150)
        plain.agent(1).send_signal(signal.SIGKILL)
        until_done(plain, programs.PLAIN.check_went_on)


@pytest.mark.soak
def test_a_program_with_the_library_is_requeued(lab: Lab, tmp_path: Path) -> None:
    programs.copied(tmp_path)
    with slurm_job(lab, tmp_path, "library", *programs.LIBRARY.overrides(STEPS), *HERE, tiny=False) as library:
        library.until(lambda: library.step() >= 14, "a step after the first save", 150)
        lab.on_login("scontrol", "requeue", library.id)
        library.until(lambda: library.run.last_attempt() == 1, "the next attempt", 120)
        until_done(library, programs.LIBRARY.check_went_on)


@pytest.mark.soak
@pytest.mark.parametrize("name", programs.MORE)
def test_every_program_loses_an_agent(lab: Lab, tmp_path: Path, name: str) -> None:
    programs.copied(tmp_path)
    program = programs.MORE[name]
    with slurm_job(lab, tmp_path, name, *program.overrides(STEPS), *HERE, tiny=False) as job:
        job.until(lambda: program.has_saved(job), "a step after the first save", 240)
        job.agent(1).send_signal(signal.SIGKILL)
        until_done(job, program.check_went_on)
