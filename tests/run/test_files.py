"""Paths that other machines are given, and folders that cannot be listed."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import pytest

from fsdp_jobs.config.data import text_files
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import as_written


def test_paths_keep_the_names_of_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, home = tmp_path / "volumes" / "me", tmp_path / "home"
    real.mkdir(parents=True)
    home.symlink_to(real)
    monkeypatch.chdir(home)
    monkeypatch.setenv("PWD", str(home))
    assert as_written("runs") == home / "runs" and as_written(".") == home
    assert as_written(home / "runs") == home / "runs" and as_written("/else/where") == Path("/else/where")
    assert as_written("../runs") == tmp_path / "volumes" / "runs", "as the kernel has it: `home` is a link"
    monkeypatch.setenv("PWD", str(tmp_path))
    assert as_written("runs") == real / "runs", "the shell was elsewhere"
    monkeypatch.delenv("PWD")
    assert as_written("runs") == real / "runs"


def test_attempts_that_cannot_be_listed_are_not_said_to_be_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node would leave its job for that; pathlib's glob ignores such errors, since Python 3.13 all of them."""
    run = RunDir(tmp_path)
    assert run.last_attempt() == -1
    for name in ("2", "10", "notes"):
        (tmp_path / "attempts" / name).mkdir(parents=True)
    assert run.last_attempt() == 10

    def closed(folder: object = ".") -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    monkeypatch.setattr(os, "scandir", closed)
    monkeypatch.setattr(os, "listdir", closed)
    with pytest.raises(PermissionError):
        run.last_attempt()


@pytest.mark.parametrize(("code", "is_passed_over"), [(errno.EACCES, True), (errno.ESTALE, False)])
def test_a_data_set_is_no_smaller_for_a_folder_that_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_passed_over: bool
) -> None:
    """One that is closed to this user, as lost+found, is not part of it."""
    for name in ("a.txt", "more/b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert text_files(str(tmp_path)) == [tmp_path / "a.txt", tmp_path / "more" / "b.txt"]
    scandir = os.scandir

    def fails(folder: Any) -> Any:
        if Path(folder).name == "more":
            raise OSError(code, os.strerror(code), str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", fails)
    with nullcontext() if is_passed_over else pytest.raises(OSError, match="Stale"):
        assert text_files(str(tmp_path)) == [tmp_path / "a.txt"]
