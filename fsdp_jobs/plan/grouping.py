"""Group nodes into shard groups: neighbours, inside the smallest unit that holds a whole group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from fsdp_jobs.config.errors import Problem
from fsdp_jobs.config.resolve import ranks_per_node
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.plan.topology import Topology


@dataclass(frozen=True)
class Placement:
    """Where the shard groups of one size go: runs of consecutive used nodes, or equal parts of a node."""

    group: int  # ranks
    used: tuple[int, ...]  # indices in the topology of the nodes that hold ranks, ascending
    spares: tuple[int, ...]  # nodes that complete no group
    inside: str  # unit that holds each group: domain, node, leaf, switch-K, all
    crossing: int  # groups that lie under more than one leaf switch


def divisors(n: int) -> list[int]:
    """Return all divisors of n, ascending."""
    low = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})


class Grouping:
    """The ways to group a job's ranks on these nodes."""

    def __init__(self, config: JobConfig, topology: Topology):
        self.topology = topology
        self.per_node = ranks_per_node(config)
        self.world = len(topology.nodes) * self.per_node
        gpus = config.hardware.gpus_per_node
        domain = config.hardware.nvlink_domain or gpus
        nodes = max(1, domain // gpus)  # of a domain, even if a node has fewer ranks than GPUs
        self._domain = nodes * self.per_node if domain >= gpus else domain  # ranks
        self._units = topology.units(nodes)

    def sizes(self) -> list[int]:
        """List the shard group sizes, in ranks, that are worth considering, ascending.

        Parts of an NVLink domain or of a node; whole nodes that divide a domain, a leaf switch, a higher
        switch or the whole; and powers of two of nodes, which fill a large odd number of nodes except a few spares.
        """
        within = {d for d in divisors(self.per_node) if self._domain % d == 0 or d == self.per_node}
        node_counts = {2**k for k in range(len(self.topology.nodes).bit_length())}
        node_counts.update(*map(divisors, {size for sizes in self._units.values() for size in sizes}))
        return sorted(within | {self.per_node * k for k in node_counts})

    def place(self, group: int) -> Placement | None:
        """Place groups of `group` ranks; None if they cannot be formed.

        The level is the innermost one whose units, filled one by one, leave no more spares than filling all nodes in
        a row. If only a larger unit leaves so few, some groups cross.
        """
        total, nodes = len(self.topology.nodes), range(len(self.topology.nodes))
        if self.per_node % group == 0:
            is_part = self._domain < self.per_node and self._domain % group == 0
            return self._placement(group, nodes, "domain" if is_part else "node")
        if group % self.per_node:  # neither whole nodes nor even parts of one
            return self._placement(group, nodes, "all") if self.world % group == 0 else None
        count = group // self.per_node
        for level, sizes in self._units.items() if count <= total else ():
            if sum(size // count * count for size in sizes) == total // count * count:
                starts = zip(accumulate(sizes, initial=0), sizes, strict=False)
                filled = (range(first, first + size // count * count) for first, size in starts)
                return self._placement(group, list(chain.from_iterable(filled)), level)
        return None

    def impossible(self, group: int | str) -> Problem:
        """Return the problem that groups of this size cannot be formed, with the nearest sizes that can."""
        divides = (g for g in range(1, self.world + 1) if self.per_node % g == 0 or g % self.per_node == 0)
        near = sorted(sorted(divides, key=lambda g: abs(g - int(group)))[:4])
        what = f"cannot be formed on {len(self.topology.nodes)} nodes x {self.per_node} ranks"
        return Problem(f"fsdp.shard_group={group}", what, f"nearest sizes: {', '.join(map(str, near))}")

    def _placement(self, group: int, used: Sequence[int], inside: str) -> Placement:
        nodes, per_node = self.topology.nodes, self.per_node
        leaf = [nodes[i].switch_path for i in used]
        firsts = range(0, len(used) * per_node, group) if per_node % group else ()  # ranks
        crossing = sum(leaf[first // per_node] != leaf[(first + group - 1) // per_node] for first in firsts)
        spares = sorted(set(range(len(nodes))).difference(used)) if len(used) < len(nodes) else ()
        return Placement(group, tuple(used), tuple(spares), inside, crossing)
