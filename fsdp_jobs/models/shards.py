"""A sharded parameter seen from one rank: its plain name, the rows it holds, and how a whole tensor gets into it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def plain_name(name: str) -> str:
    """Return a parameter's name without what activation checkpointing put into it."""
    return name.replace("_checkpoint_wrapped_module.", "")


def rows_of(parameter: DTensor) -> tuple[int, int]:
    """Return the rows [first, last) of the whole tensor that this rank holds; it is sharded on dim 0 or replicated."""
    shard_dims = [i for i, p in enumerate(parameter.placements) if p.is_shard()]
    rows = parameter.shape[0] if parameter.ndim else 0
    if not shard_dims:
        return 0, rows
    mesh, dim = parameter.device_mesh, shard_dims[0]
    rows_per_rank = -(-rows // mesh.size(dim))
    first = min(rows, mesh.get_local_rank(dim) * rows_per_rank)
    return first, min(rows, first + rows_per_rank)


def keep_shard(parameter: nn.Parameter, whole: Tensor) -> None:
    """Copy this rank's part of a whole tensor into a parameter."""
    assert isinstance(parameter, DTensor)
    first, last = rows_of(parameter)
    with torch.no_grad():
        parameter.to_local().copy_(whole[first:last] if whole.ndim else whole)
