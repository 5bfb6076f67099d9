"""Snapshots as tensors: description, memory, and metadata for DCP's planner."""

from __future__ import annotations

import math
from mmap import mmap
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
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
    return Entry(
        name, kind, [*shape], [*offsets], [*own.shape], own.numel() * own.element_size(), is_alone, 0, is_replicated
    )


class Place(NamedTuple):
    """Where a part of a tensor is."""

    name: str  # of the snapshot
    entry: Entry


def metadata_of(snapshots: dict[str, Snapshot]) -> Metadata:
    """Describe snapshots for DCP's planner; a part that several hold is read from the first."""
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, Place] = {}
    for name, snapshot in snapshots.items():
        for entry in snapshot.entries:
            about = TensorProperties(dtype=getattr(torch, entry.dtype))
            tensor = tensors.setdefault(entry.name, TensorStorageMetadata(about, torch.Size(entry.shape), []))
            index = MetadataIndex(entry.name, entry.offsets)
            if entry.bytes and index not in places:
                places[index] = Place(name, entry)
                tensor.chunks.append(ChunkStorageMetadata(torch.Size(entry.offsets), torch.Size(entry.sizes)))
    return Metadata(dict(tensors), storage_data=places)


def address_of(data: mmap) -> int:
    """Return a mapped file's address."""
    return torch.frombuffer(data, dtype=torch.uint8).data_ptr()


def mapped(file: Path) -> mmap:
    """Map a file into memory."""
    with file.open("r+b") as f:
        return mmap(f.fileno(), 0)


def view(data: mmap, entry: Entry) -> Tensor:
    """Return a tensor that shares the mapped file's memory."""
    kind = getattr(torch, entry.dtype)
    return torch.frombuffer(data, dtype=kind, count=math.prod(entry.sizes), offset=entry.begin).view(entry.sizes)


def part_of(data: mmap, entry: Entry, item: ReadItem) -> Tensor:
    """Return the part of a snapshot's tensor that an item of DCP's plan reads."""
    return narrow_tensor_by_index(view(data, entry), item.storage_offsets, item.lengths)
