"""Bounds that no prediction may cross, over random jobs; FSDP_JOBS_PLANS sets how many."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.resolve import param_dtype, peak_flops
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.plan.choose import options_of
from fsdp_jobs.plan.grouping import Grouping
from fsdp_jobs.plan.memory import MARGIN, master_bytes
from fsdp_jobs.plan.plan import Plan, make_plan
from fsdp_jobs.plan.shapes import ModelShape, shape_of
from fsdp_jobs.plan.topology import Topology
from fsdp_jobs.train.shape_probe import activations_of, units_of
from tests.plan.test_shapes import OfBiased

PLANS = int(os.environ.get("FSDP_JOBS_PLANS", "10"))
CHOICES = {
    "model": ["llama_160m", "llama_1b", "llama2_7b", "llama3_8b", "llama3_70b"],
    "hardware": ["a100_40", "a100_80", "h100", "h200", "b200", "l40s", "mi300x"],
    "nodes": [1, 2, 3, 8, 32],
    "nproc_per_node": [1, 4, 8],
    "data.seq_len": [128, 2048, 32768],
    "data.micro_batch": [1, 4],
    "data.global_batch": [1, 64, 1000],
    "fsdp.param_dtype": ["auto", "fp32", "bf16", "fp16"],
    "fsdp.reduce_dtype": ["fp32", "bf16"],
    "fsdp.master_dtype": ["fp32", "bf16_stochastic"],
    "fsdp.activation_checkpointing": ["none", "selective", "full", "every_n"],
    "fsdp.cpu_offload": ["true", "false"],
    "fsdp.compile": ["true", "false"],
}
FSDP = st.sampled_from(
    [
        {},
        {"fsdp": "full_shard"},
        {"fsdp": "no_shard"},
        {"fsdp": "hybrid_shard", "fsdp.shard_group": "2"},
        {"fsdp.accumulate_unsharded": "true", "fsdp.chunked_loss": "false"},
    ]
)


def biased(config: JobConfig) -> ModelShape:
    """A GPT of linear layers with biases, probed as a custom model is."""
    with FakeTensorMode():
        model = OfBiased(width=1024)
        return units_of(model, list(model.blocks), [], activations_of(model, list(model.blocks), config.data.seq_len))


@given(st.fixed_dictionaries({key: st.sampled_from(values) for key, values in CHOICES.items()}), st.booleans())
@settings(max_examples=PLANS, deadline=None)
def test_no_option_is_faster_than_its_hardware(chosen: dict[str, Any], has_biases: bool) -> None:
    config = compose_job(["data=synthetic", *(f"{key}={value}" for key, value in chosen.items())])
    shape = biased(config) if has_biases else shape_of(config)
    assert shape is not None
    hardware, topology, per_node = config.hardware, Topology.flat(int(config.nodes)), config.nproc_per_node
    peak = peak_flops(hardware, param_dtype(config.fsdp, "cuda"))
    matmuls = 3 * (shape.activations.layers * shape.activations.matmul_flops + shape.activations.head_flops)
    for option in options_of(config, shape, Grouping(config, topology)):
        step, sent = option.time.step, option.traffic["nccl"]
        tokens = config.data.global_batch * config.data.seq_len / option.layout.world_size
        assert option.time.mfu <= 1
        assert step >= matmuls * tokens / peak
        assert step >= 0.999 * sent.inter_node / (1e9 * hardware.inter_node_gb_s * per_node)
        assert step >= 0.999 * sent.intra_node / (1e9 * max(hardware.intra_node_gb_s, hardware.nvls_gb_s) * per_node)
        if not config.fsdp.cpu_offload:  # AdamW reads parameter, gradient and moments, and writes all but the gradient
            state = 7 * master_bytes(config.fsdp) * shape.shard_numel(option.layout.shard_group)
            assert step >= state / (1e9 * hardware.memory_gb_s)


@given(st.fixed_dictionaries({key: st.sampled_from(values) for key, values in CHOICES.items()}), FSDP)
@settings(max_examples=PLANS // 2, deadline=None)
def test_every_remedy_fits(chosen: dict[str, Any], fsdp: dict[str, str]) -> None:
    overrides = {"data": "synthetic", **chosen, **fsdp}
    assume(chosen["nodes"] * chosen["nproc_per_node"] >= int(fsdp.get("fsdp.shard_group", 1)))
    plan = make_plan(compose_job([f"{key}={value}" for key, value in overrides.items()]))
    assert Plan.from_json(plan.to_json()) == plan
    for remedy in plan.remedies:
        mended = overrides | dict(o.split("=", 1) for o in remedy.overrides)
        followed = make_plan(compose_job([f"{k}={v}" for k, v in mended.items()]), seek_remedies=False)
        memory = followed.memory
        assert memory is not None and followed.fits, remedy
        hardware = compose_job([f"hardware={chosen['hardware']}"]).hardware
        assert memory.total <= hardware.memory_gib * 2**30 * (1 - MARGIN)
        on_host = (memory.host + memory.captured) * followed.ranks_per_node
        assert on_host <= hardware.host_memory_gib * 2**30 * (1 - MARGIN)
