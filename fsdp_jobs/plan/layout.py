"""The layout of a sharded job: how the ranks of a world form shard groups and replicas.

Ranks are assigned in topology order, so a shard group is a run of consecutive ranks:
group i holds ranks [i * shard_group, (i + 1) * shard_group), and rank r belongs to replica r // shard_group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_jobs.run.record import Record

WHOLE = ("full_shard", "shard_grad_op")  # one shard group: the world
HYBRID = ("hybrid_shard", "hybrid_shard_zero2")


def only_group(strategy: str, world: int) -> int | None:
    """Return the only shard group size of a strategy over `world` ranks; None if the size may be chosen."""
    return 1 if strategy == "no_shard" else world if strategy in WHOLE else None


def shard_dim(shape: Sequence[int], group: int) -> int:
    """Return the dimension on which a parameter is sharded over `group` ranks.

    It is the first one, except for a parameter that stacks fewer matrices, such as experts, than there are ranks: each
    rank would store a whole matrix, or padding of that size. FSDP2 pads only the first dimension, so another one must
    be divisible by the group.
    """
    if len(shape) < 3 or shape[0] >= group:
        return 0
    return next((dim for dim in range(1, len(shape)) if shape[dim] % group == 0), 0)


def partners(nodes: int) -> list[int | None]:
    """Return, for each node of a round in network order, the node that gets its copies; None if there is no other.

    Nodes half the list apart form pairs, so a pair shares a switch only if more than half of all nodes do; an odd
    node forms a ring of three with the first pair. Pairs lose less than a ring if two nodes are lost at once
    (Z. Wang et al.: GEMINI, SOSP 2023).
    """
    half = nodes // 2
    of: list[int | None] = [(i + half) % (2 * half) if half else None for i in range(nodes)]
    if nodes % 2 and half:
        of[0], of[half], of[-1] = half, nodes - 1, 0
    return of


@dataclass(frozen=True)
class Layout(Record):
    """A decided sharding. world_size = replicas x shard_group.

    `shard_group` is 1 for no_shard and the world for full_shard and shard_grad_op.
    """

    strategy: str
    world_size: int
    shard_group: int
    accumulate_unsharded: bool = False  # gradients stay whole, and nothing is sent, before a step's last microbatch
    chunked_loss: bool | None = None  # the loss never holds all logits at once; None: not planned

    @property
    def replicas(self) -> int:
        return self.world_size // self.shard_group

    @property
    def reshard_after_forward(self) -> bool:
        """Whether gathered parameters are freed between forward and backward (ZeRO-3)."""
        return self.strategy in ("full_shard", "hybrid_shard")

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Device-mesh dimensions by name, outermost first."""
        if self.strategy in WHOLE:
            return {"shard": self.world_size}
        return {"replicate": self.replicas, "shard": self.shard_group}
