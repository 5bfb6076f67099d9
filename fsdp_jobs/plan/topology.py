"""The topology of a job's nodes: blocks > leaf switches > nodes > NVLink domains > GPUs.

A node is located by its switch path, outermost switch first: `("block1", "leaf3")`. Nodes are kept in
topology order, so that neighbours in the list are neighbours on the network.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby


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


@dataclass(frozen=True)
class Topology:
    """The nodes in topology order. Make one with `Topology.of`, which sorts."""

    nodes: tuple[Node, ...]

    @classmethod
    def of(cls, nodes: Iterable[Node]) -> Topology:
        """Sort into topology order.

        Raises:
            ValueError: two nodes have the same name.
        """

        def order(node: Node) -> tuple[object, ...]:
            return tuple(map(natural_key, node.switch_path)), natural_key(node.nvlink), natural_key(node.name)

        ordered = tuple(sorted(nodes, key=order))
        if twice := [name for name, count in Counter(n.name for n in ordered).items() if count > 1]:
            raise ValueError(f"node {twice[0]} is named twice")
        return cls(ordered)

    @classmethod
    def flat(cls, nodes: int, gpus: int = 8) -> Topology:
        """Put nodes named node1, node2, ... under one switch."""
        return cls.of(Node(f"node{i + 1}", (), gpus) for i in range(nodes))

    def first(self, count: int) -> Topology:
        """Return the first `count` nodes in topology order."""
        return Topology(self.nodes[:count])

    def units(self, domain_nodes: int = 1) -> dict[str, list[int]]:
        """Return the levels, innermost first, with the sizes in nodes of their consecutive units in topology order.

        `domain` (NVLink domains), if any spans nodes; `leaf`, and `switch-K` for the switches K levels above a
        leaf, if switches are known; and `all`, the whole.

        Args:
            domain_nodes: nodes of one NVLink domain, for nodes that do not name theirs (NVL72: 18 x 4 GPUs).
        """
        units: dict[str, list[int]] = {}
        if domain_nodes > 1 or any(n.nvlink for n in self.nodes):
            units["domain"] = self._domains(domain_nodes)
        for above in range(max((len(n.switch_path) for n in self.nodes), default=0)):
            switches = groupby(n.switch_path[: max(0, len(n.switch_path) - above)] for n in self.nodes)
            units[f"switch-{above}" if above else "leaf"] = [len(list(under)) for _, under in switches]
        return {**units, "all": [len(self.nodes)]}

    def _domains(self, domain_nodes: int) -> list[int]:
        sizes = []
        for (_, nvlink), run in groupby((n.switch_path, n.nvlink) for n in self.nodes):
            count = len(list(run))
            size = count if nvlink else domain_nodes
            sizes += [min(size, count - first) for first in range(0, count, size)]
        return sizes


def expand_hostlist(text: str) -> list[str]:
    """Expand SLURM's compact form: `node[1-3,07],login` is node1 node2 node3 node07 login.

    Raises:
        ValueError: an open bracket or a range that runs backwards.
    """
    if text.count("[") != text.count("]"):
        raise ValueError(f"hostlist {text}: a bracket is open")
    items = (item.strip() for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text.strip()))
    return [name for item in items if item for name in _expand(item)]


def to_hostlist(names: Sequence[str]) -> str:
    """Return names in SLURM's compact form and in their order: `expand_hostlist` gives them back."""
    runs: list[list[str]] = []  # each: what comes before the number, the first number, the last one
    for name in names:
        number = name[len(name.rstrip("0123456789")) :]
        head = name.removesuffix(number)
        before, _, last = runs[-1] if runs else ("", "", "")
        if last and before == head and number == str(int(last) + 1).zfill(len(last)):
            runs[-1][2] = number
        else:
            runs.append([head, number, number])
    return ",".join(head + (first if first == last else f"[{first}-{last}]") for head, first, last in runs)


def _expand(item: str) -> list[str]:
    head, bracket, rest = item.partition("[")
    if not bracket:
        return [item]
    ranges, _, tail = rest.partition("]")
    values: list[str] = []
    for part in ranges.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            raise ValueError(f"hostlist {item}: {part} is neither a number nor low-high")
        if dash and int(high) < int(low):
            raise ValueError(f"hostlist {item}: {part} runs backwards")
        width = len(low) if low.startswith("0") else 0
        values += [str(v).zfill(width) for v in range(int(low), int(high if dash else low) + 1)]
    return [f"{head}{v}{t}" for v in values for t in _expand(tail)]
