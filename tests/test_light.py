"""What a user waits for at the prompt does not import torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_jobs.run.directory import RunDir
from tests.jobs import environment
from tests.world import TINY

_SCRIPT = """
import sys
from fsdp_jobs.cli.main import main
code = main(sys.argv[1:])
heavy = sorted({m.partition(".")[0] for m in sys.modules} & {"torch", "transformers", "kubernetes", "mlflow", "wandb"})
print("HEAVY", heavy)
sys.exit(code)
"""


def _run(folder: Path, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *args],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment(folder),
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["plan"],
        ["plan", "--json", "model=llama3_70b", "hardware=h100", "nodes=4"],
        ["dry_run=true"],
        ["--multirun", "seed=1,2", "dry_run=true"],
        ["list"],
        ["--cfg", "job"],
    ],
)
def test_no_torch_at_the_prompt(tmp_path: Path, args: list[str]) -> None:
    assert "HEAVY []" in _run(tmp_path, *args)


@pytest.mark.integration
def test_no_torch_in_a_detached_submit_nor_in_what_follows_it(tmp_path: Path) -> None:
    few = [*TINY, "nodes=1", "nproc_per_node=1", "steps=2"]
    assert "HEAVY []" in _run(tmp_path, "name=light", "attach=false", *few)
    assert "HEAVY []" in _run(tmp_path, "status", "light")
    assert "HEAVY []" in _run(tmp_path, "logs", "-f", "light")
    assert "HEAVY []" in _run(tmp_path, "cancel", "light")
    assert RunDir(tmp_path / "runs" / "light").verdict(0).exists()


def test_help_names_every_verb_and_group(tmp_path: Path) -> None:
    shown = _run(tmp_path, "--help")
    for word in (
        "plan",
        "status",
        "logs",
        "cancel",
        "list",
        "resume",
        "export",
        "fsdp=hybrid_shard",
        "model=llama3_8b",
    ):
        assert word in shown
