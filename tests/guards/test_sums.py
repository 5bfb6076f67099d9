"""Sums that see any flipped bit, and checkpoints of which it is known whether replicas held the same bits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from fsdp_jobs.checkpoints import catalog, tensors
from fsdp_jobs.checkpoints.catalog import NOT_AGREED, Manifest
from fsdp_jobs.checkpoints.tensors import checksum
from fsdp_jobs.run.agreement import Known
from fsdp_jobs.run.directory import RunDir
from tests.checkpoints.saving import save_steps, trained, value_of
from tests.world import events_of, run_world


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64, torch.bool])
def test_a_flipped_bit_anywhere_changes_the_sum(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_BLOCK_CPU", 100)
    chance = random.Random(0)
    tensor = torch.frombuffer(bytearray(chance.randbytes(8 * 333)), dtype=torch.uint8).clone()
    if dtype == torch.bool:
        tensor &= 1
    whole = int(checksum(tensor.view(dtype).view(-1, 3)))
    assert whole == int(checksum(tensor.view(dtype))) != int(checksum(tensor.view(dtype).flip(0)))
    for place in chance.sample(range(8 * len(tensor)), 100):
        tensor[place // 8] ^= 1 << place % 8
        assert int(checksum(tensor.view(dtype))) != whole
        tensor[place // 8] ^= 1 << place % 8
    assert int(checksum(tensor.view(dtype))) == whole
    assert int(checksum(torch.empty(0, dtype=dtype))) == 0


def test_what_is_known_of_a_step_is_of_its_round() -> None:
    known = Known(began=4, agreed=8, compared=12, differ=True)
    assert [known.about(step) for step in (3, 4, 5, 8, 9, 12)] == [None, None, True, True, False, False]
    assert Known().about(0) is Known(began=4, agreed=8, compared=8).about(9) is None


def _save(folder: str) -> None:
    checkpoints = trained(folder)
    save_steps(checkpoints, 1, 2, 3, 4)
    checkpoints.close()


def _resume(folder: str, action: str) -> tuple[int, float]:
    checkpoints = trained(folder, "0-1", integrity_action=action)
    step = checkpoints.restore()
    found = value_of(checkpoints)
    save_steps(checkpoints, 5, 6, 7)
    checkpoints.close()
    return step, found


@pytest.mark.parametrize(("action", "step"), [("restart", 2), ("report", 4)])
def test_what_replicas_did_not_agree_on_stays_and_is_not_gone_on_from(tmp_path: Path, action: str, step: int) -> None:
    run_world(1, _save, str(tmp_path))
    home = RunDir(tmp_path).checkpoints
    catalog.mark_agreed(home, Known(began=0, agreed=2, compared=4, differ=True).about)
    catalog.mark_agreed(home, lambda _: True)  # what is known stays
    marks = {catalog.step_of(f): Manifest.read(f).agreed for f in catalog.find_checkpoints(home)}
    assert marks == {4: False, 3: False, 2: True}
    assert catalog.verify(home / "step-00000004") == [], "its files are whole"
    assert run_world(1, _resume, str(tmp_path), action) == [(step, float(step))]
    skipped = [(e["checkpoint"], e["why"]) for e in events_of(RunDir(tmp_path), "checkpoint_skipped")]
    assert skipped == ([(f"step-0000000{s}", [NOT_AGREED]) for s in (4, 3)] if action == "restart" else [])
    left = [catalog.step_of(f) for f in catalog.find_checkpoints(home)]
    assert left == [7, 6, 5, 4, 3], "the newest three, and as many that replicas did not agree on"
