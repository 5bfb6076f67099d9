"""The rehearsal itself, for the faults that the chaos suite does not inject through it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdp_jobs.run.directory import runs_in
from fsdp_jobs.run.verdict import Verdict
from tests.jobs import cli, environment

pytestmark = pytest.mark.integration


LARGE = ("model=llama3_8b", "nodes=16", "cluster=slurm")


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["kill_rank", "corrupt_checkpoint"])
def test_a_rehearsal_of_a_large_job_in_small(tmp_path: Path, fault: str) -> None:
    done = cli(tmp_path, "rehearse", fault, *LARGE, "fsdp=hybrid_shard")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"PASS {fault}" in done.stdout


def rehearsed(folder: Path, fault: str, *overrides: str) -> str:
    done = cli(folder, "rehearse", fault, "checkpoint.memory.every_steps=1", *overrides, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"PASS {fault}: resumed from step" in done.stdout
    return done.stdout


def test_a_flipped_bit_in_the_memory_of_a_large_job_in_small_costs_nothing(tmp_path: Path) -> None:
    assert "in memory" in rehearsed(tmp_path, "flip_bit", *LARGE, "fsdp=full_shard", "nproc_per_node=1")


@pytest.mark.soak
def test_full_memory_is_told_and_training_goes_on(tmp_path: Path) -> None:
    rehearsed(tmp_path, "full_memory")


@pytest.mark.soak
def test_both_nodes_of_a_pair_are_lost(tmp_path: Path) -> None:
    assert "in storage" in rehearsed(tmp_path, "lose_two_nodes", "fsdp=full_shard")


@pytest.mark.soak
def test_a_job_that_diverges_goes_on_from_its_newest_finite_checkpoint(tmp_path: Path) -> None:
    assert "the newest finite checkpoint is of step" in rehearsed(tmp_path, "nan")


@pytest.mark.soak
@pytest.mark.timeout(500)
def test_a_slow_node_is_named(tmp_path: Path) -> None:
    done = cli(tmp_path, "rehearse", "slow_node", timeout=400)
    assert done.returncode == 0 and "PASS slow_node: after" in done.stdout, done.stdout + done.stderr


def test_snapshots_that_are_off_cannot_be_rehearsed(tmp_path: Path) -> None:
    done = cli(tmp_path, "rehearse", "flip_bit")
    assert done.returncode == 2 and "checkpoint.memory.every_steps=1" in done.stderr


def test_a_rehearsal_that_cannot_recover_says_fail(tmp_path: Path) -> None:
    done = cli(tmp_path, "rehearse", "kill_rank", "elastic.max_failures_without_progress=0", "nproc_per_node=1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAIL kill_rank: the job ended infrastructure" in done.stdout


def test_an_unknown_fault_names_those_there_are(tmp_path: Path) -> None:
    done = cli(tmp_path, "rehearse", "kill_nod")
    assert done.returncode == 2
    assert "did you mean kill_node?" in done.stderr and "hang_node" in done.stderr


def test_the_job_of_a_rehearsal_that_is_ended_ends_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fsdp_jobs", "rehearse", "kill_rank", "nproc_per_node=1"]
    rehearsal = subprocess.Popen(command, cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.DEVNULL)
    runs_dir = str(tmp_path / "runs")
    while not (runs := runs_in(runs_dir)):
        assert rehearsal.poll() is None
        time.sleep(0.05)
    time.sleep(1)  # it has begun to wait for steps
    for _ in range(2):  # the second, of whoever is impatient, does not interrupt the end
        rehearsal.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    assert rehearsal.wait(60) == 128 + signal.SIGTERM
    verdict = Verdict.final(runs[0])
    assert verdict is not None and verdict.reason.startswith("killed on request")
