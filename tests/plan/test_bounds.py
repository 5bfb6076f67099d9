"""Bounds that no prediction may cross, over random jobs; FSDP_JOBS_PLANS sets how many."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.resolve import param_dtype, peak_flops
from fsdp_jobs.plan.choose import options_of
from fsdp_jobs.plan.grouping import Grouping
from fsdp_jobs.plan.plan import make_plan
from fsdp_jobs.plan.shapes import shape_of
from fsdp_jobs.plan.topology import Topology

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
    "fsdp.activation_checkpointing": ["none", "selective", "full", "every_n"],
    "fsdp.cpu_offload": ["true", "false"],
    "fsdp.compile": ["true", "false"],
}


@given(st.fixed_dictionaries({key: st.sampled_from(values) for key, values in CHOICES.items()}))
@settings(max_examples=PLANS, deadline=None)
def test_no_option_is_faster_than_its_hardware(chosen: dict[str, Any]) -> None:
    overrides = ["data=synthetic", *(f"{key}={value}" for key, value in chosen.items())]
    config = compose_job(overrides)
    shape = shape_of(config)
    assert shape is not None
    hardware, topology = config.hardware, Topology.flat(int(config.nodes), config.nproc_per_node)
    peak = peak_flops(hardware, param_dtype(config.fsdp, "cuda"))
    matmuls = 3 * (shape.activations.layers * shape.activations.matmul_flops + shape.activations.head_flops)
    for option in options_of(config, shape, Grouping(config, topology)):
        tokens = config.data.global_batch * config.data.seq_len / option.layout.world_size
        assert option.time.mfu <= 1
        assert option.time.step >= matmuls * tokens / peak
        wire_gb_s = hardware.inter_node_gb_s * config.nproc_per_node
        assert option.time.step >= 0.999 * option.traffic["nccl"].inter_node / (1e9 * wire_gb_s)


@given(st.fixed_dictionaries({key: st.sampled_from(values) for key, values in CHOICES.items()}))
@settings(max_examples=PLANS // 2, deadline=None)
def test_every_remedy_fits(chosen: dict[str, Any]) -> None:
    overrides = {"data": "synthetic", **chosen}
    plan = make_plan(compose_job([f"{key}={value}" for key, value in overrides.items()]))
    for remedy in plan.remedies:
        mended = overrides | dict(o.split("=", 1) for o in remedy.overrides)
        assert make_plan(compose_job([f"{k}={v}" for k, v in mended.items()]), seek_remedies=False).fits, remedy
