"""docs/start/slurm.md, run command by command on the login node of a real SLURM cluster."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launchers.slurm.lab import CLUSTER, Lab
from tests.pages import run_page

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


def without_gpus(line: str) -> str:
    """As the page says for nodes without GPUs; installed is the environment of the tests."""
    if line.startswith("pip "):
        return ""
    return re.sub(r"cluster=slurm", "cluster=slurm cluster.accelerator=cpu hardware=cpu", line)


def test_the_page_for_slurm_runs_as_it_says(lab: Lab, tmp_path: Path) -> None:
    try:
        under = (str(CLUSTER), "run", "login")
        run_page("slurm.md", tmp_path, without_gpus, under, FSDP_JOBS_SLURM=str(lab.folder))
    finally:
        lab.do("run", "login", "scancel", "--user=root", check=False)
        lab.wait_idle()
