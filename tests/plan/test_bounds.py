"""Bounds that no prediction may cross, and remedies that fit, over random jobs of all kinds of models."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.resolve import param_dtype, peak_flops
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.plan.choose import options_of
from fsdp_jobs.plan.grouping import Grouping
from fsdp_jobs.plan.memory import DTYPE_BYTES, MARGIN, master_bytes
from fsdp_jobs.plan.plan import Plan, make_plan
from fsdp_jobs.plan.remedies import with_overrides
from fsdp_jobs.plan.shape_client import shape_of
from fsdp_jobs.plan.shapes import ModelShape
from fsdp_jobs.plan.topology import Topology
from fsdp_jobs.train import shape_probe
from tests.plan.test_shapes import OfBiased

JOBS = [10, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
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
    "fsdp.activation_offload": ["true", "false"],
    "fsdp.compile": ["true", "false"],
}
RANDOM = st.fixed_dictionaries({key: st.sampled_from(values) for key, values in CHOICES.items()})
FSDP = st.sampled_from(
    [
        {},
        {"fsdp": "full_shard"},
        {"fsdp": "no_shard"},
        {"fsdp": "hybrid_shard", "fsdp.shard_group": "2"},
        {"fsdp.accumulate_unsharded": "true", "fsdp.chunked_loss": "false"},
    ]
)


# models that are probed: their sizes as transformers names them
PROBED: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 1280, "n_layer": 4, "n_head": 20, "n_positions": 32768},
    "llama": {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 4, "num_attention_heads": 32,
        "num_key_value_heads": 4, "max_position_embeddings": 32768,
    },
}  # fmt: skip
MODELS = st.sampled_from(["preset", "preset", "biased", *PROBED])


@cache
def probed(kind: str, seq_len: int) -> ModelShape:
    """The shape of a GPT of linear layers with biases, or of a model of transformers."""
    if kind == "biased":
        with FakeTensorMode():
            model = OfBiased(width=1024)
            blocks = list(model.blocks)
            return shape_probe.units_of(model, blocks, blocks, [], shape_probe.activations_of(model, blocks, seq_len))
    with TemporaryDirectory() as folder:
        tokens = {"vocab_size": 32000, "bos_token_id": 1, "eos_token_id": 2}
        Path(folder, "config.json").write_text(json.dumps({"model_type": kind, **tokens, **PROBED[kind]}))
        model_is = ["model=hf", f"model.name_or_path={folder}", "model.pretrained=false", "data.vocab_size=32000"]
        return shape_probe.shape_of(compose_job([*model_is, f"data.seq_len={seq_len}"]))


def composed(overrides: dict[str, Any]) -> JobConfig:
    return compose_job(["data=synthetic", *(f"{key}={value}" for key, value in overrides.items())])


@cache
def of_options(*options: tuple[str, Any]) -> JobConfig:
    return composed(dict(options))


def composed_once(overrides: dict[str, Any]) -> JobConfig:
    """The same, 20 times as fast: Hydra composes only the options, and single keys are set."""
    is_option = {key: key in ("model", "hardware", "fsdp") for key in overrides}
    config = of_options(*(item for item in overrides.items() if is_option[item[0]]))
    return with_overrides(config, [f"{key}={value}" for key, value in overrides.items() if not is_option[key]])


def shape_in(config: JobConfig, kind: str) -> ModelShape:
    shape = shape_of(config) if kind == "preset" else probed(kind, config.data.seq_len)
    assert shape is not None
    return shape


@pytest.mark.parametrize("jobs", JOBS)
def test_no_option_is_faster_than_its_hardware(jobs: int) -> None:
    settings(max_examples=jobs, deadline=None)(given(RANDOM, MODELS)(check_options))()


@pytest.mark.parametrize("jobs", JOBS)
def test_every_remedy_fits(jobs: int) -> None:
    settings(max_examples=jobs, deadline=None)(given(RANDOM, FSDP, MODELS)(check_remedies))()


def check_options(chosen: dict[str, Any], kind: str) -> None:
    assume(chosen["fsdp.activation_checkpointing"] != "none" or chosen["fsdp.activation_offload"] == "false")
    config = composed_once(chosen)
    shape = shape_in(config, kind)
    hardware, topology, per_node = config.hardware, Topology.flat(int(config.nodes)), config.nproc_per_node
    dtype = param_dtype(config.fsdp, "cuda")
    peak = peak_flops(hardware, dtype)
    matmuls = 3 * (shape.activations.layers * shape.activations.matmul_flops + shape.activations.head_flops)
    for option in options_of(config, shape, Grouping(config, topology)):
        step, sent = option.time.step, option.traffic["nccl"]
        tokens = config.data.global_batch * config.data.seq_len / option.layout.world_size
        assert option.time.mfu <= 1
        assert step >= matmuls * tokens / peak
        assert step >= 0.999 * sent.inter_node / (1e9 * hardware.inter_node_gb_s * per_node)
        assert step >= 0.999 * sent.intra_node / (1e9 * max(hardware.intra_node_gb_s, hardware.nvls_gb_s) * per_node)
        stored = master_bytes(config.fsdp) * shape.shard_numel(option.layout.shard_group)
        if not config.fsdp.cpu_offload:  # AdamW reads parameter, gradient and moments, and writes all but the gradient
            assert step >= 7 * stored / (1e9 * hardware.memory_gb_s)
        up = stored * option.microbatches if config.fsdp.cpu_offload else 0  # from the host, at least once each
        if config.fsdp.activation_offload:
            is_some = chosen["fsdp.activation_checkpointing"] == "every_n"
            every = config.fsdp.activation_checkpointing_every if is_some else 1
            up += tokens * shape.activations.layers // every * shape.activations.block_input * DTYPE_BYTES[dtype]
        assert step >= 0.999 * up / (1e9 * hardware.host_gb_s)


def check_remedies(chosen: dict[str, Any], fsdp: dict[str, str], kind: str) -> None:
    assume(chosen["fsdp.activation_checkpointing"] != "none" or chosen["fsdp.activation_offload"] == "false")
    assume(chosen["nodes"] * chosen["nproc_per_node"] >= int(fsdp.get("fsdp.shard_group", 1)))
    config = composed_once(chosen | fsdp)
    plan, hardware = make_plan(config, shape=shape_in(config, kind)), config.hardware
    assert Plan.from_json(plan.to_json()) == plan
    for remedy in plan.remedies:
        mended = composed(chosen | fsdp | dict(o.split("=", 1) for o in remedy.overrides))
        followed = make_plan(mended, shape=shape_in(mended, kind), seek_remedies=False)
        memory = followed.memory
        assert memory is not None and followed.fits, remedy
        assert memory.total <= hardware.memory_gib * 2**30 * (1 - MARGIN)
        on_host = (memory.host + memory.snapshots) * followed.ranks_per_node
        assert on_host <= hardware.host_memory_gib * 2**30 * (1 - MARGIN)
