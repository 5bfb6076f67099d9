"""The shard groups of a plan, counted out from its layout."""

from __future__ import annotations

from typing import NamedTuple

from fsdp_jobs.plan.plan import Plan


class Group(NamedTuple):
    """One shard group: its first and last rank, and the indices in `Plan.nodes` of its first and last node."""

    first_rank: int
    last_rank: int
    first_node: int
    last_node: int


def groups_of(plan: Plan) -> list[Group]:
    """List the shard groups in rank order."""
    size, per_node = plan.layout.shard_group, plan.ranks_per_node
    spans = ((i * size, (i + 1) * size - 1) for i in range(plan.layout.replicas))
    return [Group(first, last, first // per_node, last // per_node) for first, last in spans]
