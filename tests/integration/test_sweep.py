"""Sweeps with jobs: submitted at once, in places, gone on with after whatever died; and Optuna."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdp_jobs.launchers.supervisor import staged
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.processes import recorded_process
from tests.jobs import Watched, cli, environment
from tests.sweeps.test_sweeps import SMALL

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SAVED = (*(o for o in SMALL if not o.startswith("checkpoint.")), "checkpoint.every_steps=20")


class Sweep:
    """A sweep of a test, seen from outside."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name = folder, name

    def run(self, number: int) -> Watched:
        return Watched(RunDir(self.folder / "runs" / f"{self.name}-{number:03d}"))

    def verb(self, *words: str) -> str:
        action, *flags = words
        done = cli(self.folder, "sweep", action, self.name, *flags)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def status(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(self.verb("status", "--json"))
        return rows

    def states(self) -> list[str]:
        return [row["state"] for row in self.status()]

    def kill(self, run: Watched) -> None:
        process = recorded_process(run.run.submit / "supervisor.json")
        assert process is not None, run.story()
        process.kill()
        process.wait(10)

    def kill_queue(self) -> None:
        process = recorded_process(self.folder / "sweeps" / self.name / "queue-process.json")
        assert process is not None
        process.kill()
        process.wait(10)


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Sweep]:
    made = Sweep(tmp_path, "try")
    yield made
    if (tmp_path / "runs").exists():
        made.verb("cancel", "--now")


def test_a_sweep_goes_on_after_its_queue_and_a_job_were_killed(sweep: Sweep, tmp_path: Path) -> None:
    grid = ["--multirun", "name=try", *SAVED]
    done = cli(tmp_path, *grid, "steps=100000,21")
    assert done.returncode == 0 and "2  submitted" in done.stdout, done.stdout + done.stderr
    long, short = sweep.run(0), sweep.run(1)
    second = sweep.status()[1]
    assert second["state"] == "queued" and "waits for its turn: sweep try" in second["reason"]
    long.until(lambda: bool(long.events("checkpoint")), "a checkpoint")

    sweep.kill_queue()
    first, second = sweep.status()
    assert first["state"] == "running" and second["state"] == "failed"
    assert "sweep resume try" in second["reason"]

    again = cli(tmp_path, *grid, "steps=100000,21,22", "sweep.parallelism=2")
    assert "2  submitted           try-001 ... try-002" in again.stdout and "1  running or waiting" in again.stdout
    for run in (short, sweep.run(2)):
        run.until(lambda run=run: bool(run.events("attempt_ended")), "its end", 240)
    assert sweep.states() == ["running", "done", "done"]
    assert len(long.events("submitted")) == 1 and len(short.events("submitted")) == 2

    sweep.kill(long)
    assert sweep.states()[0] == "failed"
    assert "1  submitted  try-000" in sweep.verb("retry-failed")
    long.until(lambda: bool(long.events("resumed")), "that it goes on from its checkpoint")
    assert long.events("resumed")[0]["step"] >= 20 and len(short.events("submitted")) == 2

    reached = long.step()
    long.until_step(reached + 1)
    assert "1 stopped" in sweep.verb("cancel") and sweep.states() == ["stopped", "done", "done"]
    assert long.events("checkpoint")[-1]["step"] > reached - 20
    best = json.loads(sweep.verb("best", "--json"))
    assert best["run"] == "try-002" and best["checkpoint"].endswith("step-00000022")
    assert "report.html" in sweep.verb("report")


def test_two_people_submit_a_sweep_at_once_and_wait_for_a_job_that_fails(sweep: Sweep, tmp_path: Path) -> None:
    own = ["elastic.max_skipped_updates=100", "elastic.stop_on_nan_loss=false", "steps=150"]  # alive for both to see
    own += ["optim.warmup_steps=0", "optim.grad_clip_norm=0"]
    command = [sys.executable, "-m", "fsdp_jobs", "--multirun", "name=try", *SMALL, *own, "optim.lr=1e-3,1e30"]
    command += ["sweep.wait=true", "sweep.parallelism=2"]
    env = environment(tmp_path, CUDA_VISIBLE_DEVICES="3,5")  # as if there were GPUs
    both = [subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    shown = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [1, 1], shown
    assert all("try-000 done: " in text and "try-001 failed: " in text for text in shown), shown
    assert sorted("2  submitted" in text for text in shown) == [False, True]
    assert [len(sweep.run(i).events("submitted")) for i in (0, 1)] == [1, 1]
    rows = sweep.status()
    assert [row["state"] for row in rows] == ["done", "failed"] and rows[0]["objective"] > 0
    assert [staged(sweep.run(i).run)["gpus"] for i in (0, 1)] == [["3"], ["5"]], "each on a GPU of its own"


def test_optuna_gets_the_losses_of_jobs(sweep: Sweep, tmp_path: Path) -> None:
    own = ["sweep.name=try", "sweep.wait=true", "sweep.parallelism=2", "steps=3"]
    search = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=2"]
    search += ["hydra.sweeper.sampler.seed=1", "optim.lr=tag(log,interval(1e-5,1e-1))"]
    done = cli(tmp_path, "--multirun", *search, *own, *SMALL, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = sweep.status()
    assert [row["state"] for row in rows] == ["done"] * 3
    assert [row["objective"] for row in rows] == [sweep.run(i).losses()[3] for i in range(3)]
    found = yaml.safe_load((tmp_path / "sweeps" / "try" / "optimization_results.yaml").read_text())
    assert found["best_value"] == pytest.approx(min(row["objective"] for row in rows))
    again = cli(tmp_path, "--multirun", *search, *own, *SMALL, timeout=60)
    assert again.returncode == 0 and len(sweep.status()) == 3, again.stderr
    assert all(len(sweep.run(i).events("submitted")) == 1 for i in range(3))
