"""Sums of what a rank holds and its replicas must hold, too, for its agent: computed where the tensors are."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from fsdp_jobs.checkpoints.state import State
from fsdp_jobs.checkpoints.tensors import is_as_planned, local
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.run.agreement import write_sums
from fsdp_jobs.run.env import RANK_STATE_ENV

_BLOCK = 1 << 22  # elements at once, each of which takes 16 bytes meanwhile
_BLOCK_CPU = 1 << 16  # so that they stay in the cache: five times as fast
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by size in bytes


def tell_sums(state: State, layout: Layout, step: int, rank: int) -> None:
    """Tell this rank's agent, if it has one, what it holds after `step` steps, if that is what the layout says."""
    tensors = state.to_compare() if RANK_STATE_ENV in os.environ else {}
    if tensors and all(is_as_planned(tensor, layout) for tensor in tensors.values()):
        sums = [checksum(local(tensor)).to(state.device, non_blocking=True) for tensor in tensors.values()]
        values = torch.stack(sums).tolist()
        write_sums(step, rank, {name: f"{value:x}" for name, value in zip(tensors, values, strict=True)})


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits times odd numbers that grow, modulo 2^64: one flipped bit changes it always."""
    bits = tensor.detach().contiguous().flatten()
    bits = bits.view(_BITS.get(bits.element_size(), torch.int64))
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    size = _BLOCK_CPU if bits.device.type == "cpu" else _BLOCK
    for begin in range(0, bits.numel(), size):
        block = bits[begin : begin + size]
        odd = torch.arange(2 * begin + 1, 2 * (begin + len(block)), 2, device=bits.device)
        total += odd.mul_(block).sum()
    return total
