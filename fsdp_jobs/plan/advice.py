"""Say what is better about a job than what was asked for, one sentence each, only where it is so."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_jobs.config.keys import AUTO
from fsdp_jobs.config.resolve import ranks_per_node
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.plan.choose import Option, choose, device_of
from fsdp_jobs.plan.layout import HYBRID
from fsdp_jobs.plan.shapes import ModelShape
from fsdp_jobs.plan.topology import Topology

WORTH_SAYING = 1.03  # tokens/s relative to the plan's


def advice(config: JobConfig, shape: ModelShape, topology: Topology, option: Option) -> Iterator[str]:
    """Yield what a plan that fits wastes: nodes that slow it down, ranks without samples, an uneven batch."""
    batch, world = config.data.global_batch, option.layout.world_size
    device = device_of(config)
    if batch < world:
        yield f"{world - batch} of {world} {device}s get no sample: data.global_batch={world} has one for each."
    elif batch % world:
        even = batch // world * world
        counts = f"some of {world} {device}s get {batch // world + 1} samples, others {batch // world}"
        yield f"{counts} and wait: data.global_batch={even} or {even + world} is even."
    yield from _fewer_nodes(config, shape, topology, option)


def _fewer_nodes(config: JobConfig, shape: ModelShape, topology: Topology, option: Option) -> Iterator[str]:
    """Compare with halves of the nodes: over a slow network fewer can be faster."""
    asked, nodes = len(topology.nodes), len(topology.nodes) // 2
    best, least = option, asked
    fewest = 2 if config.fsdp.strategy in HYBRID else 1  # ranks
    while nodes * ranks_per_node(config) >= fewest and config.fsdp.shard_group == AUTO:
        other = choose(config, shape, topology.first(nodes)).option
        if other is None or not other.fits:
            break
        if other.time.tokens_per_s > best.time.tokens_per_s:
            best, least = other, nodes
        nodes //= 2
    if best.time.tokens_per_s > WORTH_SAYING * option.time.tokens_per_s:
        speeds = f"{best.time.tokens_per_s:,.0f} tokens/s predicted, {option.time.tokens_per_s:,.0f} on {asked}"
        yield f"Fewer nodes are faster: nodes={least} gives {speeds}."
