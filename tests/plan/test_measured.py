"""Planned memory against peaks of torch's allocator, measured in optimizer steps of one rank by benchmarks/gpu.py.

On an H100 80GB HBM3, the largest model on an H200; torch 2.11, NCCL 2.28.9; 2026-11-23, and 27 with whole logits.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu_parts.bench import RANDOM
from benchmarks.gpu_parts.memory import MEMORY
from fsdp_jobs.config.hydra import compose_job, merge_overrides
from fsdp_jobs.config.schema import HfConfig, JobConfig, LlamaConfig
from fsdp_jobs.models import llama
from fsdp_jobs.plan.memory import GIB
from fsdp_jobs.plan.plan import make_plan
from fsdp_jobs.plan.shapes import llama_shape
from fsdp_jobs.train.shape_probe import shape_of

IN_CHUNKS_GIB = {
    "160m": 5.8,
    "160m, long context": 3.3,
    "160m, full recomputation": 3.1,
    "1b": 28.4,
    "1b, full recomputation": 19.6,
    "1b, selective recomputation": 22.9,
    "1b, every second block": 22.8,
    "1b, parameters offloaded": 14.6,
    "1b, activations offloaded": 19.6,
    "3b, full recomputation": 49.3,
    "8b, full recomputation": 121.7,
}
WHOLE_GIB = {
    "160m": 7.4,
    "160m, long context": 7.8,
    "160m, full recomputation": 4.7,
    "1b": 37.9,
    "1b, full recomputation": 26.6,
    "1b, selective recomputation": 32.9,
    "1b, every second block": 32.2,
    "1b, fp32": 32.7,
    "1b, parameters offloaded": 24.1,
    "1b, activations offloaded": 26.1,
    "GPT-2 of transformers": 19.6,
    "Llama of transformers": 26.9,
    "3b, full recomputation": 49.8,
    "8b, bf16 masters": 63.7,
}
FP32_WITH_GROUPED_HEADS_GIB = 46.6  # attention's kernel was given fewer key than query heads


def job(name: str, chunked: str = "true") -> JobConfig:
    hardware = "h200" if name == "8b, full recomputation" else "h100"
    here = ["nodes=1", "nproc_per_node=1", "cluster.accelerator=cuda", f"hardware={hardware}", "fsdp=full_shard"]
    here += [f"fsdp.chunked_loss={chunked}"]  # as they were measured
    return compose_job(merge_overrides([*RANDOM, *here], MEMORY[name]))


@pytest.mark.parametrize("name", IN_CHUNKS_GIB)
def test_peaks_of_a_gpu(name: str) -> None:
    memory = make_plan(job(name), seek_remedies=False).memory
    assert memory is not None
    assert 0.95 <= IN_CHUNKS_GIB[name] * GIB / memory.tensors <= 1.05


@pytest.mark.parametrize("name", WHOLE_GIB)
def test_peaks_of_a_gpu_with_whole_logits(name: str) -> None:
    config = job(name, chunked="false")
    shape = shape_of(config) if isinstance(config.model, HfConfig) else None
    memory = make_plan(config, shape=shape, seek_remedies=False).memory
    assert memory is not None
    assert 0.95 <= WHOLE_GIB[name] * GIB / memory.tensors <= 1.05


def test_fp32_keeps_scores_where_no_fused_kernel_takes_its_heads() -> None:
    config = job("1b, fp32")
    mended = make_plan(config, seek_remedies=False).memory
    grouped = llama_shape(config.model)  # type: ignore[arg-type]
    grouped = replace(grouped, activations=replace(grouped.activations, grouped_heads=True))
    measured = make_plan(config, shape=grouped, seek_remedies=False).memory
    assert mended is not None and measured is not None
    assert 0.95 <= FP32_WITH_GROUPED_HEADS_GIB * GIB / measured.tensors <= 1.05
    assert mended.tensors < 30 * GIB  # the trainer's model repeats keys and values


def test_repeated_keys_and_values_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = llama.Llama(LlamaConfig(vocab_size=64, dim=32, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=48))
    tokens = torch.randint(64, (2, 16))
    grouped = model(tokens)
    monkeypatch.setattr(llama, "_takes_grouped_heads", lambda q: False)
    torch.testing.assert_close(model(tokens), grouped)
