"""Predict the bytes a step sends within and between nodes: rings of consecutive ranks, as NCCL and gloo run.

A ring over S ranks sends, from each rank, (S-1)/S of an all-gather's or reduce-scatter's whole tensor and
twice that of an all-reduce's (Patarasuk and Yuan 2009; nccl-tests' PERFORMANCE.md). Of G consecutive ranks on
a node, one sends over the node's edge and G - 1 within. gloo has no ring reduce-scatter: it runs an
all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_jobs.config.schema import FsdpConfig
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.plan.memory import DTYPE_BYTES
from fsdp_jobs.plan.shapes import ModelShape

BACKENDS = ("nccl", "gloo")


@dataclass(frozen=True)
class RingBytes:
    """Bytes that one rank sends to its neighbour in a ring, by collective."""

    gather_forward: float  # per microbatch
    gather_backward: float  # per microbatch
    reduce: float  # per reduction over the shard group
    all_reduce: float  # over the replicas, once a step
    gathers: int  # microbatches in a step
    reductions: int  # shard-group reductions in a step

    @property
    def shard_ring(self) -> float:
        """Return the bytes a rank sends to its neighbour in the shard group in a step."""
        return (self.gather_forward + self.gather_backward) * self.gathers + self.reduce * self.reductions


@dataclass(frozen=True)
class Traffic:
    """Bytes that one node sends in an optimizer step."""

    intra_node: float  # inside it, and over an NVLink domain of several nodes
    inter_node: float


def ring_bytes(
    shape: ModelShape, layout: Layout, fsdp: FsdpConfig, param_bytes: int, microbatches: int, backend: str = "nccl"
) -> RingBytes:
    """Count what one rank sends in a step, by collective.

    Blocks are gathered for forward and, when resharded, again for backward; the root once. Gradients are
    reduced over the shard group once a step with `accumulate_unsharded`, else in each microbatch; over the
    replicas once. Frozen parameters have none.
    """
    group, replicas = layout.shard_group, layout.replicas
    b_r = DTYPE_BYTES[fsdp.reduce_dtype]
    shard = shape.shard_numel(group)
    blocks = sum(b.shard_numel(group) * b.count for b in shape.blocks)
    ring = group - 1  # each rank passes on this many shards
    gradients = shard * shape.trained * b_r  # bytes
    reduce_cost = 2 if backend == "gloo" else 1
    return RingBytes(
        gather_forward=ring * shard * param_bytes,
        gather_backward=ring * blocks * param_bytes if layout.reshard_after_forward else 0,
        reduce=ring * gradients * reduce_cost,
        all_reduce=2 * (replicas - 1) / replicas * gradients,
        gathers=microbatches,
        reductions=1 if layout.accumulate_unsharded or group == 1 else microbatches,
    )


Hops = tuple[float, float, float, float]  # shard ring within and between nodes, replica ring within and between


def hops(layout: Layout, ranks_per_node: int, in_domain: bool) -> Hops:
    """Count the ranks per node that send to a rank of the same node, and of another, in topology order.

    These are means over the nodes if a group is neither an even part of a node nor whole nodes. With `in_domain` a
    shard group's nodes reach each other over NVLink, as if they were one.
    """
    group, per_node = layout.shard_group, ranks_per_node
    nodes = -(-layout.world_size // per_node)
    if per_node % group == 0 or in_domain:
        shard_inter = 0.0
    elif group % per_node == 0:
        shard_inter = 1.0
    else:
        touched = [(g * group + group - 1) // per_node - g * group // per_node + 1 for g in range(layout.replicas)]
        shard_inter = sum(t for t in touched if t > 1) / nodes
    shard_intra = 0.0 if group == 1 else per_node - shard_inter
    if layout.replicas == 1:
        return shard_intra, shard_inter, 0.0, 0.0
    replica_inter = 0.0 if nodes == 1 else float(min(group, per_node))
    return shard_intra, shard_inter, per_node - replica_inter, replica_inter


def node_traffic(ring: RingBytes, at: Hops) -> Traffic:
    """Count the bytes that each node sends in a step when ranks are in topology order."""
    s_intra, s_inter, r_intra, r_inter = at
    return Traffic(
        intra_node=s_intra * ring.shard_ring + r_intra * ring.all_reduce,
        inter_node=s_inter * ring.shard_ring + r_inter * ring.all_reduce,
    )
