"""What a checkpoint holds beside a model's tensors comes back as it was."""

from __future__ import annotations

import random

import numpy as np
import torch

from fsdp_jobs.checkpoints.state import RandomState, _packed, _unpacked


def _draw() -> list[float]:
    return [torch.rand(()).item(), np.random.rand(), np.random.randn(), random.random(), random.gauss(0.0, 1.0)]


def test_random_numbers_go_on_where_they_were() -> None:
    _draw()  # one of a pair of normal numbers is kept for the next call: part of the state
    state = RandomState(torch.device("cpu"))
    saved = _packed("rng", state.state_dict())
    expected = _draw() + _draw()
    state.load_state_dict(_unpacked(saved))
    assert _draw() + _draw() == expected
