"""The device mesh of a layout, and the check that it may be trusted with checkpoints."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_jobs.plan.layout import Layout


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The mesh of a layout over all ranks in ascending order.

    Raises:
        RuntimeError: the layout is for another world, or a rank's place in the mesh differs from its
            rank in the group. (DCP addresses shards by mesh coordinates and process groups sort their
            ranks: where the two disagree, training works and checkpoints are silently wrong.)
    """
    if layout.world_size != dist.get_world_size():
        raise RuntimeError(f"the layout is for {layout.world_size} ranks, the world has {dist.get_world_size()}")
    shape = layout.mesh_shape
    mesh = init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for dim, place in enumerate(coordinate):
        if place != dist.get_rank(mesh.get_group(dim)):
            raise RuntimeError(f"mesh row {torch.as_tensor(mesh.mesh).tolist()} is out of rank order in dim {dim}")
    return mesh
