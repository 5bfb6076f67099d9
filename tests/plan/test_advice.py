"""What a plan says of its own accord."""

from __future__ import annotations

import pytest

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.plan.plan import make_plan
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
    assert "some of 32 GPUs get 4 samples, others 3 and wait: data.global_batch=96 or 128 is even." in reasons


def test_nothing_is_said_of_an_even_batch() -> None:
    reasons = said("nodes=4", "data.global_batch=128")
    assert "sample" not in reasons and "Fewer" not in reasons


def test_a_cpu_is_no_gpu() -> None:
    assert "GPU" not in render_text(make_plan(compose_job([])))
