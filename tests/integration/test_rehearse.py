"""The rehearsal itself, for the faults that the chaos suite does not inject through it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import cli

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("fault", ["kill_rank", "corrupt_checkpoint"])
def test_a_rehearsal_of_a_large_job_in_small(tmp_path: Path, fault: str) -> None:
    done = cli(tmp_path, "rehearse", fault, "model=llama3_8b", "nodes=16", "fsdp=hybrid_shard", "cluster=slurm")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"PASS {fault}" in done.stdout


def test_a_rehearsal_that_cannot_recover_says_fail(tmp_path: Path) -> None:
    done = cli(tmp_path, "rehearse", "kill_rank", "elastic.max_failures_without_progress=0", "checkpoint.keep=1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAIL kill_rank: the job ended infrastructure" in done.stdout


def test_an_unknown_fault_names_those_there_are(tmp_path: Path) -> None:
    done = cli(tmp_path, "rehearse", "kill_nod")
    assert done.returncode == 2
    assert "did you mean kill_node?" in done.stderr and "hang_node" in done.stderr
