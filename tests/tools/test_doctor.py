"""`doctor` on this machine; clusters are examined in the tests of their launchers."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from fsdp_jobs import __version__
from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.tools import doctor
from tests.jobs import cli


def test_this_machine(tmp_path: Path) -> None:
    done = cli(tmp_path, "doctor", "nodes=1", "nproc_per_node=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for words in (f"fsdp_jobs {__version__}, torch {version('torch')}", f"{tmp_path}/runs, ", "/dev/shm", "lo"):
        assert words in done.stdout, done.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 535.1; echo 535.1", "torch [^ ]*, NVIDIA's driver 535.1\n"),
        ("echo NVIDIA-SMI has failed; exit 9", "warning  driver +nvidia-smi: NVIDIA-SMI has failed\n"),
        ("exit 0", "warning  driver +nvidia-smi: prints nothing\n"),
        ("exec sleep 60", "warning  driver +nvidia-smi: no answer within 0 s\n"),
    ],
)
def test_a_simulated_driver_that_is_broken_or_wedged_is_no_end_and_not_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str, said: str
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(doctor, "_DRIVER_S", 0.4 if "sleep" in script else 10.0)
    for finding in doctor.doctor(compose_job([f"runs_dir={tmp_path}/runs"])):
        doctor.show(finding)
    shown = capsys.readouterr().out
    assert re.search(said, shown), shown


def test_a_home_that_is_no_folder_is_no_place_to_submit_from(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    done = cli(tmp_path, "doctor", XDG_STATE_HOME=f"{tmp_path}/state")
    assert done.returncode == 1 and f"submissions     {tmp_path}/state is not a folder" in done.stdout, done


@pytest.mark.parametrize("file", ["train.py", "."])
def test_a_site_file_overwrites_nothing_of_the_users(tmp_path: Path, file: str) -> None:
    (tmp_path / "train.py").write_text("mine")
    done = cli(tmp_path, "doctor", "--save", file)
    assert done.returncode == 2 and f"--save {file}: exists and was not" in done.stderr, done.stderr
    assert (tmp_path / "train.py").read_text() == "mine"


def test_jobs_that_cannot_run_here(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    asked = ("nodes=2", "nproc_per_node=4", "cluster.accelerator=cuda", f"runs_dir={tmp_path}/file/runs")
    done = cli(tmp_path, "doctor", *asked, CUDA_VISIBLE_DEVICES="0,1")
    assert done.returncode == 1, done.stdout
    assert "2 x 4 ranks need a GPU each; this machine shows 2" in done.stdout
    assert f"{tmp_path}/file is not a folder that you may write to" in done.stdout and "-> runs_dir=" in done.stdout
