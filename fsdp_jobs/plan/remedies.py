"""Find settings that make a job fit that does not; each remedy is planned before it is offered."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any

import yaml

from fsdp_jobs.config.keys import AUTO
from fsdp_jobs.config.resolve import ranks_per_node
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.plan.choose import choose
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
    changes = _changes(config)
    single = [r for override in changes for r in _tried(config, [override], shape, topology)]
    single += _nodes_needed(config, [], shape, topology)
    if single or not changes:
        return single
    strongest = list({o.partition("=")[0]: o for o in changes}.values())  # the last of each key
    mild = [o for o in strongest if o != OFFLOAD]
    together = _tried(config, mild, shape, topology) or _tried(config, strongest, shape, topology)
    return together + _nodes_needed(config, mild, shape, topology)


def _changes(config: JobConfig) -> list[str]:
    """List overrides that take less memory than the job's settings, mildest first."""
    fsdp = config.fsdp
    changes = {
        "fsdp=auto": fsdp.strategy != AUTO or fsdp.shard_group != AUTO,
        "fsdp.activation_checkpointing=selective": fsdp.activation_checkpointing == "none",
        "fsdp.activation_checkpointing=full": fsdp.activation_checkpointing != "full",
        "fsdp.accumulate_unsharded=false": fsdp.accumulate_unsharded is True,
        "data.micro_batch=1": config.data.micro_batch > 1,
        OFFLOAD: not fsdp.cpu_offload,
    }
    return [override for override, takes_less in changes.items() if takes_less]


def _with(config: JobConfig, overrides: list[str]) -> JobConfig:
    """Apply overrides of the few forms that `_changes` yields."""
    changed: dict[str, dict[str, Any]] = {"fsdp": {}, "data": {}}
    for override in overrides:
        key, _, value = override.partition("=")
        group, _, name = key.partition(".")
        changed[group] |= {name: yaml.safe_load(value)} if name else {"strategy": AUTO, "shard_group": AUTO}
    return replace(config, **{group: replace(getattr(config, group), **values) for group, values in changed.items()})


def _tried(
    config: JobConfig, overrides: list[str], shape: ModelShape, topology: Topology, *further: str
) -> list[Remedy]:
    """Plan with overrides, on a topology that `further` ones make; return the remedy if the job fits."""
    option = choose(_with(config, overrides), shape, topology).option
    if option is None or not option.fits:
        return []
    host = f", {size(option.memory.host)} of host memory per rank" if option.memory.host else ""
    return [Remedy((*overrides, *further), f"{option.name}: {size(option.memory.total)} per GPU{host}")]


def _nodes_needed(config: JobConfig, overrides: list[str], shape: ModelShape, topology: Topology) -> list[Remedy]:
    """Find the smallest number of nodes, all under one switch, on which the job fits: doubling, then halving."""

    def tried(nodes: int) -> list[Remedy]:
        flat = Topology.flat(nodes, ranks_per_node(config))
        return _tried(config, overrides, shape, flat, f"nodes={nodes}")

    few, many = len(topology.nodes), 2 * len(topology.nodes)
    while not tried(many):
        few, many = many, 2 * many
        if many > MOST_NODES:
            return []
    return tried(bisect_left(range(many), True, few + 1, key=lambda nodes: bool(tried(nodes))))
