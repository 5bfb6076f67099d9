"""The traffic model: measured bytes of small gloo worlds, and the plan's closed form against a count of hops."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.schema import FsdpConfig, LlamaConfig
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.plan.plan import make_plan
from fsdp_jobs.plan.shapes import Activations, ModelShape, Unit, llama_shape
from fsdp_jobs.plan.traffic import Traffic, hops, node_traffic, ring_bytes
from tests.plan.rings import sent_by_place

FP32 = FsdpConfig(param_dtype="fp32")
SIZE = 1024 * 256
# One block holds everything: what is measured in multiples of M, the parameters' bytes, has no root to speak of.
PLAIN = ModelShape(Unit("root", ()), (Unit("block", (("w", (1024, 256)),)),), Activations(1, 0, 0, 0, 0, 0))
M = SIZE * 4


def rows(world: int, group: int) -> list[list[int]]:
    return [list(range(i, i + group)) for i in range(0, world, group)]


def columns(world: int, group: int) -> list[list[int]]:
    """Groups that take every (world / group)-th rank."""
    return [list(range(i, world, world // group)) for i in range(world // group)]


def ordered(nodes: int, per_node: int) -> list[str]:
    return [f"node{r // per_node}" for r in range(nodes * per_node)]


def interleaved(nodes: int, per_node: int) -> list[str]:
    return [f"node{r % nodes}" for r in range(nodes * per_node)]


# Measured with counters on the virtual links between two nodes, gloo, fp32, in multiples of M a node and step.
MEASURED = [
    ("full_shard", rows(4, 4), ordered(2, 2), 3.01),
    ("full_shard", rows(4, 4), interleaved(2, 2), 6.02),
    ("full_shard", rows(8, 8), ordered(2, 4), 3.51),
    ("shard_grad_op", rows(4, 4), ordered(2, 2), 2.26),
    ("shard_grad_op", rows(8, 8), ordered(2, 4), 2.63),
    ("no_shard", rows(4, 1), ordered(2, 2), 1.50),
    ("no_shard", rows(4, 1), interleaved(2, 2), 3.01),
    ("no_shard", rows(8, 1), ordered(2, 4), 1.76),
    ("hybrid_shard", rows(4, 2), ordered(2, 2), 1.00),
    ("hybrid_shard", columns(4, 2), interleaved(2, 2), 1.00),  # grouped by gathered node names
    ("hybrid_shard", rows(8, 4), ordered(2, 4), 1.00),
    ("hybrid_shard", rows(4, 2), interleaved(2, 2), 4.02),  # a naive view(-1, 2) of interleaved ranks
    ("hybrid_shard", columns(4, 2), ordered(2, 2), 4.02),  # sharded across nodes
    ("hybrid_shard", columns(8, 2), ordered(2, 4), 8.03),
]


@pytest.mark.parametrize(("strategy", "groups", "places", "measured"), MEASURED)
def test_measured_bytes(strategy: str, groups: list[list[int]], places: list[str], measured: float) -> None:
    layout = Layout(strategy, len(places), len(groups[0]))
    ring = ring_bytes(PLAIN, layout, FP32, 4, 1, "gloo")
    sent = sent_by_place(ring, groups, places)
    assert {round(v / M, 6) for v in sent.values()} == {round(sent["node0"] / M, 6)}
    assert sent["node0"] / M == pytest.approx(measured, rel=0.01)


def test_nccl_reduces_at_half_of_gloos_price() -> None:
    layout = Layout("full_shard", 4, 4)
    sent = {
        b: sent_by_place(ring_bytes(PLAIN, layout, FP32, 4, 1, b), rows(4, 4), ordered(2, 2))["node0"] / M
        for b in ("nccl", "gloo")
    }
    assert sent == {"nccl": 2.25, "gloo": 3.0}


@given(st.integers(1, 6), st.sampled_from([1, 2, 3, 4, 8]), st.data(), st.booleans(), st.sampled_from(["nccl", "gloo"]))
def test_the_closed_form_counts_the_hops(
    nodes: int, per_node: int, draw: st.DataObject, zero2: bool, backend: str
) -> None:
    world = nodes * per_node
    sizes = [g for g in range(1, world + 1) if per_node % g == 0 or (g % per_node == 0 and world % g == 0)]
    group = draw.draw(st.sampled_from(sizes))
    strategy = "no_shard" if group == 1 else "hybrid_shard_zero2" if zero2 else "hybrid_shard"
    layout = Layout(strategy, world, group)
    shape = llama_shape(LlamaConfig(n_layers=2))
    ring = ring_bytes(shape, layout, FP32, 4, 3, backend)
    places = ordered(nodes, per_node)
    counted = sent_by_place(ring, rows(world, group), places)
    predicted = node_traffic(ring, hops(layout, per_node, False))
    assert sum(counted.values()) == pytest.approx(nodes * predicted.inter_node)
    everything = sum(sent_by_place(ring, rows(world, group), [str(r) for r in range(world)]).values())
    assert everything == pytest.approx(nodes * (predicted.inter_node + predicted.intra_node))


@given(st.integers(2, 5), st.sampled_from([3, 5, 6, 7, 9]), st.integers(2, 6))
def test_groups_that_straddle_nodes(nodes: int, group: int, factor: int) -> None:
    """A group that is neither part of a node nor whole nodes: means over the nodes, shard ring only."""
    per_node = 6
    world = nodes * per_node
    if world % group or group > world:
        return
    layout = Layout("full_shard" if group == world else "hybrid_shard", world, group)
    ring = ring_bytes(PLAIN, layout, FP32, 4, factor)
    shard_only = replace(ring, all_reduce=0.0, gathers=factor, reductions=1)
    counted = sum(sent_by_place(shard_only, rows(world, group), ordered(nodes, per_node)).values())
    assert node_traffic(shard_only, hops(layout, per_node, False)).inter_node * nodes == pytest.approx(counted)


def test_accumulation_gathers_each_time_and_reduces_once() -> None:
    layout, shape = Layout("hybrid_shard", 16, 8, True), llama_shape(LlamaConfig())
    one = ring_bytes(shape, layout, FP32, 4, 1)
    four = ring_bytes(shape, layout, FP32, 4, 4)
    eager = ring_bytes(shape, replace(layout, accumulate_unsharded=False), FP32, 4, 4)
    assert four.shard_ring - four.reduce == 4 * (one.shard_ring - one.reduce)
    assert four.reduce == one.reduce and four.all_reduce == one.all_reduce
    assert eager.shard_ring - four.shard_ring == 3 * one.reduce


def test_leaf_switch_traffic_falls_with_groups_inside_leaves() -> None:
    """Four nodes on two leaves, shard groups of two nodes: by topology, and ignoring it."""
    layout = Layout("hybrid_shard", 8, 4)
    ring = ring_bytes(PLAIN, layout, FP32, 4, 1, "gloo")
    near = sent_by_place(ring, rows(8, 4), ["leaf1"] * 4 + ["leaf2"] * 4)
    blind = sent_by_place(ring, rows(8, 4), (["leaf1"] * 2 + ["leaf2"] * 2) * 2)
    assert near["leaf1"] / M == 4 * 2 * (1 / 2) * (1 / 4)  # four replica rings of a quarter each
    assert blind["leaf1"] / M == 2 * 4 * (3 / 4)  # both groups pass all their gathers and reductions over it


def test_a_single_rank_sends_nothing() -> None:
    ring = ring_bytes(PLAIN, Layout("full_shard", 1, 1), FP32, 4, 1)
    assert node_traffic(ring, hops(Layout("full_shard", 1, 1), 1, False)) == Traffic(0, 0)


def test_nvlink_between_nodes_is_no_network() -> None:
    """A rack of GB200: whole-rack groups send nothing over the network, and leave the most memory."""
    rack = ("hardware=b200", "hardware.gpus_per_node=4", "hardware.nvlink_domain=72", "nodes=18", "data=synthetic")
    job = ("model=llama3_70b", "data.seq_len=8192", "data.micro_batch=1", "data.global_batch=288")
    plan = make_plan(compose_job([*rack, *job, "fsdp.activation_checkpointing=full"]))
    assert plan.layout.shard_group == 72 and plan.traffic["nccl"].inter_node == 0
