"""GPUs of this machine, as the driver and CUDA_VISIBLE_DEVICES show them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import cli


@pytest.mark.parametrize("visible", ["", "0,1,2"])
def test_ranks_that_would_find_no_gpu_are_refused_before_anything_starts(tmp_path: Path, visible: str) -> None:
    asked = ("name=gpus", "nodes=2", "nproc_per_node=2", "cluster.accelerator=cuda")
    done = cli(tmp_path, *asked, CUDA_VISIBLE_DEVICES=visible)
    shown = len(visible.split(",")) if visible else 0
    assert done.returncode == 2, done.stderr
    assert f"2 x 2 ranks need a GPU each; this machine shows {shown}" in done.stderr
    assert not (tmp_path / "runs").exists()
