"""Checkpoints on the nodes' own disks: a node gets what it lacks from its peers, and shared storage has the rest."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch.distributed as dist

from fsdp_jobs.checkpoints.checkpointer import Checkpointer
from fsdp_jobs.run.directory import RunDir
from tests.checkpoints.saving import save_steps, trained, value_of
from tests.world import events_of, run_world


def _of_rank(folder: str, restart: str) -> Checkpointer:
    return trained(folder, restart, local_dir=f"{folder}/node-{dist.get_rank()}")


def _saved(folder: str) -> None:
    checkpoints = _of_rank(folder, "0-0")
    save_steps(checkpoints, 2, 4)
    checkpoints.close()


def _resumed(folder: str) -> tuple[int, float]:
    checkpoints = _of_rank(folder, "0-1")
    return checkpoints.restore(), value_of(checkpoints)


def test_a_node_gets_what_it_lacks_from_its_peers(tmp_path: Path) -> None:
    run_world(2, _saved, str(tmp_path))
    first, second = (next(tmp_path.glob(f"node-{node}/*/step-00000004.*")) for node in range(2))
    shutil.move(second / "__1_0.distcp", first / "__1_0.distcp")  # rank 1's part is on the other node alone
    assert run_world(2, _resumed, str(tmp_path)) == [(4, 4.0), (4, 4.0)]
    for node in range(2):
        shutil.rmtree(tmp_path / f"node-{node}")
    assert run_world(2, _resumed, str(tmp_path)) == [(4, 4.0), (4, 4.0)]
    assert [e["place"] for e in events_of(RunDir(tmp_path), "resumed")] == ["local_dir", "storage"]
