"""Find settings that are better than those asked for; each is planned before it is offered.

Remedies make an oversized job fit. Advice is for a job that fits: one sentence each, only if there is any.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import yaml

from fsdp_jobs.config.keys import AUTO
from fsdp_jobs.config.resolve import accelerator, ranks_per_node
from fsdp_jobs.config.schema import RECOMPUTED, JobConfig
from fsdp_jobs.plan.choose import NEAR, Option, choose, device_of, options_of, price
from fsdp_jobs.plan.grouping import Grouping, divisors
from fsdp_jobs.plan.layout import HYBRID
from fsdp_jobs.plan.shapes import ModelShape
from fsdp_jobs.plan.topology import Topology
from fsdp_jobs.run.table import size

ACTIVATION_OFFLOAD = "fsdp.activation_offload=true"
NO_OFFLOAD = "fsdp.cpu_offload=false"
COSTLY = (ACTIVATION_OFFLOAD, "fsdp.cpu_offload=true", "fsdp.master_dtype=bf16_stochastic")
CHECKPOINTING = ("fsdp.activation_checkpointing=selective", "fsdp.activation_checkpointing=full")
MOST_NODES = 4096  # no larger number of nodes is tried
WORTH_SAYING = 1.03  # tokens/s relative to the plan's


@dataclass(frozen=True)
class Remedy:
    """Overrides that were planned and fit."""

    overrides: tuple[str, ...]
    result: str


def remedies(config: JobConfig, shape: ModelShape, topology: Topology) -> list[Remedy]:
    """List what fits on the nodes present: one setting, else the fewest together; then more GPUs, more nodes.

    Nodes are offered where the settings that cost neither precision nor host memory do not suffice together: alone, or
    with all of these settings.
    """
    changes, tried = _changes(config), partial(_tried, config, shape, topology)
    is_offloaded = config.fsdp.activation_checkpointing != "none"
    singles = [o for o in changes if is_offloaded or o != ACTIVATION_OFFLOAD]
    found = [r for override in singles for r in tried([override])] or _together(changes, tried)
    if accelerator(config) == "cpu":
        return found
    per_node = config.hardware.gpus_per_node
    if ranks_per_node(config) < per_node and all(not n.switch_path or n.gpus >= per_node for n in topology.nodes):
        found = found + tried([f"nproc_per_node={per_node}"])
    if config.fsdp.cpu_offload and choose(config, shape, topology).option.over <= 0:  # what is full is the host
        found = found + (tried([NO_OFFLOAD]) or _nodes_needed(config, [NO_OFFLOAD], shape, topology))
    mild = list({_key(o): o for o in changes if o not in COSTLY}.values())  # the last of each key
    if tried(mild):
        return found
    return found + (_nodes_needed(config, [], shape, topology) or _nodes_needed(config, mild, shape, topology))


def _changes(config: JobConfig) -> list[str]:
    """List overrides that need less memory than the job's settings, mildest first."""
    fsdp = config.fsdp
    changes = {
        "fsdp=auto": fsdp.strategy != AUTO,
        "fsdp.shard_group=auto": fsdp.shard_group != AUTO,
        "fsdp.accumulate_unsharded=false": fsdp.accumulate_unsharded is True,
        "fsdp.chunked_loss=true": fsdp.chunked_loss is False,
        "fsdp.activation_checkpointing=selective": fsdp.activation_checkpointing == "none",
        "fsdp.activation_checkpointing=full": fsdp.activation_checkpointing != "full",
        "data.micro_batch=1": config.data.micro_batch > 1,
        ACTIVATION_OFFLOAD: not fsdp.activation_offload,
        "fsdp.cpu_offload=true": not fsdp.cpu_offload,
        "fsdp.master_dtype=bf16_stochastic": fsdp.master_dtype == "fp32",
    }
    return [override for override, takes_less in changes.items() if takes_less]


def _together(changes: list[str], tried: Callable[[list[str]], list[Remedy]]) -> list[Remedy]:
    """Add settings, mildest first, until the job fits; then leave out those that are not needed."""
    taken: list[str] = []
    for override in changes:
        taken = [o for o in taken if _key(o) != _key(override)] + [override]
        if not tried(taken):
            continue
        for other in [o for o in taken if o not in CHECKPOINTING]:
            fewer = [o for o in taken if o != other]
            taken = fewer if fewer and tried(fewer) else taken
        return tried(taken)
    return []


def _key(override: str) -> str:
    return override.partition("=")[0]


def with_overrides(config: JobConfig, overrides: list[str]) -> JobConfig:
    """Apply overrides of the few forms that remedies and advice have."""
    for override in overrides:
        key, _, text = override.partition("=")
        group, _, name = key.partition(".")
        value = yaml.safe_load(text)
        if name:
            value = replace(getattr(config, group), **{name: value})
        elif group == "fsdp":
            value = replace(config.fsdp, strategy=AUTO)
        config = replace(config, **{group: value})
    return config


def _tried(
    config: JobConfig, shape: ModelShape, topology: Topology, overrides: list[str], *further: str
) -> list[Remedy]:
    """Plan with overrides; the topology already follows the `further` ones. Returns the remedy if the job fits."""
    option = choose(with_overrides(config, overrides), shape, topology).option
    if not option.fits:
        return []
    host = f", {size(option.memory.host)} of host memory per rank" if option.memory.host else ""
    result = f"{option.name}: {size(option.memory.total)} per {device_of(config)}{host}{option.closeness}"
    return [Remedy((*overrides, *further), result)]


def _nodes_needed(config: JobConfig, overrides: list[str], shape: ModelShape, topology: Topology) -> list[Remedy]:
    """Find the smallest number of nodes, all under one switch, on which the job fits: doubling, then halving."""

    def tried(nodes: int) -> list[Remedy]:
        flat = Topology.flat(nodes, ranks_per_node(config))
        return _tried(config, shape, flat, overrides, f"nodes={nodes}")

    few, many = len(topology.nodes), 2 * len(topology.nodes)
    while not tried(many):
        few, many = many, 2 * many
        if many > MOST_NODES:
            return []
    return tried(bisect_left(range(many), True, few + 1, key=lambda nodes: bool(tried(nodes))))


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
        yield from _faster(config, shape, topology, option)


def _fewer_nodes(config: JobConfig, shape: ModelShape, topology: Topology, option: Option) -> Iterator[str]:
    """Compare with a half, a quarter, ... of the nodes: over a slow network fewer can be faster."""
    asked, nodes = len(topology.nodes), len(topology.nodes) // 2
    best, least = option, asked
    fewest = 2 if config.fsdp.strategy in HYBRID else 1  # ranks
    while nodes * ranks_per_node(config) >= fewest and config.fsdp.shard_group == AUTO:
        other = choose(config, shape, topology.first(nodes)).option
        if not other.fits:
            break
        if other.time.tokens_per_s > best.time.tokens_per_s:
            best, least = other, nodes
        nodes //= 2
    if best.time.tokens_per_s > WORTH_SAYING * option.time.tokens_per_s:
        speeds = f"{best.time.tokens_per_s:,.0f} tokens/s predicted, {option.time.tokens_per_s:,.0f} on {asked}"
        yield f"Fewer nodes are faster: nodes={least} gives {speeds}."


def _faster(config: JobConfig, shape: ModelShape, topology: Topology, option: Option) -> Iterator[str]:
    """Try other microbatches and recomputation, and no offload, which do not change a step's gradients.

    They are tried on the sharding taken, and on the fastest one if it does not fit as asked: more recomputation pays
    where it keeps gathers off a slow network. Of those that fit well and are within 3% of the fastest, suggest the one
    that takes the least memory.
    """
    fsdp, data = config.fsdp, config.data
    samples = -(-data.global_batch // option.layout.world_size)
    changes = (
        [f"data.micro_batch={m}" for m in divisors(samples) if m > data.micro_batch],
        [f"fsdp.activation_checkpointing={k}" for k in RECOMPUTED if k != fsdp.activation_checkpointing],
        ["fsdp.activation_offload=false"] if fsdp.activation_offload else [],
        [NO_OFFLOAD] if fsdp.cpu_offload else [],
    )
    options = options_of(config, shape, Grouping(config, topology), fsdp.strategy, fsdp.shard_group)
    tried = (option, min(options, key=lambda o: o.time.step))
    shardings = dict.fromkeys((o.layout.strategy, o.placement) for o in tried)
    found: list[tuple[Option, list[str]]] = []
    for (strategy, placement), chosen in product(shardings, product(*(["", *overrides] for overrides in changes))):
        overrides = [override for override in chosen if override]
        other = with_overrides(config, overrides)
        if other.fsdp.activation_offload and other.fsdp.activation_checkpointing == "none":
            continue  # only the inputs of recomputed blocks are offloaded
        priced = price(other, shape, strategy, placement)
        if priced.fits_well:
            found.append((priced, overrides))
    if not found:
        return
    shortest = min(priced.time.step for priced, _ in found)
    near = [(priced, overrides) for priced, overrides in found if priced.time.step <= NEAR * shortest]
    _, overrides = min(near, key=lambda it: it[0].memory.total)
    if not overrides:
        return
    best = choose(with_overrides(config, overrides), shape, topology).option
    if best.fits and best.time.tokens_per_s > WORTH_SAYING * option.time.tokens_per_s:
        speeds = f"{best.time.tokens_per_s:,.0f} tokens/s predicted, {option.time.tokens_per_s:,.0f} as asked"
        yield f"Other settings are faster: {' '.join(overrides)} gives {speeds}."
