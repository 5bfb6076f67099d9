"""The layout of a job whose model is the user's program's: by the topology and the user's words alone."""

from __future__ import annotations

from fsdp_jobs.config.resolve import ranks_per_node
from fsdp_jobs.config.schema import AUTO, JobConfig
from fsdp_jobs.plan.grouping import Placement, place
from fsdp_jobs.plan.layout import HYBRID, Layout
from fsdp_jobs.plan.topology import Topology
from fsdp_jobs.run.env import LAYOUT_ENV


def decide(config: JobConfig, topology: Topology) -> tuple[Layout, Placement, list[str]]:
    """Layout, where its groups go, and the reasons.

    `auto` is full_shard over all ranks: what takes the least memory, and uses any number of nodes. A hybrid's group
    is one node unless the user says otherwise.
    """
    per_node, domain = ranks_per_node(config), config.hardware.nvlink_domain
    world = len(topology.nodes) * per_node
    strategy, group = config.fsdp.strategy, config.fsdp.shard_group
    if strategy == AUTO:
        strategy = "no_shard" if group == 1 else "full_shard" if group in (AUTO, world) else "hybrid_shard"
    if strategy == "no_shard":
        group = 1
    elif strategy not in HYBRID:
        group = world
    elif group == AUTO:
        group = per_node
    placement = place(topology, group, per_node, domain)
    if placement is None:  # at run time, with fewer nodes than the group wants
        strategy, group = "full_shard", world
        placement = place(topology, group, per_node, domain)
        assert placement is not None
    layout = Layout(strategy, len(placement.used) * per_node, placement.group)
    reasons = [_why(config, layout, per_node)]
    if placement.spares:
        reasons.append(f"{len(placement.spares)} nodes complete no shard group and stand by as spares.")
    return layout, placement, reasons


def _why(config: JobConfig, layout: Layout, per_node: int) -> str:
    given = config.fsdp.strategy != AUTO or config.fsdp.shard_group != AUTO
    asked = "As asked" if given else "Nothing is known of the model, so each rank holds as little of it as can be"
    over = f"over {layout.shard_group} ranks" if layout.shard_group > 1 else "on every rank"
    node = ", a node" if layout.strategy in HYBRID and layout.shard_group == per_node else ""
    return f"{asked}: {layout.strategy} {over}{node}. The program has it in {LAYOUT_ENV}."
