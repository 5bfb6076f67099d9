"""The weights of a sharded model on one rank: their plain names, their seeds, and copying whole tensors into them."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that activation checkpointing inserts."""
    return name.replace("_checkpoint_wrapped_module.", "")


def seed_of(seed: int, name: str) -> int:
    """Return the seed of a part of a model, which depends only on the run's seed and the part's name."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest(), "big")


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers by plain name; tied weights appear under each of their names."""
    weights = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {plain_name(name): tensor for name, tensor in weights}


def copy_local_part(target: Tensor, whole: Any) -> None:
    """Copy this rank's part of a whole tensor, or of anything indexed like one, into a parameter or buffer."""
    part: tuple[slice, ...] = ()
    if isinstance(target, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
        part = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        target = target.to_local()
    with torch.no_grad():
        target.copy_(whole[part])
