"""What every plan must be, and what the plan must say of jobs that people run."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_jobs.cli.main import main
from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.schema import JobConfig, LlamaConfig
from fsdp_jobs.plan.choose import NEAR, Considered, price
from fsdp_jobs.plan.grouping import Grouping
from fsdp_jobs.plan.memory import GIB, peak_memory
from fsdp_jobs.plan.plan import Plan, make_plan
from fsdp_jobs.plan.render import summary_of
from fsdp_jobs.plan.shape_client import shape_of
from fsdp_jobs.plan.topology import Node, Topology
from tests.plan.groups import groups_of

SYNTHETIC = ("data=synthetic", "data.seq_len=4096", "data.micro_batch=1")


@cache
def job(*overrides: str) -> JobConfig:
    return compose_job(overrides)


def leaves(sizes: list[int], gpus: int = 8) -> Topology:
    nodes = (Node(f"n{j}-{i}", (f"leaf{j}",), gpus) for j, size in enumerate(sizes) for i in range(size))
    return Topology.of(nodes)


def sized(memory_gib: float, per_node: int, batch: int = 64, **fsdp: object) -> JobConfig:
    """A 1.3 B model on GPUs of any memory."""
    base = job("hardware=h100")
    hardware = replace(base.hardware, memory_gib=memory_gib, gpus_per_node=per_node, nvlink_domain=per_node)
    model = LlamaConfig(vocab_size=32000, dim=2048, n_layers=24, n_heads=16, n_kv_heads=16, ffn_dim=5504)
    data = replace(base.data, seq_len=1024, micro_batch=1, global_batch=batch)
    return replace(base, hardware=hardware, model=model, data=data, fsdp=replace(base.fsdp, **fsdp))  # type: ignore[arg-type]


LEAVES = st.lists(st.integers(1, 6), min_size=1, max_size=5)
PER_NODE = st.sampled_from([1, 2, 4, 8])
MEMORY = st.floats(3.0, 120.0)
BATCH = st.sampled_from([1, 64, 480, 4096])


def on(config: JobConfig, topology: Topology) -> Plan:
    """The plan of a job that takes all of these nodes."""
    return make_plan(config, topology, len(topology.nodes), seek_remedies=False)


def chosen(plan: Plan) -> Considered:
    return next(c for c in plan.considered if c.why == "chosen")


def check_partition(plan: Plan, topology: Topology) -> None:
    groups = groups_of(plan)
    size = plan.layout.shard_group
    assert plan.layout.world_size == len(plan.nodes) * plan.ranks_per_node == size * plan.layout.replicas
    ranks = [r for g in groups for r in range(g.first_rank, g.last_rank + 1)]
    assert ranks == list(range(plan.layout.world_size))
    assert {g.last_rank - g.first_rank + 1 for g in groups} == {size}
    place = {node.name: i for i, node in enumerate(topology.nodes)}
    assert sorted((*plan.nodes, *plan.spares)) == sorted(place)
    places = [place[n] for n in plan.nodes]
    assert places == sorted(places)
    for g in groups:  # the nodes of a group are neighbours
        assert places[g.last_node] - places[g.first_node] == g.last_node - g.first_node
    crossing = sum(plan.leaves[g.first_node] != plan.leaves[g.last_node] for g in groups)
    assert crossing == plan.crossing


@settings(max_examples=100, deadline=None)
@given(LEAVES, PER_NODE, MEMORY, BATCH, st.sampled_from([True, False, "auto"]))
def test_every_plan_is_a_partition_that_its_own_model_allows(
    sizes: list[int], per_node: int, memory: float, batch: int, unsharded: object
) -> None:
    topology = leaves(sizes, per_node)
    config = sized(memory, per_node, batch, accumulate_unsharded=unsharded)
    plan = on(config, topology)
    check_partition(plan, topology)
    per_rank = -(-batch // plan.layout.world_size)
    shape = shape_of(config)
    again = peak_memory(shape, plan.layout, config.fsdp, config.data, "cuda", per_rank)
    assert plan.memory == again
    assert plan.memory.total == sum(plan.memory.parts().values())
    assert plan.fits == (plan.memory.total <= memory * GIB * 0.95)
    assert plan.fits or not any(c.fits for c in plan.considered)
    assert Plan.from_json(plan.to_json()) == plan


@settings(max_examples=60, deadline=None)
@given(LEAVES, PER_NODE, MEMORY, MEMORY, BATCH)
def test_more_memory_never_gives_a_slower_step(
    sizes: list[int], per_node: int, memory: float, more: float, batch: int
) -> None:
    topology = leaves(sizes, per_node)
    small, large = (on(sized(m, per_node, batch), topology) for m in sorted((memory, more)))
    assert large.fits or not small.fits
    if small.fits:
        assert large.time.step <= small.time.step * NEAR


@settings(max_examples=60, deadline=None)
@given(LEAVES, PER_NODE, MEMORY, BATCH)
def test_no_option_that_fits_is_faster_than_the_plan(
    sizes: list[int], per_node: int, memory: float, batch: int
) -> None:
    plan = on(sized(memory, per_node, batch), leaves(sizes, per_node))
    if plan.fits:
        assert plan.time.step <= NEAR * min(c.step_s for c in plan.considered if c.fits)


@settings(max_examples=40, deadline=None)
@given(LEAVES, PER_NODE, MEMORY)
def test_the_objective_memory_takes_the_least(sizes: list[int], per_node: int, memory: float) -> None:
    plan = on(sized(memory, per_node, objective="memory"), leaves(sizes, per_node))
    if plan.fits:
        assert plan.memory.total == min(c.memory_bytes for c in plan.considered if c.fits)


@pytest.mark.parametrize(("nodes", "least"), [(256, 0.6), (2048, 0.6)])
def test_thousands_of_nodes_are_not_one_ring(nodes: int, least: float) -> None:
    """An 8B model on many H100 nodes keeps most of the speed per GPU that it has on eight."""
    overrides = ("hardware=h100", "model=llama3_8b", "data=synthetic", "data.seq_len=8192", "data.micro_batch=1")
    speeds = [
        make_plan(job(*overrides, f"nodes={n}", f"data.global_batch={n * 8 * 2}")).time.tokens_per_s_per_rank
        for n in (8, nodes)
    ]
    assert speeds[1] > least * speeds[0]


def test_a_slow_network_keeps_shard_groups_in_their_nodes() -> None:
    overrides = ("nodes=2", "hardware=a100_80", "hardware.inter_node_gb_s=0.25", "model=llama2_7b", *SYNTHETIC)
    plan = make_plan(job(*overrides, "data.global_batch=64", "fsdp.activation_checkpointing=full"))
    assert plan.layout.shard_group <= 8 and plan.layout.replicas >= 2


ONE_BILLION = ("hardware=h100", "model=llama_1b", "nodes=1", "data=synthetic", "data.micro_batch=1")


def step_of(strategy: str, *overrides: str) -> tuple[float, int]:
    """Seconds of a step of the 1B model, sharded over all ranks of a node if at all, and elements of its blocks."""
    config = job(*ONE_BILLION, *overrides)
    ranks = config.nproc_per_node
    shape, placement = shape_of(config), Grouping(config, Topology.flat(1, ranks)).place(ranks)
    assert shape is not None and placement is not None
    return price(config, shape, strategy, placement).time.step, shape.n_blocks * shape.largest.numel


@pytest.mark.parametrize(("stored", "cast"), [("fp32", 4 + 2), ("bf16", 0)])
def test_one_rank_copies_its_own_parameters_when_it_gathers_them(stored: str, cast: int) -> None:
    """As torch 2.13's `FSDPParamGroup.wait_for_unshard` does, cast or not; full_shard does it again in backward."""
    asked = ("nproc_per_node=1", "data.global_batch=1", f"fsdp.master_dtype={stored}")
    (again, elements), (once, _) = (step_of(strategy, *asked) for strategy in ("full_shard", "no_shard"))
    assert again - once == pytest.approx(elements * (cast + 2 + 2) / 2985e9)


def test_one_rank_lifts_its_offloaded_parameters_again_in_backward() -> None:
    asked = ("nproc_per_node=1", "data.global_batch=1", "data.seq_len=128", "fsdp.cpu_offload=true")
    (again, elements), (once, _) = (step_of(strategy, *asked) for strategy in ("full_shard", "no_shard"))
    assert again - once > 0.9 * elements * 4 / 50e9


def test_no_communication_hides_the_copies_of_gradients() -> None:
    """They are made before the reduce-scatter, among the kernels of backward; sums over microbatches take more."""
    asked = ("nproc_per_node=2", "data.global_batch=8", "hardware.intra_node_gb_s=0")
    (whole, elements), (sharded, _) = (
        step_of("full_shard", *asked, f"fsdp.accumulate_unsharded={is_whole}") for is_whole in ("true", "false")
    )
    assert whole - sharded == pytest.approx(3 * elements * ((2 + 4 + 4) - (2 + 4)) / 2985e9, rel=0.1)


def test_whole_gradients_take_memory_only_for_more_than_a_percent() -> None:
    asked = ("hardware=a100_80", "nodes=1", "model=llama_1b", "data.global_batch=16", "data.micro_batch=1")
    asked += ("fsdp=full_shard", "fsdp.activation_checkpointing=full")
    auto, whole, sharded = (
        make_plan(job(*asked, f"fsdp.accumulate_unsharded={is_whole}"), seek_remedies=False)
        for is_whole in ("auto", "true", "false")
    )
    assert 1.0 < sharded.time.step / whole.time.step < 1.01
    assert auto.layout == sharded.layout


@settings(max_examples=40, deadline=None)
@given(LEAVES, PER_NODE, MEMORY, st.randoms(use_true_random=False))
def test_names_of_nodes_do_not_matter(sizes: list[int], per_node: int, memory: float, random: object) -> None:
    topology = leaves(sizes, per_node)
    names = [node.name for node in topology.nodes]
    random.shuffle(names)  # type: ignore[attr-defined]
    renamed = Topology.of(replace(n, name=name) for n, name in zip(topology.nodes, names, strict=True))
    one, two = (on(sized(memory, per_node), t) for t in (topology, renamed))
    assert (one.layout, one.leaves, one.crossing) == (two.layout, two.leaves, two.crossing)
    assert groups_of(one) == groups_of(two)


@settings(max_examples=60, deadline=None)
@given(LEAVES, PER_NODE, st.integers(1, 64))
def test_an_explicit_group_is_obeyed_or_refused(sizes: list[int], per_node: int, group: int) -> None:
    topology = leaves(sizes, per_node)
    try:
        plan = on(sized(80.0, per_node, shard_group=group), topology)
    except BadInput as e:
        world = len(topology.nodes) * per_node
        assert world % group or group > world
        assert f"fsdp.shard_group={group}" in str(e)
        return
    assert plan.layout.shard_group == group
    check_partition(plan, topology)


@pytest.mark.parametrize("name", ["a100_40", "a100_80", "h100", "h200", "b200", "mi300x", "l40s", "cpu"])
def test_hardware_presets_are_whole(name: str) -> None:
    hardware = job(f"hardware={name}").hardware
    assert hardware.name == name and hardware.source
    assert min(hardware.memory_gib, hardware.bf16_tflops, hardware.fp32_tflops, hardware.inter_node_gb_s) > 0
    assert hardware.intra_node_gb_s > hardware.inter_node_gb_s
    assert 0.4 < hardware.matmul_efficiency <= 1
    assert make_plan(job(f"hardware={name}", "model=llama_160m", "data=synthetic")).time.tokens_per_s > 0


def test_llama2_70b_on_one_node_of_a100s() -> None:
    asked = ("nodes=1", "hardware=a100_80", "model=llama2_70b", *SYNTHETIC, "data.global_batch=8")
    plan = make_plan(job(*asked))
    assert (plan.layout.strategy, plan.layout.shard_group, plan.fits) == ("full_shard", 8, False)
    state = plan.memory.parameters + plan.memory.optimizer
    assert state / GIB == pytest.approx(12 * 68.98e9 / 8 / GIB, rel=0.001)  # fp32 weights and two moments
    assert plan.remedies
    # 1.1 TB of state leave a node of 1 TiB only with more nodes; one of 2 TiB holds it offloaded
    large = make_plan(job(*asked, "hardware.host_memory_gib=2048", "fsdp.activation_checkpointing=full"))
    assert ("fsdp.cpu_offload=true",) in [r.overrides for r in large.remedies]
    assert ("nodes=2",) not in [r.overrides for r in large.remedies]


def test_groups_stay_under_one_leaf_switch() -> None:
    config = job(
        "nodes=16", "hardware=h100", "model=llama3_70b", *SYNTHETIC, "data.global_batch=128",
        "fsdp.activation_checkpointing=full",
    )  # fmt: skip
    plan = on(replace(config, fsdp=replace(config.fsdp, shard_group=32)), leaves([8, 8]))
    assert plan.fits and plan.layout.replicas == 4
    assert (plan.inside, plan.crossing) == ("leaf", 0)
    assert all(plan.leaves[g.first_node] == plan.leaves[g.last_node] for g in groups_of(plan))


@pytest.mark.parametrize(
    "overrides",
    [
        ("nodes=1", "hardware=a100_40", "model=llama2_7b", *SYNTHETIC, "data.micro_batch=8"),
        ("nodes=1", "hardware=a100_80", "model=llama2_70b", *SYNTHETIC, "data.global_batch=64"),
        ("nodes=2", "hardware=h100", "model=llama3_8b", *SYNTHETIC, "data.micro_batch=8", "fsdp=no_shard"),
        ("nodes=1", "hardware=l40s", "model=llama3_8b", *SYNTHETIC, "data.global_batch=256"),
        ("nodes=2", "hardware=h100", "model=llama3_8b", *SYNTHETIC, "fsdp=hybrid_shard", "fsdp.shard_group=2"),
    ],
)
def test_remedies_fit_when_they_are_followed(overrides: tuple[str, ...]) -> None:
    plan = make_plan(job(*overrides))
    assert not plan.fits and plan.remedies
    for remedy in plan.remedies:
        keys = {o.partition("=")[0] for o in remedy.overrides}
        mended = [o for o in overrides if o.partition("=")[0] not in keys] + list(remedy.overrides)
        assert make_plan(compose_job(mended)).fits, remedy


def test_the_smallest_remedy_in_nodes() -> None:
    overrides = ("nodes=1", "hardware=a100_80", "model=llama2_70b", *SYNTHETIC, "data.global_batch=8")
    full = (*overrides, "fsdp.activation_checkpointing=full")
    more = next(r for r in make_plan(job(*full)).remedies if r.overrides[0].startswith("nodes="))
    needed = int(more.overrides[0].removeprefix("nodes="))
    assert make_plan(job(*full), nodes=needed).fits
    assert not make_plan(job(*full), nodes=needed - 1).fits


def test_the_users_choice_is_obeyed_and_criticised() -> None:
    base = ("nodes=4", "hardware=h100", "model=llama3_8b", *SYNTHETIC, "data.global_batch=32")
    auto = make_plan(job(*base))
    asked = make_plan(job(*base, "fsdp=full_shard"))
    assert asked.layout.strategy == "full_shard" and asked.layout.shard_group == 32
    assert asked.reasons[0].startswith("full_shard over 32 is the only option asked for that fits")
    chosen = f"left to itself the plan takes {auto.layout.strategy} over {auto.layout.shard_group}"
    assert any(chosen in r and r.endswith(" x the bytes between nodes.") for r in asked.reasons), asked.reasons
    bad = make_plan(job(*base, "fsdp=no_shard"))
    assert not bad.fits
    assert any("left to itself the plan takes" in r for r in bad.reasons)


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (("fsdp.shard_group=0",), "must be auto or a number of ranks"),
        (("fsdp.shard_group=3",), "cannot be formed on 2 nodes x 2 ranks"),
        (("fsdp=full_shard", "fsdp.shard_group=2"), "always has a shard group of 4"),
        (("fsdp.shard_group=64",), "nearest sizes: "),
    ],
)
def test_impossible_words(overrides: tuple[str, ...], what: str) -> None:
    with pytest.raises(BadInput) as e:
        make_plan(job(*overrides))
    assert what in str(e.value)


def test_a_topology_with_too_little() -> None:
    with pytest.raises(BadInput, match="the topology has 2 nodes"):
        make_plan(job(), leaves([2]), nodes=3)
    with pytest.raises(BadInput, match="n0-0 has 1"):
        make_plan(job(), leaves([2], gpus=1))


def test_a_custom_model_must_be_probed() -> None:
    with pytest.raises(BadInput, match="probe"):
        make_plan(job("model=custom", "model._target_=somewhere.build"))


def test_an_elastic_job_is_told_about_its_minimum() -> None:
    base = (
        "hardware=h100",
        "model=llama3_8b",
        *SYNTHETIC,
        "data.global_batch=32",
        "fsdp.activation_checkpointing=full",
    )
    fits = make_plan(job(*base, "nodes=2:4"))
    assert any(r.startswith("At the minimum of 2 nodes it still fits") for r in fits.reasons)
    large = make_plan(job(*base, "model=llama3_70b", "nodes=1:8"))
    assert large.fits and any("does NOT fit" in r for r in large.reasons)


def test_each_option_says_why_not() -> None:
    plan = make_plan(job("nodes=4", "hardware=h100", "model=llama3_8b", *SYNTHETIC, "data.global_batch=32"))
    assert [c.why for c in plan.considered].count("chosen") == 1
    assert all(c.why.endswith(".") for c in plan.considered if c.why != "chosen")
    assert {c.name.partition(" ")[0] for c in plan.considered} == {
        "no_shard", "hybrid_shard", "hybrid_shard_zero2", "full_shard", "shard_grad_op",
    }  # fmt: skip


def test_a_shard_group_may_be_several_nodes_of_one_nvlink_domain() -> None:
    config = job(
        "hardware=b200", "hardware.gpus_per_node=4", "hardware.nvlink_domain=72", "model=llama3_70b", *SYNTHETIC,
        "data.global_batch=144", "fsdp.activation_checkpointing=full",
    )  # fmt: skip
    plan = on(config, Topology.flat(36, 4))
    assert plan.fits and plan.layout.shard_group > 4 and 72 % plan.layout.shard_group == 0
    assert plan.inside == "domain"
    # over NVLink between the nodes of a rack, not over the network between racks
    apart = replace(config, hardware=replace(config.hardware, nvlink_domain=4))
    slower = next(c for c in on(apart, Topology.flat(36, 4)).considered if c.name == chosen(plan).name)
    assert chosen(plan).step_s < slower.step_s


def regroup(config: JobConfig, present: Sequence[Node], previous_group: int) -> Plan:
    return make_plan(config, Topology.of(present), seek_remedies=False, previous_group=previous_group)


class TestRegroup:
    """Deciding again when nodes come and go. Groups of two nodes fit; one node does not."""

    config = sized(12.5, 4, 64, accumulate_unsharded=True)
    before = on(replace(config, fsdp=replace(config.fsdp, shard_group=8)), leaves([4, 4], 4))

    def test_before(self) -> None:
        assert (self.before.layout.shard_group, self.before.layout.replicas) == (8, 4) and self.before.fits

    def test_a_lost_node_makes_a_spare_of_its_neighbour(self) -> None:
        topology = leaves([4, 3], 4)
        plan = regroup(self.config, topology.nodes, 8)
        check_partition(plan, topology)
        assert (plan.layout.shard_group, plan.layout.replicas, len(plan.spares)) == (8, 3, 1)
        assert plan.reasons[0] == "Held the shard group of 8; replicas are now 3."
        assert any("stands by as a spare" in r for r in plan.reasons)

    def test_the_size_is_given_up_when_it_cannot_be_formed(self) -> None:
        plan = regroup(sized(24.0, 4, 64, accumulate_unsharded=True), leaves([1], 4).nodes, 8)
        assert plan.layout.shard_group <= 4
        assert "no shard group of that size can be formed" in plan.reasons[0]

    def test_a_wider_previous_group_is_held(self) -> None:
        plan = regroup(self.config, leaves([4, 4], 4).nodes, 16)
        assert (plan.layout.shard_group, plan.layout.replicas, plan.crossing) == (16, 2, 0)

    def test_the_size_is_given_up_when_it_no_longer_fits(self) -> None:
        plan = regroup(self.config, leaves([4, 4], 4).nodes, 2)
        assert plan.fits and plan.layout.shard_group > 2
        assert "no longer fits" in plan.reasons[0]

    def test_the_size_is_given_up_when_another_uses_the_nodes_better(self) -> None:
        plan = regroup(sized(12.0, 4, 112, accumulate_unsharded=True), leaves([4, 3], 4).nodes, 16)
        assert (plan.layout.shard_group, plan.spares) == (28, ())
        assert "more tokens/s otherwise" in plan.reasons[0]

    def test_an_unknown_node_is_its_own_leaf(self) -> None:
        plan = regroup(self.config, [*leaves([4, 3], 4).nodes, Node("stranger", (), 4)], 8)
        assert plan.reasons[0].startswith("Warning: the switches of stranger are unknown")
        assert set(plan.nodes) | set(plan.spares) == {*(node.name for node in leaves([4, 3], 4).nodes), "stranger"}

    def test_a_users_group_that_the_nodes_left_cannot_form_is_an_error_that_names_it(self) -> None:
        with pytest.raises(BadInput, match=r"fsdp\.shard_group=16: cannot be formed on 3 nodes x 4 ranks"):
            regroup(sized(12.0, 4, 64, shard_group=16), leaves([3], 4).nodes, 16)

    def test_a_users_group_is_not_regrouped(self) -> None:
        plan = regroup(sized(12.0, 4, 64, shard_group=16, accumulate_unsharded=True), leaves([4, 4], 4).nodes, 8)
        assert plan.layout.shard_group == 16


CHILD = """
import sys, time
from pathlib import Path
from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.plan.plan import make_plan
from fsdp_jobs.plan.topology import Node, Topology
overrides = ["hardware=h100", "model=llama3_70b", "data=synthetic", "data.seq_len=8192", "data.global_batch=16384"]
config = compose_job([*overrides, "fsdp.activation_checkpointing=full", "nodes=2048"])
started = time.process_time()
topology = Topology.of(Node(f"node{i}", (f"block{i // 128}", f"leaf{i // 16}")) for i in range(2048))
plan = make_plan(config, topology)
seconds = time.process_time() - started
assert "torch" not in sys.modules, "torch was imported"
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(plan.layout.world_size, seconds, int(status["VmHWM"].split()[0]) / 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux's /proc")
def test_sixteen_thousand_ranks_are_planned_at_once_and_without_torch() -> None:
    out = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True).stdout
    ranks, seconds, mib = out.split()
    assert int(ranks) == 16384
    assert float(seconds) < 1.0
    assert float(mib) < 200


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_plan_that_does_not_fit_exits_with_1(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    one_node = ["nodes=1", "hardware=a100_80", "data=synthetic", "data.micro_batch=1", "data.global_batch=8"]
    assert main(["plan", *one_node, "model=llama2_70b", *flags]) == 1
    assert main(["plan", *one_node, "model=llama_1b", "data.seq_len=512", *flags]) == 0
    capsys.readouterr()


def test_what_does_not_fit_names_the_limits_that_it_hits() -> None:
    overrides = ("nodes=1", "hardware=a100_80", "model=llama2_70b", *SYNTHETIC, "data.global_batch=8")
    device = make_plan(job(*overrides)).reasons[0]
    assert "hardware.memory_gib=79.1" in device and "host_memory_gib" not in device
    host = make_plan(job(*overrides, "fsdp.cpu_offload=true", "fsdp.activation_checkpointing=full")).reasons[0]
    assert "hardware.host_memory_gib=1024" in host and "hardware.memory_gib" not in host


@pytest.mark.parametrize("missing", ["memory_gib", "bf16_tflops"])
def test_hardware_without_a_needed_number_is_named(missing: str) -> None:
    with pytest.raises(BadInput, match=f"hardware.{missing}=0: a plan needs"):
        make_plan(job("hardware=h100", "model=llama_1b", f"hardware.{missing}=0"))


def test_more_ranks_than_gpus_are_said() -> None:
    def warned(ranks: int, *overrides: str) -> bool:
        config = compose_job(["model=llama3_8b", "hardware=h100", "nodes=2", f"nproc_per_node={ranks}", *overrides])
        return any(reason.startswith(f"Warning: nproc_per_node={ranks}") for reason in make_plan(config).reasons)

    assert warned(16) and not warned(8) and not warned(16, "hardware.gpus_per_node=16")
    assert not warned(16, "hardware=cpu"), "processes share cores"


@pytest.mark.parametrize(
    ("overrides", "asked"),
    [
        (("cluster=slurm", "hardware=cpu"), "Warning: the plan is for hardware=cpu, but the job asks for GPUs ("),
        (("cluster=kubernetes", "cluster.accelerator=cpu"), "is for hardware=h100, but the job asks for no GPUs ("),
        (("cluster=slurm", "hardware=cpu", "cluster.accelerator=cpu"), ""),
        (("cluster=slurm",), ""),
        (("hardware=h100",), ""),
    ],
)
@pytest.mark.parametrize("model", ["model=llama_debug", "script=train.py"])
def test_a_plan_for_other_devices_than_the_job_asks_for_is_said(
    overrides: tuple[str, ...], asked: str, model: str
) -> None:
    said = [reason for reason in make_plan(job(*overrides, model)).reasons if "(cluster.accelerator=" in reason]
    assert len(said) == bool(asked) and all(asked in reason for reason in said)


def test_links_of_unknown_speed_are_said() -> None:
    unknown = make_plan(job("hardware=h100", "model=llama_1b", "nodes=2", "hardware.inter_node_gb_s=0")).reasons
    assert "Warning: hardware.inter_node_gb_s is not set: the prediction counts no time" in unknown[0]
    on_one = make_plan(job("hardware=h100", "model=llama_1b", "nodes=1", "hardware.inter_node_gb_s=0")).reasons
    assert not any("Warning" in reason for reason in on_one)
    said = "Warning: hardware.attention_tflops is not set: the prediction takes 45% of the matmul rate for attention."
    assert said in make_plan(job("hardware=l40s", "model=llama_1b")).reasons
    assert said not in make_plan(job("hardware=l40s", "model=llama_1b", "fsdp.param_dtype=fp32")).reasons


@pytest.mark.parametrize("gpus", [1, 4])
def test_nodes_of_fewer_gpus_than_the_presets_share_no_nvlink(gpus: int) -> None:
    plan = make_plan(
        job("hardware=a100_80", f"hardware.gpus_per_node={gpus}", "nodes=8", "fsdp=full_shard", *SYNTHETIC)
    )
    assert plan.inside == "all" and plan.traffic["nccl"].inter_node > 0


@pytest.mark.parametrize(
    "key, needed",
    [
        ("memory_gb_s", "fsdp=auto"),
        ("host_gb_s", "fsdp.cpu_offload=true"),
        ("host_memory_gib", "fsdp.activation_offload=true"),
    ],
)
def test_rates_that_are_not_set_are_said(key: str, needed: str) -> None:
    def said(*overrides: str) -> bool:
        reasons = make_plan(job("hardware=h100", "model=llama_1b", *overrides)).reasons
        return any(f"Warning: hardware.{key} is not set" in reason for reason in reasons)

    assert said(f"hardware.{key}=0", needed) and not said(needed)


def test_attention_faster_than_the_gpu_is_said() -> None:
    reasons = make_plan(job("hardware=h100", "model=llama_1b", "hardware.bf16_tflops=125")).reasons
    assert "Warning: hardware.attention_tflops=332 is above hardware.bf16_tflops=125" in reasons[0]


def test_a_smaller_last_microbatch_takes_less_time() -> None:
    """10 samples a rank in microbatches of 4 are 4 + 4 + 2: the time of 10 samples, not of 12."""
    here = ("hardware=h100", "model=llama3_8b", "nodes=1", "data=synthetic", "data.seq_len=4096")
    full = (*here, "data.global_batch=80", "fsdp.activation_checkpointing=full")
    speeds = [make_plan(job(*full, f"data.micro_batch={m}")).time.tokens_per_s for m in (2, 4, 5)]  # type: ignore[union-attr]
    assert speeds[0] < speeds[1] < 1.01 * speeds[2]


def test_a_very_long_step_is_shown_in_days() -> None:
    slow = job("hardware=cpu", "model=llama3_8b", "nodes=2", *SYNTHETIC, "data.global_batch=512")
    assert re.search(r" tokens takes \d+d\d\dh: ", summary_of(make_plan(slow, seek_remedies=False)))
