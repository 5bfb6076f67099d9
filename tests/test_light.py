"""What a user waits for at the prompt does not import torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from fsdp_jobs.cli.main import VERBS, main
from fsdp_jobs.config.groups import groups
from fsdp_jobs.run.directory import RunDir
from tests.jobs import environment
from tests.world import TINY

_SCRIPT = """
import json, sys
from fsdp_jobs.cli.main import main
for args in json.loads(sys.argv[1]):
    assert main(args) == 0, args
    heavy = {m.partition(".")[0] for m in sys.modules} & {"torch", "transformers", "kubernetes", "mlflow", "wandb"}
    assert not heavy, (args, heavy)
"""


def _run(folder: Path, *commands: Sequence[str]) -> str:
    """What commands print, one after the other in one process; none of them imports what takes seconds."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, json.dumps(commands)],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment(folder),
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_no_torch_at_the_prompt(tmp_path: Path) -> None:
    _run(
        tmp_path,
        ["--help"],
        ["plan"],
        ["plan", "--json", "model=llama3_70b", "hardware=h100", "nodes=4"],
        ["dry_run=true"],
        ["--multirun", "seed=1,2", "dry_run=true"],
        ["list"],
        ["--cfg", "job"],
    )


@pytest.mark.integration
def test_no_torch_in_a_detached_submit_nor_in_what_follows_it(tmp_path: Path) -> None:
    few = [*TINY, "nodes=1", "nproc_per_node=1", "steps=2"]
    for command in (
        ["name=light", "attach=false", *few],
        ["status", "light"],
        ["logs", "-f", "light"],
        ["cancel", "light"],
    ):
        _run(tmp_path, command)
    assert RunDir(tmp_path / "runs" / "light").verdict(0).exists()


def test_help_names_every_verb_and_group(tmp_path: Path) -> None:
    shown = _run(tmp_path, ["--help"])
    assert {*VERBS, *groups(), "hybrid_shard", "llama3_8b"} <= {*shown.split()}
    assert len(shown.splitlines()) < 60, "one screen"


def test_help_of_a_group_describes_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["help", "fsdp"], ["fsdp", "--help"]):
        assert main(args) == 0
        assert "  fsdp=no_shard   " in (shown := capsys.readouterr().out) and "cluster" not in shown
