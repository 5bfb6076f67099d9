"""Suggest settings that are better than those asked for, one sentence each, only if there are any."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from fsdp_jobs.config.keys import AUTO
from fsdp_jobs.config.resolve import ranks_per_node
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.plan.choose import CLOSE, NEAR, Option, choose, device_of, price, usable_bytes
from fsdp_jobs.plan.grouping import divisors
from fsdp_jobs.plan.layout import HYBRID
from fsdp_jobs.plan.remedies import with_overrides
from fsdp_jobs.plan.shapes import ModelShape
from fsdp_jobs.plan.topology import Topology

WORTH_SAYING = 1.03  # tokens/s relative to the plan's
LESS_RECOMPUTED = {"full": ("none", "selective", "every_n"), "every_n": ("none", "selective"), "selective": ("none",)}


def advice(config: JobConfig, shape: ModelShape, topology: Topology, option: Option) -> Iterator[str]:
    """Yield how a plan that fits wastes resources: nodes, ranks without samples, an uneven batch, memory."""
    batch, world = config.data.global_batch, option.layout.world_size
    device = device_of(config)
    if batch < world:
        yield f"{world - batch} of {world} {device}s get no sample: data.global_batch={world} has one for each."
    elif batch % world:
        even = batch // world * world
        counts = f"Some of {world} {device}s get {batch // world + 1} samples, others {batch // world}"
        yield f"{counts} and wait: data.global_batch={even} or {even + world} is even."
    yield from _fewer_nodes(config, shape, topology, option)
    if config.fsdp.objective == "speed":
        yield from _room(config, shape, topology, option)


def _fewer_nodes(config: JobConfig, shape: ModelShape, topology: Topology, option: Option) -> Iterator[str]:
    """Compare with a half, a quarter, ... of the nodes: over a slow network fewer can be faster."""
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


def _room(config: JobConfig, shape: ModelShape, topology: Topology, option: Option) -> Iterator[str]:
    """Try larger microbatches, less recomputation and no offload, which do not change a step's gradients.

    Of those that fit well and are within 3% of the fastest, suggest the one that takes the least memory.
    """
    fsdp, data = config.fsdp, config.data
    samples = -(-data.global_batch // option.layout.world_size)
    changes = (
        [f"data.micro_batch={m}" for m in divisors(samples) if m > data.micro_batch],
        [f"fsdp.activation_checkpointing={kept}" for kept in LESS_RECOMPUTED.get(fsdp.activation_checkpointing, ())],
        ["fsdp.activation_offload=false"] if fsdp.activation_offload else [],
        ["fsdp.cpu_offload=false"] if fsdp.cpu_offload else [],
    )
    found: list[tuple[Option, JobConfig, list[str]]] = []
    for chosen in product(*(["", *overrides] for overrides in changes)):
        overrides = [override for override in chosen if override]
        other = with_overrides(config, overrides)
        if other.fsdp.activation_offload and other.fsdp.activation_checkpointing == "none":
            continue  # what is offloaded are the inputs of recomputed blocks
        priced = price(other, shape, option.layout.strategy, option.placement)
        if priced.fits and priced.memory.total <= CLOSE * usable_bytes(config.hardware):
            found.append((priced, other, overrides))
    if not found:
        return
    fastest = min(priced.time.step for priced, _, _ in found)
    near = [it for it in found if it[0].time.step <= NEAR * fastest]
    _, better, overrides = min(near, key=lambda it: it[0].memory.total)
    best = choose(better, shape, topology).option if overrides else None
    if best is not None and best.fits and best.time.tokens_per_s > WORTH_SAYING * option.time.tokens_per_s:
        speeds = f"{best.time.tokens_per_s:,.0f} tokens/s predicted, {option.time.tokens_per_s:,.0f} as asked"
        yield f"There is memory left: {' '.join(overrides)} gives {speeds}."
