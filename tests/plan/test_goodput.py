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
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.goodput import Costs, costs_of
from fsdp_jobs.submit.validate import validate

H100 = ("hardware=h100", "model=llama3_8b", "data=synthetic", "data.seq_len=8192", "data.micro_batch=1")


def plan(nodes: int, *overrides: str, costs: Costs | None = None) -> Plan:
    batch = f"data.global_batch={nodes * 8}"
    return make_plan(compose_job([*H100, f"nodes={nodes}", batch, *overrides]), costs=costs)


def simulated(every_s: float, stall_s: float, restart_s: float, mtbf_s: float, intervals: int = 20_000) -> float:
    """Work through intervals; a failure anywhere begins a restart, and the interval again."""
    draw, wall = random.Random(0), 0.0
    for _ in range(intervals):
        need = every_s + stall_s
        while (failed := draw.expovariate(1 / mtbf_s)) < need:
            wall += failed
            need = every_s + stall_s + restart_s
        wall += need
    return intervals * every_s / wall


@pytest.mark.parametrize(
    ("every_s", "stall_s", "restart_s", "mtbf_s"),
    [(600, 5, 120, 86_400), (1800, 60, 600, 7200), (300, 20, 300, 3600)],
)
def test_the_formula_is_what_a_simulation_gives(
    every_s: float, stall_s: float, restart_s: float, mtbf_s: float
) -> None:
    assert goodput(every_s, stall_s, restart_s, mtbf_s) == pytest.approx(
        simulated(every_s, stall_s, restart_s, mtbf_s), abs=0.02
    )


@pytest.mark.parametrize(("stall_s", "mtbf_s"), [(1.0, 1e5), (10.0, 2e4), (0.1, 1e6)])
def test_no_other_interval_is_noticeably_better(stall_s: float, mtbf_s: float) -> None:
    best = best_interval(stall_s, mtbf_s)
    assert all(
        goodput(best, stall_s, 60, mtbf_s) >= goodput(best * k, stall_s, 60, mtbf_s) - 1e-3 for k in (0.5, 0.8, 1.25, 2)
    )


def test_the_time_between_failures_is_the_published_one() -> None:
    """4 per 1,000 node-days: Llama 3's 2,048 nodes failed every 3.1 h at 3.79 (arXiv:2407.21783, table 5)."""
    expected = plan(2048, "hardware.failures_per_1000_node_days=3.79").expected
    assert expected.mtbf_s / 3600 == pytest.approx(3.1, abs=0.05)
    assert 0.8 < expected.goodput < 1


def test_what_was_measured_replaces_what_was_assumed() -> None:
    costs = Costs(stall_s=20.0, write_s=100.0, restart_s=900.0)
    assumed, measured = plan(512).expected, plan(512, costs=costs).expected
    assert (measured.stall_s, measured.restart_s, measured.measured) == (20.0, 900.0, True)
    assert measured.goodput < assumed.goodput and measured.best_s > assumed.best_s
    slow = plan(2, costs=replace(costs, stall_s=0.0, write_s=4000.0)).expected
    assert slow.best_s >= 4000.0, "the next save cannot begin before the last one is written"


def test_rarer_saves_cost_goodput_and_auto_is_best() -> None:
    auto = plan(512, "checkpoint.every_steps=0", "checkpoint.every_minutes=auto").expected
    rare = plan(512, "checkpoint.every_steps=0", "checkpoint.every_minutes=600").expected
    assert auto.every_s == auto.best_s and auto.goodput > rare.goodput
    assert "goodput" in str(auto) and "best interval" in str(auto)


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
    steps = [{"step": 7, "time": 119.0, "stall_s": 0.5}, {"step": 6, "time": 150.0, "stall_s": 0.5}]
    run.metrics.write_text("".join(json.dumps(s) + "\n" for s in steps))
    assert costs_of(run) == Costs(stall_s=0.5, write_s=3.0, restart_s=30.0)
