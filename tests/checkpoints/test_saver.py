"""Asynchronous copies of a state, one after the other."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from fsdp_jobs.checkpoints.saver import _Stager


def test_five_copies_in_a_row_with_a_stager_that_is_emptied_after_each_as_torch_2_11_does_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = DefaultStager._stage

    def emptied(self: DefaultStager, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        copied = whole(self, state)
        self._state_dict_stager.close()
        return copied

    monkeypatch.setattr(DefaultStager, "_stage", emptied)
    stager = _Stager(StagingOptions(False, False, True, False))
    for step in range(5):
        copied = stager.stage({"weight": torch.full((4,), float(step))})
        assert copied.result()["weight"].tolist() == [step] * 4  # type: ignore[union-attr]
    stager.close()
