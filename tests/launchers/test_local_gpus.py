"""GPUs of this machine, as the driver and CUDA_VISIBLE_DEVICES show them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_jobs.launchers.local_supervisor import LocalRequest
from fsdp_jobs.run import processes
from fsdp_jobs.run.processes import visible_gpus
from tests.jobs import cli


@pytest.mark.parametrize("visible", ["", "0,1,2"])
def test_ranks_that_would_find_no_gpu_are_refused_before_anything_starts(tmp_path: Path, visible: str) -> None:
    asked = ("name=gpus", "nodes=2", "nproc_per_node=2", "cluster.accelerator=cuda")
    done = cli(tmp_path, *asked, CUDA_VISIBLE_DEVICES=visible)
    shown = len(visible.split(",")) if visible else 0
    assert done.returncode == 2, done.stderr
    assert f"2 x 2 ranks need a GPU each; this machine shows {shown}" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_amds_gpus_are_counted_and_divided_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver lists CPUs, too, as GPU 0, and a laptop's GPU, for which PyTorch need not be built."""
    for node, gpu in enumerate(("0", "0", "42901", "10", "2", "3")):
        folder = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{node}"
        folder.mkdir(parents=True)
        (folder / "gpu_id").write_text(f"{gpu}\n")
    monkeypatch.setattr(processes, "_DRIVERS", tmp_path)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    assert visible_gpus() == []
    monkeypatch.setattr(processes, "is_for_amd", lambda: True)
    assert visible_gpus() == ["0", "1", "2", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert visible_gpus() == []
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "4,6")
    assert visible_gpus() == ["4", "6"]
    for gpus, shares in ((visible_gpus(), ["4", "6"]), ([], ["-1", "-1"])):
        _, *nodes = LocalRequest("run", gpus, {}, [], [[], []], True).processes()
        assert [own["HIP_VISIBLE_DEVICES"] for _, _, own in nodes] == shares
