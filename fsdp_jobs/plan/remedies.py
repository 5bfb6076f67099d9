"""Find settings that make a job fit that does not; each remedy is planned before it is offered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import yaml

from fsdp_jobs.config.keys import AUTO
from fsdp_jobs.config.resolve import ranks_per_node
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.plan.choose import Option, choose
from fsdp_jobs.plan.memory import size
from fsdp_jobs.plan.shapes import ModelShape
from fsdp_jobs.plan.topology import Topology

OFFLOAD = "fsdp.cpu_offload=true"
MOST_NODES = 4096  # no larger number of nodes is tried


@dataclass(frozen=True)
class Remedy:
    """Overrides that were planned and fit."""

    overrides: tuple[str, ...]
    result: str


def remedies(config: JobConfig, shape: ModelShape, topology: Topology) -> list[Remedy]:
    """List what fits: one setting changed, or more nodes; else all together, with offload, with more nodes."""
    changes = list(_changes(config))
    single = [r for override in changes for r in _tried(config, [override], shape, topology)]
    single += _nodes_needed(config, [], shape, topology)
    if single or not changes:
        return single
    strongest = list({o.partition("=")[0]: o for o in changes}.values())  # the last of each key
    mild = [o for o in strongest if o != OFFLOAD]
    together = _tried(config, mild, shape, topology)
    if not together and OFFLOAD in strongest:
        together = _tried(config, strongest, shape, topology)
    return together + _nodes_needed(config, mild, shape, topology)


def _changes(config: JobConfig) -> Iterator[str]:
    """Yield overrides that take less memory than the job's settings, mildest first."""
    fsdp = config.fsdp
    if fsdp.strategy != AUTO or fsdp.shard_group != AUTO:
        yield "fsdp=auto"
    if fsdp.activation_checkpointing == "none":
        yield "fsdp.activation_checkpointing=selective"
    if fsdp.activation_checkpointing != "full":
        yield "fsdp.activation_checkpointing=full"
    if fsdp.accumulate_unsharded is True:
        yield "fsdp.accumulate_unsharded=false"
    if config.data.micro_batch > 1:
        yield "data.micro_batch=1"
    if not fsdp.cpu_offload:
        yield OFFLOAD


def _with(config: JobConfig, overrides: list[str]) -> JobConfig:
    """Apply overrides of the few forms that `_changes` yields."""
    changed: dict[str, dict[str, Any]] = {"fsdp": {}, "data": {}}
    for override in overrides:
        key, _, value = override.partition("=")
        group, _, name = key.partition(".")
        changed[group] |= {name: yaml.safe_load(value)} if name else {"strategy": AUTO, "shard_group": AUTO}
    return replace(config, **{group: replace(getattr(config, group), **values) for group, values in changed.items()})


def _describe(option: Option) -> str:
    host = f", {size(option.memory.host)} of host memory per rank" if option.memory.host else ""
    return f"{option.name}: {size(option.memory.total)} per GPU{host}"


def _tried(config: JobConfig, overrides: list[str], shape: ModelShape, topology: Topology) -> list[Remedy]:
    option = _fitting(_with(config, overrides), shape, topology)
    return [Remedy(tuple(overrides), _describe(option))] if option else []


def _fitting(config: JobConfig, shape: ModelShape, topology: Topology) -> Option | None:
    option = choose(config, shape, topology).option
    return option if option is not None and option.fits else None


def _nodes_needed(config: JobConfig, overrides: list[str], shape: ModelShape, topology: Topology) -> list[Remedy]:
    """Find the smallest number of nodes, all under one switch, on which the job fits: doubling, then halving."""
    changed, per_node, have = _with(config, overrides), ranks_per_node(config), len(topology.nodes)

    def fits(nodes: int) -> Option | None:
        return _fitting(changed, shape, Topology.flat(nodes, per_node))

    low, high = have, 2 * have
    while (option := fits(high)) is None:
        low, high = high, 2 * high
        if high > MOST_NODES:
            return []
    while high - low > 1:
        middle = (low + high) // 2
        if fewer := fits(middle):
            high, option = middle, fewer
        else:
            low = middle
    return [Remedy((*overrides, f"nodes={high}"), _describe(option))]
