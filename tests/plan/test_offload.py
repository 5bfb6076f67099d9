"""What offload costs: time over the host's link, and host memory."""

from __future__ import annotations

import pytest

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.plan.memory import GIB
from fsdp_jobs.plan.plan import Plan, make_plan
from tests.plan.shown import render_text

EIGHT = ("data=synthetic", "model=llama3_8b", "hardware=h100", "data.seq_len=8192", "data.micro_batch=1")
FULL, OFFLOAD = "fsdp.activation_checkpointing=full", "fsdp.activation_offload=true"
TWO_MICROBATCHES = ("nodes=1", "data.global_batch=16", "fsdp=full_shard", "fsdp.accumulate_unsharded=false")
INPUTS = 32 * 8192 * 4096 * 2  # bytes: blocks x tokens x width x bf16
LINK = 50e9  # bytes/s, hardware=h100


def planned(*overrides: str) -> Plan:
    return make_plan(compose_job([*EIGHT, *overrides]), seek_remedies=False)


@pytest.mark.parametrize(("kept", "of_blocks"), [("full", 1), ("selective", 1), ("every_n", 1 / 2)])
def test_the_step_is_longer_by_what_crosses_the_link(kept: str, of_blocks: float) -> None:
    """Down in forward and up in backward, in each of two microbatches; nothing of it is hidden by compute."""
    asked = (*TWO_MICROBATCHES, f"fsdp.activation_checkpointing={kept}")
    longer = planned(*asked, OFFLOAD).time.step - planned(*asked).time.step
    assert longer == pytest.approx(2 * 2 * of_blocks * INPUTS / LINK)


def test_a_slow_network_hides_the_copies() -> None:
    asked = ("nodes=2", "data.global_batch=16", "fsdp=full_shard", FULL, "hardware.inter_node_gb_s=0.25")
    assert planned(*asked, OFFLOAD).time.step < 1.001 * planned(*asked).time.step


def test_the_link_carries_parameters_and_activations_one_after_the_other() -> None:
    """In backward both go up."""
    asked = (*TWO_MICROBATCHES, FULL, "fsdp.cpu_offload=true", OFFLOAD, "hardware.host_gb_s=0.5")
    shards, blocks = 8.03e9 * 4 / 8, 6.98e9 * 4 / 8  # bytes; the head stays gathered
    assert planned(*asked).time.step > 2 * (shards + blocks + INPUTS) / 0.5e9


def test_the_gpu_is_relieved_and_the_host_is_filled() -> None:
    asked = (*TWO_MICROBATCHES, FULL)
    there, away = planned(*asked), planned(*asked, OFFLOAD)
    assert there.memory.host == 0 and away.memory.host == INPUTS == 2 * GIB
    assert there.memory.activations - away.memory.activations > 0.9 * INPUTS
    line = next(line for line in render_text(away).splitlines() if "host, per rank" in line)
    assert "2.0 GiB" in line and "offloaded" in line
    assert "host, per rank" not in render_text(there)


def test_a_pinned_tensor_takes_a_power_of_two() -> None:
    """torch's allocator of pinned memory rounds up: 60 MiB of a block's inputs take 64 MiB, and 90 MiB take 128."""
    for tokens, mib in ((7680, 64), (11520, 128)):
        away = planned(*TWO_MICROBATCHES, FULL, OFFLOAD, f"data.seq_len={tokens}")
        assert away.memory.host == 32 * mib * 2**20


@pytest.mark.parametrize(("host_gib", "fits"), [(17, True), (16, False), (0, True)])
def test_a_host_with_too_little_memory_is_refused(host_gib: int, fits: bool) -> None:
    """8 ranks x 2 GiB, of which 95% of the host may be filled; 0: not known, nothing is checked."""
    plan = planned(*TWO_MICROBATCHES, FULL, OFFLOAD, f"hardware.host_memory_gib={host_gib}")
    assert plan.fits is fits
    if not fits:
        assert "offloaded 16.0 GiB (hardware.host_memory_gib=16)" in plan.reasons[0]
        others = [c.why for c in plan.considered if c.memory_bytes <= plan.usable_bytes and not c.taken]
        assert all("of host memory per rank: a node has less" in why for why in others)


def test_activation_offload_is_offered_with_the_host_memory_it_takes() -> None:
    tight = make_plan(compose_job([*EIGHT, *TWO_MICROBATCHES, FULL, "hardware.memory_gib=25"]))
    assert not tight.fits
    offered = next(r for r in tight.remedies if OFFLOAD in r.overrides)
    assert "2.0 GiB of host memory per rank" in offered.result


def test_a_job_whose_offload_fills_the_host_is_offered_to_run_without_it_on_fewer_nodes() -> None:
    asked = ["cluster=slurm", "nodes=1", "model=llama3_70b", "fsdp.cpu_offload=true", "hardware.host_memory_gib=128"]
    without, offloaded = make_plan(compose_job(asked)).remedies
    assert without.overrides == ("fsdp.cpu_offload=false", "nodes=3")
    assert offloaded.overrides == ("nodes=11",)
