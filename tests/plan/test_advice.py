"""What a plan says of its own accord."""

from __future__ import annotations

import re

import pytest

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.plan.plan import make_plan
from fsdp_jobs.plan.svg import to_svg
from tests.plan.shown import render_text

SEVEN = ("data=synthetic", "model=llama2_7b", "data.seq_len=2048", "data.micro_batch=1", "hardware=a100_80")
FULL = "fsdp.activation_checkpointing=full"


def said(*overrides: str) -> str:
    return "\n".join(make_plan(compose_job([*SEVEN, FULL, *overrides])).reasons)


@pytest.mark.parametrize(("gb_s", "is_said"), [(0.1, True), (22.8, False)])
def test_fewer_nodes_that_are_faster(gb_s: float, is_said: bool) -> None:
    reasons = said("nodes=4", f"hardware.inter_node_gb_s={gb_s}", "data.global_batch=32")
    assert ("Fewer nodes are faster: nodes=1 gives" in reasons) is is_said


def test_gpus_without_a_sample() -> None:
    assert "64 of 128 GPUs get no sample: data.global_batch=128" in said("nodes=16", "data.global_batch=64")


def test_an_uneven_batch() -> None:
    reasons = said("nodes=4", "data.global_batch=100")
    assert "Some of 32 GPUs get 4 samples, others 3 and wait: data.global_batch=96 or 128 is even." in reasons


def test_nothing_is_said_of_an_even_batch() -> None:
    reasons = said("nodes=4", "data.global_batch=128")
    assert "sample" not in reasons and "Fewer" not in reasons


def test_a_cpu_is_no_gpu() -> None:
    plan = make_plan(compose_job([]))
    assert "GPU" not in render_text(plan) and "GPU" not in to_svg(plan)


def test_memory_that_is_left() -> None:
    """What is offered fits, and gives the speed that it names."""
    asked = ("nodes=4", "data.global_batch=256")
    found = re.search(
        r"Other settings are faster: (.*) gives ([\d,]+) tokens/s predicted, ([\d,]+) as asked", said(*asked)
    )
    assert found
    plans = [make_plan(compose_job([*SEVEN, FULL, *asked, *more])) for more in ((), found[1].split())]
    assert [f"{p.time.tokens_per_s:,.0f}" for p in reversed(plans)] == [found[2], found[3]]
    assert plans[1].fits and plans[1].time.tokens_per_s > 1.03 * plans[0].time.tokens_per_s


def test_recomputation_that_gathers_less_over_a_slow_network() -> None:
    """Without it only small microbatches and a shard group over all nodes fit."""
    asked = [*SEVEN, "hardware=h100", "hardware.inter_node_gb_s=0.25", "nodes=4", "data.micro_batch=4"]
    asked += ["data.global_batch=1024", "hardware.memory_gib=56"]
    plan = make_plan(compose_job(asked))
    (said,) = [r for r in plan.reasons if "settings are faster" in r]
    overrides = re.findall(r"\S+=\w+", said)
    assert any("activation_checkpointing" in override for override in overrides)
    followed = make_plan(compose_job([*asked, *overrides]))
    assert plan.layout.shard_group == 32 and followed.fits
    assert followed.time.tokens_per_s > 2 * plan.time.tokens_per_s
    assert f"{followed.time.tokens_per_s:,.0f} tokens/s predicted, {plan.time.tokens_per_s:,.0f} as asked" in said


def test_no_memory_is_left() -> None:
    assert "settings are faster" not in said("nodes=1", "data.global_batch=8", "hardware.memory_gib=33")


def test_offload_that_nothing_needs() -> None:
    asked = ("nodes=4", "data.global_batch=32", "fsdp.cpu_offload=true")
    assert "fsdp.cpu_offload=false gives" in said(*asked)


def test_who_wants_little_memory_is_not_offered_more() -> None:
    assert "settings are faster" not in said("nodes=4", "data.global_batch=256", "fsdp.objective=memory")
