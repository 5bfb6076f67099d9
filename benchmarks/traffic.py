"""Bytes that cross the network in an optimizer step, by sharding: predicted for NCCL and gloo, and measured with gloo.

    python benchmarks/traffic.py [--steps 40] [overrides]

Nodes are network namespaces on two leaf switches; what is measured are the byte counters of their links. NCCL
runs the same rings, but its reduce-scatter is one; gloo's costs an all-reduce, which the two predictions tell
apart. Needs root (network namespaces).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # for tests.netns

from fsdp_jobs.config.resolve import param_dtype
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.plan.memory import DTYPE_BYTES
from fsdp_jobs.plan.shape_client import shape_of
from fsdp_jobs.plan.traffic import BACKENDS, ring_bytes
from tests.netns import Fabric, NetnsJob, netns_job, why_not
from tests.plan.rings import sent_by_place

LEAD_IN = 5  # steps before counting begins: start-up has gone by
BIG_ENOUGH = ("model.dim=128", "model.n_layers=4", "model.ffn_dim=384", "data.tokens=40000")  # 3.4 MB of parameters


@dataclass(frozen=True)
class Case:
    """One job to measure: its nodes by leaf switch, and what is asked of it."""

    label: str
    nodes: tuple[str, ...]
    leaves: tuple[str, ...]
    overrides: tuple[str, ...]
    switches: bool = True  # the agents know where they are

    @property
    def rank_order(self) -> list[str]:
        """Nodes in the order of their ranks: by leaf where that is known, else by name."""
        by_name = sorted(self.nodes, key=lambda n: int(n.removeprefix("node")))
        leaf = dict(zip(self.nodes, self.leaves, strict=True))
        return sorted(by_name, key=lambda n: leaf[n]) if self.switches else by_name


TWO = (("node1", "node2"), ("leaf1", "leaf1"))
FOUR = (("node1", "node2", "node3", "node4"), ("leaf1", "leaf1", "leaf2", "leaf2"))
# As text, node1 < node10 < node2 < node20: an order by name takes the leaves in turn.
TEXT_INTERLEAVED = (("node1", "node2", "node10", "node20"), ("leaf1", "leaf1", "leaf2", "leaf2"))
# By number, too: whoever goes by names alone puts one node of each leaf into every group.
INTERLEAVED = (("node1", "node3", "node2", "node4"), ("leaf1", "leaf1", "leaf2", "leaf2"))

FULL, HYBRID = ("fsdp=full_shard",), ("fsdp=hybrid_shard", "fsdp.shard_group=2")
HYBRID_4 = ("fsdp=hybrid_shard", "fsdp.shard_group=4")
CASES = {
    "full 2x2": Case("2 nodes x 2, full_shard", *TWO, FULL),
    "hybrid 2x2": Case("2 nodes x 2, hybrid_shard in the node", *TWO, HYBRID),
    "full 4x2": Case("4 nodes x 2, full_shard", *FOUR, FULL),
    "hybrid 4x2": Case("4 nodes x 2, hybrid_shard in the node", *FOUR, HYBRID),
    "full names": Case("4 nodes x 2, full_shard, names interleave leaves", *INTERLEAVED, FULL),
    "near text": Case("4 nodes x 2, hybrid_shard over 2 nodes, text order interleaves", *TEXT_INTERLEAVED, HYBRID_4),
    "near": Case("4 nodes x 2, hybrid_shard over 2 nodes, names interleave", *INTERLEAVED, HYBRID_4),
    "blind": Case("the same, the topology unknown", *INTERLEAVED, HYBRID_4, switches=False),
}


@dataclass(frozen=True)
class Result:
    """Bytes a step: sent by the mean node, and over the mean leaf switch's uplink."""

    node: float
    uplink: float
    node_predicted: dict[str, float]  # by backend
    uplink_predicted: dict[str, float]
    nodes: dict[str, float]  # sent by each
    planned: float  # by the plan made before submission, gloo


def measure(case: Case, folder: Path, steps: int = 40, overrides: Sequence[str] = ()) -> Result:
    """Run the job and count between two of its steps. Nothing but training happens between them."""
    given = [*BIG_ENOUGH, *case.overrides, "nproc_per_node=2", "steps=100000", "checkpoint.every_steps=0", *overrides]
    with (
        Fabric(case.nodes, case.leaves) as fabric,
        netns_job(fabric, folder, "traffic", *given, switches=case.switches) as job,
    ):
        job.until_step(LEAD_IN)
        first_step, first_nodes, first_leaves = _counters(job)
        job.until_step(first_step + steps)
        last_step, last_nodes, last_leaves = _counters(job)
        (round_,) = job.events("round_started")
        assert round_["hosts"] == case.rank_order, round_
        layout = Layout(round_["strategy"], round_["world_size"], round_["shard_group"])
        predicted = {b: _predicted(job, case, layout, b) for b in BACKENDS}
    counted = last_step - first_step
    nodes = {n: (last_nodes[n] - first_nodes[n]) / counted for n in first_nodes}
    leaves = [(last_leaves[n] - first_leaves[n]) / counted for n in first_leaves]
    return Result(
        node=sum(nodes.values()) / len(nodes),
        uplink=sum(leaves) / len(leaves),
        node_predicted={b: p[0] for b, p in predicted.items()},
        uplink_predicted={b: p[1] for b, p in predicted.items()},
        nodes=nodes,
        planned=job.plan.traffic["gloo"].inter_node,
    )


def _counters(job: NetnsJob) -> tuple[int, dict[str, int], dict[str, int]]:
    """The step just done, and every counter, read as it was done."""
    before = job.step()
    job.until(lambda: job.step() > before, "the next step")
    step, fabric = job.step(), job.fabric
    return (
        step,
        {n: fabric.bytes_sent(n) for n in fabric.nodes},
        {leaf: fabric.uplink_bytes(leaf) for leaf in sorted(set(fabric.leaf_of.values()))},
    )


def _predicted(job: NetnsJob, case: Case, layout: Layout, backend: str) -> tuple[float, float]:
    """Bytes a step of the mean node and of the mean uplink, for the ranks as they were placed."""
    shape, config = shape_of(job.config), job.config
    share = -(-config.data.global_batch // layout.world_size)
    microbatches = -(-share // config.data.micro_batch)
    ring = ring_bytes(shape, layout, config.fsdp, DTYPE_BYTES[param_dtype(config.fsdp, "cpu")], microbatches, backend)
    groups = [list(range(g, g + layout.shard_group)) for g in range(0, layout.world_size, layout.shard_group)]
    leaf = dict(zip(case.nodes, case.leaves, strict=True))
    by_node = sent_by_place(ring, groups, [n for n in case.rank_order for _ in range(2)])
    by_leaf = sent_by_place(ring, groups, [leaf[n] for n in case.rank_order for _ in range(2)])
    return sum(by_node.values()) / len(by_node), sum(by_leaf.values()) / len(by_leaf)


def table(results: dict[str, Result]) -> Iterator[str]:
    """The results as a Markdown table, MB a step."""
    yield "| MB a step | a node: NCCL | gloo | measured | a leaf's uplink: NCCL | gloo | measured |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for key, r in results.items():
        cells = []
        for predicted, measured in ((r.node_predicted, r.node), (r.uplink_predicted, r.uplink)):
            off = f" ({measured / predicted['gloo'] - 1:+.1%})" if predicted["gloo"] else ""
            cells += [f"{predicted[b] / 1e6:.2f}" for b in BACKENDS] + [f"{measured / 1e6:.2f}{off}"]
        yield f"| {CASES[key].label} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="steps to count over")
    parser.add_argument("--only", choices=CASES, nargs="*", default=list(CASES))
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    if why_not():
        sys.exit(why_not())
    results = {}
    for key in args.only:
        with tempfile.TemporaryDirectory() as folder:
            results[key] = measure(CASES[key], Path(folder), args.steps, args.overrides)
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, counted over {args.steps} steps")
    print("\n".join(table(results)))
    full, hybrid = results.get("full 4x2"), results.get("hybrid 4x2")
    if full and hybrid:
        print(f"4 nodes: full_shard sends {full.node / hybrid.node:.2f} x what hybrid_shard does")
    near, blind = results.get("near"), results.get("blind")
    if near and blind:
        print(f"over a leaf's uplink, with the topology unknown: {blind.uplink / near.uplink:.2f} x")


if __name__ == "__main__":
    main()
