"""The topology of a job's nodes: blocks > leaf switches > nodes > NVLink domains > GPUs.

A node is located by its switch path, outermost switch first: `("block1", "leaf3")`. Nodes are kept in
topology order, so that neighbours in the list are neighbours on the network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import groupby


@lru_cache(maxsize=1 << 16)
def natural_key(name: str) -> tuple[tuple[bool, int, str], ...]:
    """Return a sort key under which node2 comes before node10."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((not p.isdigit(), int(p) if p.isdigit() else 0, p) for p in parts)


@dataclass(frozen=True)
class Node:
    """One machine. `nvlink` names an NVLink domain that it shares with other nodes; empty: its own."""

    name: str
    switch_path: tuple[str, ...] = ()  # outermost first; the last is the leaf switch
    gpus: int = 8
    nvlink: str = ""


def _order(node: Node) -> tuple[object, ...]:
    path = tuple(natural_key(s) for s in node.switch_path)
    return (path, natural_key(node.nvlink), natural_key(node.name))


@dataclass(frozen=True)
class Topology:
    """The nodes in topology order. Make one with `Topology.of`, which sorts."""

    nodes: tuple[Node, ...]
    _units: dict[tuple[str, int], list[int]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, nodes: Iterable[Node]) -> Topology:
        """Sort into topology order.

        Raises:
            ValueError: two nodes of one name.
        """
        ordered = tuple(sorted(nodes, key=_order))
        seen: set[str] = set()
        for node in ordered:
            if node.name in seen:
                raise ValueError(f"node {node.name} is named twice")
            seen.add(node.name)
        return cls(ordered)

    @classmethod
    def flat(cls, nodes: int | Sequence[str], gpus: int = 8) -> Topology:
        """Put all nodes under one switch: given by number (node1, node2, ...) or by name."""
        names = [f"node{i + 1}" for i in range(nodes)] if isinstance(nodes, int) else nodes
        return cls.of(Node(n, (), gpus) for n in names)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(n.name for n in self.nodes)

    def first(self, count: int) -> Topology:
        """Return the first `count` nodes in topology order."""
        return Topology(self.nodes[:count])

    def units(self, level: str, domain_nodes: int = 1) -> list[int]:
        """Return the sizes, in nodes, of the consecutive units of a level, in topology order.

        Args:
            level: `domain` (NVLink domains), `leaf`, or `switch-K` for the switches K levels above a
                leaf; `all` is the whole.
            domain_nodes: nodes of one NVLink domain where nodes do not name theirs (NVL72: 18 x 4 GPUs).
        """
        known = self._units.get((level, domain_nodes))
        if known is None:
            known = self._units[level, domain_nodes] = self._count(level, domain_nodes)
        return known

    def _count(self, level: str, domain_nodes: int) -> list[int]:
        if level == "all":
            return [len(self.nodes)]
        if level == "domain":
            return self._domains(domain_nodes)
        above = 0 if level == "leaf" else int(level.removeprefix("switch-"))
        switches = groupby(self.nodes, key=lambda n: n.switch_path[: max(0, len(n.switch_path) - above)])
        return [len(list(nodes)) for _, nodes in switches]

    def levels(self, domain_nodes: int = 1) -> list[str]:
        """List the levels that hold more than one node, innermost first: domain, leaf, switch-1, ..., all."""
        depth, names_domains = self._depth
        switches = ["leaf", *(f"switch-{k}" for k in range(1, depth))] if depth else []
        return [*(["domain"] if domain_nodes > 1 or names_domains else []), *switches, "all"]

    @cached_property
    def _depth(self) -> tuple[int, bool]:
        """Return the most switches above a node, and whether nodes name NVLink domains."""
        return max((len(n.switch_path) for n in self.nodes), default=0), any(n.nvlink for n in self.nodes)

    @cached_property
    def leaf_numbers(self) -> list[int]:
        """Number the leaf switches, and return each node's."""
        numbers: dict[tuple[str, ...], int] = {}
        return [numbers.setdefault(n.switch_path, len(numbers)) for n in self.nodes]

    def _domains(self, domain_nodes: int) -> list[int]:
        sizes = []
        for (_, nvlink), run in groupby(self.nodes, key=lambda n: (n.switch_path, n.nvlink)):
            count = len(list(run))
            size = count if nvlink else domain_nodes
            sizes += [min(size, count - first) for first in range(0, count, size)]
        return sizes


def expand_hostlist(text: str) -> list[str]:
    """Expand SLURM's compact form: `node[1-3,07],login` is node1 node2 node3 node07 login.

    Raises:
        ValueError: an open bracket or a range that runs backwards.
    """
    names: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text.strip()):
        names += _expand(item.strip())
    if text.count("[") != text.count("]"):
        raise ValueError(f"hostlist {text}: a bracket is open")
    return names


def _expand(item: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", item)
    if match is None:
        return [item] if item else []
    head, tail = item[: match.start()], _expand(item[match.end() :]) or [""]
    values: list[str] = []
    for part in match.group(1).split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            raise ValueError(f"hostlist {item}: {part} is neither a number nor low-high")
        if dash and int(high) < int(low):
            raise ValueError(f"hostlist {item}: {part} runs backwards")
        width = len(low) if low.startswith("0") else 0
        values += [str(v).zfill(width) for v in range(int(low), int(high if dash else low) + 1)]
    return [f"{head}{v}{t}" for v in values for t in tail]
