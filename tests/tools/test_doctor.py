"""`doctor` on this machine; clusters are examined in the tests of their launchers."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from fsdp_jobs import __version__
from tests.jobs import cli


def test_this_machine(tmp_path: Path) -> None:
    done = cli(tmp_path, "doctor", "nodes=1", "nproc_per_node=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for words in (f"fsdp_jobs {__version__}, torch {version('torch')}", f"{tmp_path}/runs, ", "/dev/shm", "lo"):
        assert words in done.stdout, done.stdout
    assert not (tmp_path / "runs").exists()


def test_jobs_that_cannot_run_here(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    asked = ("nodes=2", "nproc_per_node=4", "cluster.accelerator=cuda", f"runs_dir={tmp_path}/file/runs")
    done = cli(tmp_path, "doctor", *asked, CUDA_VISIBLE_DEVICES="0,1")
    assert done.returncode == 1, done.stdout
    assert "2 x 4 ranks need a GPU each; this machine shows 2" in done.stdout
    assert f"{tmp_path}/file is not a folder that you may write to" in done.stdout and "-> runs_dir=" in done.stdout
