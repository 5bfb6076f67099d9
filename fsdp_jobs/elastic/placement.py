"""Agents as the coordinator knows them, and the places that a plan gives them. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.resolve import node_range, ranks_per_node
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.elastic.protocol import Message
from fsdp_jobs.plan.plan import Plan, make_plan, regroup
from fsdp_jobs.plan.remedies import remedies
from fsdp_jobs.plan.shapes import ModelShape, shape_of
from fsdp_jobs.plan.sources import from_kubernetes, from_yaml
from fsdp_jobs.plan.topology import Node, Topology
from fsdp_jobs.run.directory import RunDir


@dataclass
class Member:
    """One connected agent."""

    node: int
    host: str
    address: str
    nproc: int
    switches: list[str]  # outermost first; empty when unknown
    agent: str  # id of its process
    send: Callable[[Message], None]
    drop: Callable[[], None]
    heard: float  # monotonic time of its last message
    ready: bool = False
    in_round: bool = False
    ended: bool = False
    ranks: list[list[int]] = field(default_factory=list)  # [step, committed, phase] a local rank; -1: said nothing


def known_places(run: RunDir) -> dict[str, Node]:
    """Read where machines are, by name: from the user's topology file, or from Kubernetes' labels at submission."""
    if run.topology.exists():
        topology = from_yaml(run.topology.read_text())
    elif run.node_labels.exists():
        topology = from_kubernetes(json.loads(run.node_labels.read_text()))
    else:
        return {}
    return {node.name: node for node in topology.nodes}


class Seating:
    """Plans with the agents that are there."""

    def __init__(self, config: JobConfig, run: RunDir):
        self.config = config
        self.max_nodes = node_range(config.nodes)[1]
        self.shape = ModelShape.from_json(run.shape.read_text()) if run.shape.exists() else None
        self.places = known_places(run)

    def plan(self, ready: Sequence[Member], shard_group: int) -> tuple[Plan, dict[str, Member]]:
        """The plan with at most `max_nodes` of these, and who is meant by its names.

        Args:
            shard_group: of the round before, 0 for the first.

        Raises:
            BadInput: a sharding that cannot be on these nodes.
        """
        by_name = {f"{m.host}/{m.node}": m for m in sorted(ready, key=lambda m: m.node)[: self.max_nodes]}
        present = [self._place(name, m) for name, m in by_name.items()]
        if shard_group:
            return regroup(self.config, present, shard_group, self.shape), by_name
        return make_plan(self.config, Topology.of(present), shape=self.shape), by_name

    def put_to_work(self, members: Sequence[Member], shard_group: int) -> int:
        """How many of these nodes a round would use: spares alone complete no group."""
        present = [self._place(f"{m.host}/{m.node}", m) for m in members[: self.max_nodes]]
        try:
            return len(regroup(self.config, present, shard_group, self.shape).nodes)
        except BadInput:
            return 0

    def _place(self, name: str, member: Member) -> Node:
        """Where a node is: as `known_places` says, else as the cluster told the node."""
        known = self.places.get(member.host)
        if known is not None:
            return replace(known, name=name, gpus=member.nproc)
        return Node(name, tuple(member.switches), member.nproc)

    def what_would_fit(self, nodes: int) -> str:
        """What to change when ranks run out of memory: the plan's remedies, or its settings that take less."""
        shape = self.shape or shape_of(self.config)
        if shape is None:
            return "The plan does not know the program's model"
        found = remedies(self.config, shape, Topology.flat(nodes, ranks_per_node(self.config)))
        tried = " or ".join(" ".join(r.overrides) for r in found[:3])
        return f"The plan says that less memory is taken with {tried}" if tried else "The plan knows nothing smaller"
