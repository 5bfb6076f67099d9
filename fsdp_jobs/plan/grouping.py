"""Group nodes into shard groups: neighbours, inside the smallest unit that holds a whole group."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from fsdp_jobs.plan.topology import Topology


@dataclass(frozen=True)
class Placement:
    """Where the shard groups of one size go: runs of consecutive used nodes, or equal parts of a node."""

    group: int  # ranks
    used: tuple[int, ...]  # indices in the topology of the nodes that hold ranks, ascending
    spares: tuple[int, ...]  # nodes that complete no group
    inside: str  # what no group leaves: domain, node, leaf, switch-K, all
    crossing: int  # groups that lie under more than one leaf switch


def divisors(n: int) -> list[int]:
    """Return all divisors of n, ascending."""
    low = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})


def group_sizes(topology: Topology, per_node: int, nvlink_domain: int) -> list[int]:
    """List the shard group sizes, in ranks, that are worth considering, ascending.

    Parts of an NVLink domain or of a node; whole nodes that divide a domain, a leaf switch, a higher
    switch or the whole; and powers of two of nodes, which fill a large odd number of nodes except a few spares.
    """
    total = len(topology.nodes)
    within = {d for d in divisors(per_node) if nvlink_domain % d == 0 or d == per_node}
    node_counts = {2**k for k in range(total.bit_length()) if 2**k <= total}
    for level in topology.levels(domain_nodes(per_node, nvlink_domain)):
        for size in set(topology.units(level, domain_nodes(per_node, nvlink_domain))):
            node_counts.update(divisors(size))
    return sorted(within | {per_node * k for k in node_counts})


def domain_nodes(per_node: int, nvlink_domain: int) -> int:
    """Return the whole nodes that one NVLink domain spans; 1 when it is no larger than a node."""
    return max(1, nvlink_domain // per_node)


def place(topology: Topology, group: int, per_node: int, nvlink_domain: int) -> Placement | None:
    """Place groups of `group` ranks on these nodes; None when they cannot be formed.

    The level is the innermost one with a unit that holds a whole group. When filling unit by unit leaves more
    spares than filling straight through, groups are laid straight and some cross.
    """
    total = len(topology.nodes)
    if per_node % group == 0:
        inside = "domain" if nvlink_domain % group == 0 else "node"
        return Placement(group, tuple(range(total)), (), inside, 0)
    if group % per_node:
        return _straight(topology, group, per_node) if total * per_node % group == 0 else None
    count = group // per_node
    if count > total:
        return None
    spans = domain_nodes(per_node, nvlink_domain)
    for level in topology.levels(spans):
        sizes = topology.units(level, spans)
        if max(sizes) < count:
            continue
        filled = sum(size // count * count for size in sizes)
        if filled < total // count * count:
            continue  # filling straight through, or a larger unit, leaves fewer spares
        used: list[int] = []
        for first, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
            used.extend(range(first, first + size // count * count))
        return _with_spares(topology, group, count, used, level)
    return None  # never reached: `all` is a level


def _straight(topology: Topology, group: int, per_node: int) -> Placement:
    """Place consecutive ranks over all nodes: groups are neither whole nodes nor even parts of one."""
    nodes = topology.nodes
    leaf = topology.leaf_numbers
    starts = range(0, len(nodes) * per_node, group)
    crossing = sum(leaf[s // per_node] != leaf[(s + group - 1) // per_node] for s in starts)
    return Placement(group, tuple(range(len(nodes))), (), "all", crossing)


def _with_spares(topology: Topology, group: int, count: int, used: list[int], level: str) -> Placement:
    leaf, total = topology.leaf_numbers, len(topology.nodes)
    crossing = sum(leaf[used[i]] != leaf[used[i + count - 1]] for i in range(0, len(used), count))
    spares = tuple(sorted(set(range(total)).difference(used))) if len(used) < total else ()
    return Placement(group, tuple(used), spares, level, crossing)
