"""Paths that other machines are given."""

from __future__ import annotations

from pathlib import Path

import pytest

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
