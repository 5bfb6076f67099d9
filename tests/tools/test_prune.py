"""Old runs are removed, and nothing else."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from fsdp_jobs.cli.main import main
from fsdp_jobs.config.schema import load_config
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.identity import identity_of
from fsdp_jobs.tools.prune import old_runs, remove
from tests.jobs import called
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


def test_a_run_that_is_being_written_is_not_looked_into(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its temporary files come and go."""
    looked_into, look = [], Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda self, *a, **k: [looked_into.append(self.name), *look(self, *a, **k)][1:])
    list(old_runs(str(folder / "runs"), 30 * _DAY_S, []))
    assert "old" in looked_into and "going" not in looked_into


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "runs").iterdir()}


def test_only_old_runs_of_ones_own_that_have_ended_go_and_are_shown_first(folder: Path) -> None:
    before = names(folder)
    shown = called(folder, "prune", "--older-than", "30d", "--keep-best")
    assert shown.returncode == 0 and "2 runs, " in shown.stdout and "would be removed" in shown.stdout, shown
    assert names(folder) == before and (folder / "elsewhere" / "old").exists()
    done = called(folder, "prune", "--older-than", "30d", "--keep-best", "--yes")
    assert done.returncode == 0 and before - names(folder) == {"old", "tuned-000"}, done
    assert {path.name for path in (folder / "elsewhere").iterdir()} == {"other"}
    assert called(folder, "prune", "--older-than", "30d", "--yes").returncode == 0
    assert names(folder) == {"young", "going", "theirs"}


def test_what_else_lies_in_the_folder_of_checkpoints_stays_and_is_named(folder: Path) -> None:
    home = folder / "elsewhere" / "old"
    for name in ("step-00000020.0-1-2.tmp", "step-00000005.damaged", "terms", "step-00000001-figures"):
        (home / name).mkdir()
    (home / "thesis.txt").write_text("of years")
    (home / "identity.json").symlink_to(folder / "runs" / "old" / "identity.json")
    done = called(folder, "prune", "--older-than", "30d", "--yes")
    assert done.returncode == 1 and "step-00000001-figures, thesis.txt stays" in done.stderr, done
    assert {path.name for path in home.iterdir()} == {"step-00000001-figures", "thesis.txt"}


@pytest.mark.parametrize("args", [["--older-than", "30"], []])
def test_an_age_without_a_unit_is_refused(tmp_path: Path, args: list[str]) -> None:
    done = called(tmp_path, "prune", *args)
    assert done.returncode == 2 and "Nothing was done" in done.stderr


def test_checkpoints_that_another_run_has_taken_over_stay(folder: Path) -> None:
    old = RunDir(folder / "runs" / "old")
    mine = json.loads(identity_of(old, load_config(old.config)).to_json())
    write_atomic(old.identity, json.dumps(mine))
    _aged(old, 40)
    claimed = folder / "elsewhere" / "old" / "identity.json"
    claimed.write_text(json.dumps({**mine, "id": "another", "directory": "/others/old"}))
    done = called(folder, "prune", "--older-than", "30d", "--yes")
    assert "belongs to a run of" in done.stdout + done.stderr and "/others/old" in done.stdout + done.stderr, done
    assert claimed.exists() and "old" not in names(folder)


@pytest.mark.parametrize("original", ["there", "elsewhere", "moved"])
def test_a_copy_of_a_run_does_not_take_the_checkpoints_of_the_original_with_it(folder: Path, original: str) -> None:
    old, copy = RunDir(folder / "runs" / "old"), RunDir(folder / "copies" / "old")
    identity = json.loads(identity_of(old, load_config(old.config)).to_json())
    write_atomic(old.identity, json.dumps(identity))
    shutil.copytree(old.path, copy.path)
    if original != "there":
        shutil.rmtree(old.path)
    if original == "elsewhere":
        write_atomic(copy.identity, json.dumps({**identity, "host": "cluster"}))
    _aged(copy, 40)
    done = called(folder, "prune", "--older-than", "30d", "--yes", "runs_dir=copies")
    assert not copy.path.exists()
    assert (folder / "elsewhere" / "old" / "step-00000010").exists() == (original != "moved")
    assert ("may be in use by the run that this one is a copy of" in done.stderr) == (original != "moved"), done


def test_a_run_behind_a_link_goes_with_its_link(folder: Path) -> None:
    (folder / "big").mkdir()
    (folder / "runs" / "tuned-000").rename(folder / "big" / "tuned")
    (folder / "runs" / "tuned-000").symlink_to(folder / "big" / "tuned")
    done = called(folder, "prune", "--older-than", "30d", "--yes")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert not list((folder / "big").iterdir()) and names(folder) == {"young", "going", "theirs"}


def test_what_is_being_removed_is_no_run(folder: Path) -> None:
    (folder / "runs" / "young").rename(folder / "runs" / ".pruned-young")
    assert "pruned" not in called(folder, "status").stdout


@pytest.mark.parametrize("linked", ["", "runs", "runs/old"])
def test_what_an_interrupted_prune_has_left_goes_with_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch, linked: str
) -> None:
    (folder / "big").mkdir()
    if linked:
        (folder / linked).rename(folder / "big" / "there")
        (folder / linked).symlink_to(folder / "big" / "there")
    (old,) = [o for o in old_runs(str(folder / "runs"), 30 * _DAY_S, []) if o.run.name == "old"]
    erase = shutil.rmtree

    def interrupted(path: Path) -> None:
        if path.parent.name != "elsewhere" and path.parent.parent.name != "elsewhere":
            (path / "config.yaml").unlink()
            raise KeyboardInterrupt
        erase(path)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "rmtree", interrupted)
        remove(old)
    (left,) = [name for name in names(folder) if name.startswith(".")]
    shown = called(folder, "prune", "--older-than", "9000d")
    assert left in shown.stdout and left in names(folder), shown
    done = called(folder, "prune", "--older-than", "9000d", "--yes")
    assert done.returncode == 0 and left not in names(folder), done
    assert {path.name for path in (folder / "big").iterdir()} == ({"there"} if linked == "runs" else set())


def test_a_disk_on_which_no_folder_can_be_made_gets_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (old,) = [o for o in old_runs(str(folder / "runs"), 30 * _DAY_S, []) if o.run.name == "old"]
    old.run.submit.mkdir(exist_ok=True)
    make = os.mkdir

    def full(path: str, mode: int = 0o777) -> None:
        if not Path(path).exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        make(path, mode)

    monkeypatch.setattr(os, "mkdir", full)
    assert not remove(old) and "old" not in names(folder)
    assert not [name for name in names(folder) if name.startswith(".")]


def test_a_run_that_is_submitted_meanwhile_stays(folder: Path) -> None:
    runs = folder / "runs"
    (old,) = [o for o in old_runs(str(runs), 30 * _DAY_S, []) if o.run.name == "old"]
    with old.run.locked():
        (problem,) = remove(old)
    assert "another command submits or removes it" in problem
    write_atomic(old.run.job, json.dumps({**old.run.read_job(), "submission": "261124000000-0a1b2c"}))
    assert remove(old) == [f"{old.run.path}: has been submitted again"]
    assert old.run.config.exists() and (folder / "elsewhere" / "old" / "step-00000010").is_dir()


def test_of_what_cannot_be_removed_nothing_goes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (old,) = [o for o in old_runs(str(folder / "runs"), 30 * _DAY_S, []) if o.run.name == "old"]
    theirs = old.run.attempt(0)
    theirs.mkdir(exist_ok=True)
    access = os.access  # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != theirs and access(path, mode))
    assert remove(old) == [f"{theirs}: you may not write there"]
    assert main(["prune", "--older-than", "30d", "--yes", f"runs_dir={folder / 'runs'}"]) == 1
    told = capsys.readouterr()
    assert "removed 2 runs" in told.out and "not removed" in told.err, "the sweep's two"
    assert old.run.config.exists() and (folder / "elsewhere" / "old").is_dir()


def test_of_two_commands_at_once_the_second_finds_nothing_wrong(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (old,) = [o for o in old_runs(str(folder / "runs"), 30 * _DAY_S, []) if o.run.name == "old"]
    assert remove(old) == remove(old) == []
    lstat = Path.lstat
    gone = folder / "runs" / "tuned-000" / "plan.json"
    monkeypatch.setattr(Path, "lstat", lambda self: lstat(self if self != gone else gone.with_name("gone")))
    assert [o.run.name for o in old_runs(str(folder / "runs"), 30 * _DAY_S, [])] == ["tuned-001"]


def test_what_stays_is_named_and_the_others_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS a file that is still open stays."""
    erase = shutil.rmtree

    def busy(path: Path) -> None:
        if path.name.startswith(".pruned-old"):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), "attempts")
        erase(path)

    monkeypatch.setattr(shutil, "rmtree", busy)
    done = called(folder, "prune", "--older-than", "30d", "--yes")
    assert done.returncode == 1 and done.stderr.count("attempts: Directory not empty") == 1, done
    assert "removed 3 runs" in done.stdout and {name[:11] for name in names(folder)} - {".pruned-old"} == {
        "young",
        "going",
        "theirs",
    }
