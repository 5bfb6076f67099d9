"""A damaged file of a run is named, with a cure, and other runs do not suffer by it."""

from __future__ import annotations

import errno
import json
import os
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from fsdp_jobs.cli.main import main
from fsdp_jobs.config.errors import Damaged
from fsdp_jobs.config.schema import load_config
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.identity import identity_of
from fsdp_jobs.run.verdict import FINAL_ERRORS
from fsdp_jobs.submit.stop import stop
from tests.jobs import environment
from tests.recorded import recorded_run


def _two_runs(folder: Path, damaged: str) -> RunDir:
    """Record a sound run, and a newer one with a damaged file; return that one."""
    for name in ("sound", "cut"):
        run = recorded_run(folder, name)
        write_atomic(run.identity, identity_of(run, load_config(run.config)).to_json())
        job = {"handle": f"local_fsdp://elsewhere/{name}", "overrides": [], "nodes": "2", "steps": 20}
        write_atomic(run.job, json.dumps(job))
    (run.path / damaged).write_text('{"half of')
    return run


@pytest.mark.parametrize("damaged", ["job.json", "identity.json", "config.yaml", "plan.json"])
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["status", "nodes=2"], "sound  done"),
        (["prune", "--older-than", "0m"], "sound  done"),
        (["plan"], "FITS"),
        (["wait", "sound"], "sound done"),
    ],
)
def test_it_hides_no_other_run(
    tmp_path: Path, damaged: str, args: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _two_runs(tmp_path, damaged)
    assert main([*args, f"runs_dir={tmp_path}"]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["status", "logs", "export", "cancel"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ENOTCONN])
def test_a_mount_that_does_not_answer_is_named(
    tmp_path: Path, verb: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _two_runs(tmp_path, "events.jsonl")
    read = Path.read_text

    def fail(self: Path) -> str:
        if self == run.job:
            raise OSError(code, os.strerror(code), str(self))
        return read(self)

    monkeypatch.setattr(Path, "read_text", fail)
    assert main([verb, "cut", f"runs_dir={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert f"{run.job}: {os.strerror(code)}" in error and "check its disk or mount" in error


@pytest.mark.parametrize("code", [errno.EACCES, errno.ESTALE])
def test_checkpoints_that_cannot_be_listed_hide_nothing_else(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They may be a link to storage of their own."""
    run = recorded_run(tmp_path)
    listed = Path.iterdir

    def fail(self: Path) -> Iterator[Path]:
        if self == run.checkpoints:
            raise OSError(code, os.strerror(code), str(self))
        return listed(self)

    monkeypatch.setattr(Path, "iterdir", fail)
    assert main(["status", run.name, f"runs_dir={tmp_path}"]) == 0
    assert "\ngoodput " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "unreadable"),
    [
        *((args, "job.json") for args in (["status", "cut"], ["logs", "cut"], ["resume", "cut"], ["wait", "cut"])),
        (["report", "cut"], "config.yaml"),
        (["export", "cut"], "config.yaml"),
        (["status", "cut"], "plan.json"),
    ],
)
def test_a_file_that_opens_and_cannot_be_read_is_named(
    tmp_path: Path, args: list[str], unreadable: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of read() names no file."""
    file = _two_runs(tmp_path, unreadable).path / unreadable
    file.unlink()
    file.symlink_to("/proc/self/mem")  # whose first byte is an error of input
    assert main([*args, f"runs_dir={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert f"{file}: {os.strerror(errno.EIO)}" in error and "check its disk or mount" in error
    main(["status", "--json", f"runs_dir={tmp_path}"])
    assert unreadable != "job.json" or f"{os.strerror(errno.EIO)}: '{file}'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "damaged"),
    [
        (["status", "cut"], "job.json"),
        (["status", "cut"], "identity.json"),
        (["wait", "cut"], "identity.json"),
        (["export", "cut"], "config.yaml"),
        (["resume", "cut", "steps=30", "dry_run=true"], "job.json"),
        (["resume", "cut", "steps=30", "dry_run=true"], "identity.json"),
        (["resume", "cut", "steps=30", "dry_run=true"], "config.yaml"),
    ],
)
def test_a_command_that_needs_it_names_the_file(
    tmp_path: Path, args: list[str], damaged: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _two_runs(tmp_path, damaged)
    assert Damaged.__name__ in FINAL_ERRORS, "a job that meets it is not repeated"
    main([*args, f"runs_dir={tmp_path}"])
    assert f"{run.path / damaged}: damaged: " in "".join(capsys.readouterr())


def test_a_configuration_without_the_kind_of_model_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded_run(tmp_path)
    for left in ("steps: 20\n", "model: 5\n", "model:\n  layers: 2\n"):
        run.config.write_text(left)
        assert main(["export", run.name, f"runs_dir={tmp_path}"]) == 2
        assert f"{run.config}: damaged: model.kind is not in it" in capsys.readouterr().err


@pytest.mark.parametrize("config", ["steps: 20\n", "elastic: 3\n", "half of"])
def test_a_job_whose_configuration_its_program_has_replaced_can_be_stopped(tmp_path: Path, config: str) -> None:
    run = _two_runs(tmp_path, "plan.json")
    run.config.write_text(config)
    write_atomic(run.job, json.dumps({"handle": f"local_fsdp://{platform.node()}/cut"}))
    stop([run])
    assert run.stop_request.exists()


def test_a_report_shows_what_is_left_of_a_damaged_configuration(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    run.config.write_bytes(b"steps: 20\n\xff\xfe")
    assert main(["report", run.name, f"runs_dir={tmp_path}"]) == 0
    assert "steps: 20" in run.report.read_text()


def test_a_store_that_does_not_answer_is_named_and_its_run_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its run directory nothing finds the checkpoints in the store again."""
    run = recorded_run(tmp_path)
    run.config.write_text(run.config.read_text().replace("  dir: null", "  dir: s3://nobodys/runs", 1))
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    assert main(["export", run.name, f"runs_dir={tmp_path}"]) == 2
    assert "checkpoint.dir=s3://nobodys/runs: cannot be read: NoCredentialsError" in capsys.readouterr().err
    assert main(["prune", "--older-than", "0m", "--yes", f"runs_dir={tmp_path}"]) == 1
    told = capsys.readouterr()
    assert f"not removed: s3://nobodys/runs/{run.name}: NoCredentialsError" in told.err and "removed 0 runs" in told.out
    assert run.config.exists()


@pytest.mark.parametrize("args", [["status"], ["logs"], ["prune", "--older-than", "1d"], ["status", "x*"]])
def test_a_folder_of_runs_that_cannot_be_listed_is_not_said_to_hold_none(
    tmp_path: Path, args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is another user's, whose folders are closed to others."""
    recorded_run(tmp_path)
    iterdir = Path.iterdir

    def closed(path: Path) -> Iterable[Path]:
        if path == tmp_path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", closed)
    assert main([*args, f"runs_dir={tmp_path}"]) == 2
    assert f"{tmp_path}: Permission denied" in capsys.readouterr().err


def test_a_checkpoint_that_its_job_removes_before_it_is_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fsdp_jobs.hub import export

    run = recorded_run(tmp_path)
    monkeypatch.setattr(export, "_choose", lambda run, *_: run.checkpoints / "step-00000010")
    assert main(["export", run.name, f"runs_dir={tmp_path}"]) == 1
    assert "cannot be read" in (told := capsys.readouterr().err) and "If its job has removed it" in told
