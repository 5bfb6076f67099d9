"""What a step took a rank by itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_jobs.job import timer as timing
from fsdp_jobs.job.timer import StepTimer
from tests.world import run_world


def _timed() -> tuple[float, float, int]:
    """Return what a step of a validation pass took, what one of training did, and how many passes are kept at most."""
    timing._MOST_SPANS = 8
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    timer = StepTimer(torch.device("cpu"))
    timer.watch(fully_shard(model.eval(), mesh=mesh))  # as `from_pretrained` returns them
    times, kept = [], 0
    for is_training in (False, True):
        for _ in range(9):
            with torch.set_grad_enabled(is_training):
                model(torch.ones(1, 8))
        kept = max(kept, len(timer._spans))
        timer.end_step(1.0, 0.0, 0.0, 0.0)
        times.append(timer.compute_s)
    return times[0], times[1], kept


def test_a_validation_pass_is_no_compute_of_a_step_and_what_is_kept_has_a_bound() -> None:
    ((validation_s, training_s, kept),) = run_world(1, _timed)
    assert validation_s == 0 < training_s and kept <= 8


class _Named(nn.Module):
    """Calls its block by keyword, mask first."""

    def __init__(self) -> None:
        super().__init__()
        self.block = _Block()

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.block(mask=torch.ones(3, 3, dtype=torch.bool), hidden=hidden)
        return out


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, mask: Tensor, hidden: Tensor) -> Tensor:
        out: Tensor = self.linear(hidden)
        return out


def _work_of_named() -> tuple[float, float]:
    timing._WARM_UP = 0
    model, mesh = _Named(), init_device_mesh("cpu", (1,))
    fully_shard(model.block, mesh=mesh)
    timer = StepTimer(torch.device("cpu"))
    timer.watch(fully_shard(model, mesh=mesh))
    model(torch.ones(2, 3, 8))
    timer.end_step(1.0, 0.0, 0.0, 0.0)
    return timer.sums.work, timer.sums.attention


def test_the_work_of_blocks_that_are_called_by_keyword_is_known() -> None:
    assert run_world(1, _work_of_named) == [(48.0, 144.0)]
