"""Helpers for tensors of a state: the local part, a checksum, whether it is finite and sharded as planned."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_jobs.plan.layout import Layout

_BLOCK = 1 << 22  # elements at a time; each takes 16 bytes of temporary memory
_BLOCK_CPU = 1 << 16  # fits the cache: five times as fast
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by size in bytes


def is_as_planned(tensor: Tensor, layout: Layout) -> bool:
    """Whether a tensor follows the layout: sharded over groups of consecutive ranks, or replicated."""
    if not isinstance(tensor, DTensor):
        return True
    *outer, inner = tensor.placements
    mesh = tensor.device_mesh.mesh
    is_whole_world = mesh.numel() == layout.world_size and bool((mesh.flatten().diff() == 1).all())
    is_group = mesh.shape[-1] == layout.shard_group or not inner.is_shard()
    return is_whole_world and is_group and not any(p.is_shard() or p.is_partial() for p in outer)


def is_finite(tensor: Tensor, may_be_infinite: bool) -> bool:
    """Whether a restart may use a tensor: no NaN, and no infinity unless `may_be_infinite`."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    values = tensor.float() if tensor.element_size() == 1 else tensor  # 8-bit floats have no comparison
    ends = torch.stack(values.aminmax())  # NaN if there is one
    return not bool((ends.isnan() if may_be_infinite else ~ends.isfinite()).any())


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's words times increasing odd numbers, modulo 2^64: any one flipped bit changes it."""
    bits = tensor.detach().contiguous().resolve_conj().flatten()
    bits = bits.view(_BITS.get(bits.element_size(), torch.int64))
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    size = _BLOCK_CPU if bits.device.type == "cpu" else _BLOCK
    for begin in range(0, bits.numel(), size):
        block = bits[begin : begin + size]
        odd = torch.arange(2 * begin + 1, 2 * (begin + len(block)), 2, device=bits.device)
        total += odd.mul_(block).sum()
    return total


def hexadecimal(sums: Mapping[str, Tensor]) -> dict[str, str]:
    """Return checksums on one device as text; they are copied from there together."""
    values = torch.stack([*sums.values()]).tolist()
    return {name: f"{value:x}" for name, value in zip(sums, values, strict=True)}
