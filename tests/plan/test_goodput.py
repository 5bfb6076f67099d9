"""The predicted goodput: against a simulation of failures, and against what a run has measured."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.plan.goodput import best_interval, goodput
from fsdp_jobs.plan.plan import Plan, make_plan
from fsdp_jobs.plan.topology import Node, Topology
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.goodput import Costs, Failures, costs_of
from fsdp_jobs.submit.validate import validate

H100 = ("hardware=h100", "model=llama3_8b", "data=synthetic", "data.seq_len=8192", "data.micro_batch=1")


def plan(nodes: int, *overrides: str, costs: Costs | None = None) -> Plan:
    batch = f"data.global_batch={nodes * 8}"
    return make_plan(compose_job([*H100, f"nodes={nodes}", batch, *overrides]), costs=costs)


def simulated(
    tiers: list[tuple[float, float, float]], restart_s: float, mtbf_s: float, failures: int = 20_000
) -> float:
    """Train, save in each tier when it is time to, fail at random, and go back to what the failure has left."""
    dice, wall, done = random.Random(0), 0.0, 0.0
    shares = [share for share, _, _ in tiers]
    stalls = 1 + sum(stall_s / every_s for _, every_s, stall_s in tiers)  # that a second of steps takes
    for _ in range(failures):
        lived = dice.expovariate(1 / mtbf_s)
        wall += lived
        (_, every_s, _), useful = dice.choices(tiers, shares)[0], max(0.0, lived - restart_s) / stalls
        done = (done + useful) // every_s * every_s
    return done / wall


STORAGE, MEMORY = (1.0, 600.0, 5.0), (0.9, 10.0, 0.1)


@pytest.mark.parametrize(
    ("tiers", "restart_s", "mtbf_s"),
    [
        ([STORAGE], 120, 86_400),
        ([(1.0, 1800.0, 60.0)], 600, 7200),
        ([(1.0, 300.0, 20.0)], 300, 3600),
        ([MEMORY, (0.1, 1200.0, 10.0)], 120, 3600),
        ([(0.5, 10.0, 0.1), (0.3, 300.0, 2.0), (0.2, 1800.0, 0.0)], 60, 7200),
    ],
)
def test_the_formula_is_what_a_simulation_gives(
    tiers: list[tuple[float, float, float]], restart_s: float, mtbf_s: float
) -> None:
    assert goodput(tiers, restart_s, mtbf_s) == pytest.approx(simulated(tiers, restart_s, mtbf_s), abs=0.02)


@pytest.mark.parametrize(("stall_s", "mtbf_s"), [(1.0, 1e5), (10.0, 2e4), (0.1, 1e6)])
def test_no_other_interval_is_noticeably_better(stall_s: float, mtbf_s: float) -> None:
    best = best_interval(stall_s, mtbf_s)
    assert all(
        goodput([(1, best, stall_s)], 60, mtbf_s) >= goodput([(1, best * k, stall_s)], 60, mtbf_s) - 1e-3
        for k in (0.5, 0.8, 1.25, 2)
    )


def test_the_time_between_failures_is_the_published_one() -> None:
    """4 per 1,000 node-days: Llama 3's 2,048 nodes failed every 3.1 h at 3.79 (arXiv:2407.21783, table 5)."""
    expected = plan(2048, "hardware.failures_per_1000_node_days=3.79").expected
    assert expected.mtbf_s / 3600 == pytest.approx(3.1, abs=0.05)
    assert 0.8 < expected.goodput < 1


def test_what_was_measured_replaces_what_was_assumed() -> None:
    costs = Costs(stall_s=20.0, write_s=100.0, restart_s=900.0)
    assumed, measured = plan(512).expected, plan(512, costs=costs).expected
    assert (measured.tiers[0].stall_s, measured.restart_s, measured.measured) == (20.0, 900.0, True)
    assert measured.goodput < assumed.goodput and measured.best_s > assumed.best_s
    assert "writing a save counts as 0 s (not known yet)" in str(assumed)
    assert "900 s to restart (measured), 100 s to write a save" in str(measured)
    slow = plan(2, costs=replace(costs, stall_s=0.0, write_s=4000.0)).expected
    assert slow.best_s >= 4000.0, "the next save cannot begin before the last one is written"


def test_rarer_saves_cost_goodput_and_auto_is_best() -> None:
    auto = plan(512, "checkpoint.every_steps=0", "checkpoint.every_minutes=auto").expected
    rare = plan(512, "checkpoint.every_steps=0", "checkpoint.every_minutes=600").expected
    assert auto.tiers[0].every_s == auto.best_s and auto.goodput > rare.goodput
    assert "goodput" in str(auto) and "the best interval" in str(auto)


def test_nothing_is_saved_more_often_than_once_a_step() -> None:
    for minutes in ("auto", "1"):
        slow = plan(2, "data.global_batch=65536", "checkpoint.every_steps=0", f"checkpoint.every_minutes={minutes}")
        assert slow.time is not None and slow.expected.tiers[-1].every_s >= slow.time.step > 3600, minutes


@pytest.mark.parametrize("minutes", ["often", "-1"])
def test_auto_is_the_only_word_for_minutes(minutes: str) -> None:
    with pytest.raises(BadInput, match=f"checkpoint.every_minutes={minutes}"):
        validate(compose_job([f"checkpoint.every_minutes={minutes}"]))
    validate(compose_job(["checkpoint.every_minutes=auto"]))


def test_costs_are_read_from_the_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert costs_of(run) is None and run.planned_interval_s() == 1800
    run.plan.write_text(plan(4).to_json())
    assert run.planned_interval_s() == plan(4).expected.best_s
    checkpoint = {"event": "checkpoint", "attempt": 0, "step": 5, "bytes": 1, "seconds": 3.0, "time": 110.0}
    broken = {"event": "round_broken", "attempt": 0, "why": "x", "step": 7, "committed": 5, "time": 120.0}
    run.events.write_text("".join(json.dumps(e) + "\n" for e in (checkpoint, broken)))
    sums = {"stall_s": 0.9, "snapshot_s": 0.4, "snapshots": 2, "recover_s": 30.0}
    run.metrics.write_text(json.dumps({"step": 6, "time": 150.0, **sums}) + "\n")
    assert costs_of(run) == Costs(stall_s=0.5, write_s=3.0, restart_s=30.0, snapshot_s=0.2, snapshot_steps=3.0)


@pytest.mark.parametrize(("count", "node_days", "rate"), [(0, 0.0, 4.0), (0, 500.0, 2.0), (10, 500.0, 12.0)])
def test_the_failures_of_this_cluster_are_in_the_rate_and_it_is_said(count: int, node_days: float, rate: float) -> None:
    expected = make_plan(compose_job([*H100, "nodes=4", "data.global_batch=32"]), seen=Failures(count, node_days, 3))
    assert expected.expected.rate == pytest.approx(rate)
    words = f"{count} failures in {node_days:.3g} node-days of 3 runs here" if node_days else "by the configuration)"
    assert words in str(expected.expected)


def test_snapshots_in_memory_leave_the_disk_little_to_do_and_their_price_is_told() -> None:
    rare = ("checkpoint.every_steps=0", "checkpoint.every_minutes=auto")
    disk, both = plan(16, *rare).expected, plan(16, *rare, "checkpoint.memory.every_steps=auto").expected
    memory, storage = both.tiers
    assert memory.share == 0.99 and storage.best_s > 9 * disk.best_s
    assert plan(16, *rare, "checkpoint.memory.every_steps=100").expected.goodput > disk.goodput
    assert memory.every_steps >= 1 and memory.stall_s <= 0.01 * memory.every_s
    assert memory.bytes == plan(16, "checkpoint.memory.every_steps=auto").snapshot_bytes > 0
    assert "memory: saved every" in str(both) and "GiB per node" in str(both)
    one_node = plan(1, "checkpoint.memory.every_steps=1").expected.tiers[0]
    assert one_node.share < 0.2, "with their node they are lost"
    of_two = plan(2, "checkpoint.memory.every_steps=1", "checkpoint.local_dir=/disk").expected
    assert [t.place for t in of_two.tiers] == ["memory", "local_dir", "storage"]
    assert sum(t.share for t in of_two.tiers) == pytest.approx(1)


def test_the_plan_says_where_a_snapshot_has_no_second_copy_or_none_in_another_domain() -> None:
    memory = ("checkpoint.memory.every_steps=1", "fsdp=full_shard")

    def reasons(leaves: str) -> str:
        path = [((leaf,) if leaf != "?" else ()) for leaf in leaves]
        nodes = [Node(f"node{i}", switches, gpus=8) for i, switches in enumerate(path)]
        batch = f"data.global_batch={len(nodes) * 8}"
        config = compose_job([*H100, f"nodes={len(nodes)}", batch, *memory])
        return " ".join(make_plan(config, Topology.of(nodes)).reasons)

    assert "Snapshots in memory have no copy" in reasons("a")
    assert "no switches are known" in reasons("???")
    assert "Snapshots" not in reasons("aabb") and "snapshots" not in reasons("aabb")
    assert "snapshots of node0, node2 are copied under their own leaf switch" in reasons("aaab")


def test_thousands_of_replicas_have_a_plan_with_snapshots() -> None:
    overrides = ("fsdp=hybrid_shard", "fsdp.shard_group=8", "checkpoint.memory.every_steps=1")
    assert plan(4096, *overrides).expected.tiers[0].share == pytest.approx(0.99)


def test_a_plan_of_another_version_is_passed_over(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.plan.parent.mkdir(parents=True, exist_ok=True)
    run.plan.write_text(plan(2).to_json())
    assert Plan.of(run) == plan(2)
    content = json.loads(run.plan.read_text())
    del content["expected"]["tiers"]
    run.plan.write_text(json.dumps(content))
    assert Plan.of(run) is None


def test_a_job_that_loses_little_is_not_said_to_lose_nothing() -> None:
    expected = plan(2, "hardware.failures_per_1000_node_days=0.01").expected
    assert 0.9995 < expected.goodput < 1
    assert str(expected).startswith("goodput 99.9% expected")
