"""Old runs are removed, and nothing else."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from fsdp_jobs.config.schema import load_config
from fsdp_jobs.run.directory import RunDir, write_atomic
from fsdp_jobs.run.identity import identity_of
from tests.jobs import cli
from tests.recorded import of_sweep, recorded_run

_DAY_S = 86400


def _aged(run: RunDir, days: float) -> RunDir:
    at = time.time() - days * _DAY_S
    for file in (*run.path.rglob("*"), run.path):
        os.utime(file, (at, at))
    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    runs = tmp_path / "runs"
    elsewhere = recorded_run(runs, "old")
    elsewhere.config.write_text(elsewhere.config.read_text().replace("  dir: null", f"  dir: {tmp_path}/elsewhere", 1))
    (tmp_path / "elsewhere" / "old" / "step-00000010").mkdir(parents=True)
    (tmp_path / "elsewhere" / "other").mkdir()
    _aged(elsewhere, 40)
    _aged(recorded_run(runs, "young"), 10)
    going = recorded_run(runs, "going")
    lines = going.events.read_text().splitlines(keepends=True)
    going.events.write_text("".join(line for line in lines if "attempt_ended" not in line))
    write_atomic(going.job, json.dumps({**going.read_job(), "handle": "local_fsdp://elsewhere/going"}))
    _aged(going, 40)
    theirs = recorded_run(runs, "theirs")
    of_me = json.loads(identity_of(theirs, load_config(theirs.config)).to_json())
    write_atomic(theirs.identity, json.dumps({**of_me, "uid": 4242, "user": "somebody"}))
    _aged(theirs, 40)
    for number in range(2):
        _aged(of_sweep(recorded_run(runs, f"tuned-{number:03d}"), "tuned", [f"optim.lr={number}"]), 40)
    with (runs / "tuned-001" / "metrics.jsonl").open("a") as f:
        f.write(json.dumps({"step": 20, "loss": 0.001, "time": 1.0}) + "\n")
    _aged(RunDir(runs / "tuned-001"), 40)
    return tmp_path


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "runs").iterdir()}


def test_only_old_runs_of_ones_own_that_have_ended_go_and_are_shown_first(folder: Path) -> None:
    before = names(folder)
    shown = cli(folder, "prune", "--older-than", "30d", "--keep-best")
    assert shown.returncode == 0 and "2 runs, " in shown.stdout and "would be removed" in shown.stdout, shown
    assert names(folder) == before and (folder / "elsewhere" / "old").exists()
    done = cli(folder, "prune", "--older-than", "30d", "--keep-best", "--yes")
    assert done.returncode == 0 and before - names(folder) == {"old", "tuned-000"}, done
    assert {path.name for path in (folder / "elsewhere").iterdir()} == {"other"}
    assert cli(folder, "prune", "--older-than", "30d", "--yes").returncode == 0
    assert names(folder) == {"young", "going", "theirs"}


@pytest.mark.parametrize("args", [["--older-than", "30"], []])
def test_an_age_without_a_unit_is_refused(tmp_path: Path, args: list[str]) -> None:
    done = cli(tmp_path, "prune", *args)
    assert done.returncode == 2 and "Nothing was done" in done.stderr
