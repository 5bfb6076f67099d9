"""Snapshots as tensors: description, memory, and metadata for DCP's planner."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fsdp_jobs.checkpoints.tensors import local
from fsdp_jobs.tiers.memory.slots import Entry, Snapshot


def entry_of(name: str, tensor: Tensor, is_alone: bool, is_replicated: bool) -> Entry:
    """Describe this rank's part of a tensor."""
    shape, offsets = tuple(tensor.shape), (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        _, offsets = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    own, kind = local(tensor), str(tensor.dtype).removeprefix("torch.")
    return Entry(name, kind, [*shape], [*offsets], [*own.shape], own.nbytes, is_alone, 0, is_replicated)


def metadata_of(snapshots: dict[str, Snapshot]) -> Metadata:
    """Describe snapshots by name for DCP's planner: a part is at (name, entry); of several that hold it, the first."""
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, tuple[str, Entry]] = {}
    for name, snapshot in snapshots.items():
        for entry in snapshot.entries:
            about = TensorProperties(dtype=getattr(torch, entry.dtype))
            tensor = tensors.setdefault(entry.name, TensorStorageMetadata(about, torch.Size(entry.shape), []))
            index = MetadataIndex(entry.name, entry.offsets)
            if entry.bytes and index not in places:
                places[index] = name, entry
                tensor.chunks.append(ChunkStorageMetadata(torch.Size(entry.offsets), torch.Size(entry.sizes)))
    return Metadata(dict(tensors), storage_data=places)


def mapped(file: Path) -> Tensor:
    """Map a file into memory, as bytes that are only read."""
    # With `shared` it would make a file that is gone meanwhile, of zeros.
    return torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8, device="cpu")


def view(data: Tensor, entry: Entry) -> Tensor:
    """Return a tensor that shares the bytes of a snapshot's data."""
    return data.narrow(0, entry.begin, entry.bytes).view(getattr(torch, entry.dtype)).view(entry.sizes)
