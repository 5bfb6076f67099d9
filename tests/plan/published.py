"""Training speeds that others published, and what is needed to plan the same jobs. Nothing is fitted to
them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.schema import DataConfig, FsdpConfig, JobConfig, LlamaConfig

FOUNDRY = "github.com/mosaicml/llm-foundry scripts/train/benchmarking/README.md at 061f2c7"
TITAN_H100 = "github.com/pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md at 31a17bf"
TITAN_A100 = "github.com/pytorch/torchtitan docs/performance.md at 0413364"

# MPT has two feed-forward matrices of 4 d where Llama has three: 8/3 d gives the same weights.
MPT = {
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
LLAMA = {
    "llama2 13b": LlamaConfig(vocab_size=32000, dim=5120, n_layers=40, n_heads=40, n_kv_heads=40, ffn_dim=13824),
    "llama2 70b": LlamaConfig(vocab_size=32000, dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28672),
    "llama3 8b": LlamaConfig(vocab_size=128256, dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14336),
    "llama3 70b": LlamaConfig(vocab_size=128256, dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28672),
}


@dataclass(frozen=True)
class Published:
    """One row: the job, and tokens/s a GPU as published."""

    model: str
    hardware: str
    gpus: int
    seq_len: int
    micro_batch: int
    accumulate: int
    checkpointing: str
    compiled: bool
    published: float  # tokens/s a GPU
    source: str


def _foundry(model: str, hardware: str, gpus: int, seq: int, micro: int, accum: int, full: bool, t: float) -> Published:
    return Published(f"mpt {model}", hardware, gpus, seq, micro, accum, "full" if full else "none", False, t, FOUNDRY)


ROWS = (
    _foundry("70b", "a100_80", 64, 2048, 8, 4, True, 410),
    _foundry("70b", "a100_80", 32, 2048, 2, 16, True, 373),
    _foundry("30b", "a100_80", 8, 4096, 1, 21, True, 814),
    _foundry("30b", "a100_80", 8, 2048, 3, 21, True, 916),
    _foundry("13b", "a100_80", 8, 4096, 10, 3, True, 2060),
    _foundry("13b", "a100_80", 8, 2048, 2, 3, False, 2262),
    _foundry("7b", "a100_80", 8, 4096, 16, 2, True, 3684),
    _foundry("7b", "a100_80", 8, 2048, 6, 2, False, 4641),
    _foundry("3b", "a100_80", 8, 2048, 10, 2, False, 10811),
    _foundry("1b", "a100_80", 8, 2048, 14, 4, False, 20513),
    _foundry("7b", "a100_40", 128, 2048, 18, 1, True, 3623),
    _foundry("13b", "a100_40", 64, 2048, 16, 1, True, 1976),
    _foundry("70b", "h100", 64, 2048, 8, 4, True, 1039),
    _foundry("70b", "h100", 32, 2048, 2, 16, True, 882),
    _foundry("30b", "h100", 32, 2048, 14, 3, True, 2308),
    _foundry("30b", "h100", 8, 4096, 1, 21, True, 1802),
    _foundry("13b", "h100", 64, 2048, 2, 1, False, 4800),
    _foundry("13b", "h100", 8, 4096, 10, 3, True, 4717),
    _foundry("7b", "h100", 8, 4096, 16, 2, True, 8611),
    _foundry("7b", "h100", 8, 2048, 6, 1, False, 10643),
    _foundry("3b", "h100", 64, 2048, 6, 3, False, 22525),
    _foundry("1b", "h100", 64, 2048, 20, 1, False, 44402),
    # torchtitan's selective checkpointing runs half of the matmuls again: every second block does as much
    Published("llama3 8b", "h100", 8, 8192, 2, 1, "every_n", False, 5762, TITAN_H100),
    Published("llama3 8b", "h100", 8, 8192, 2, 1, "every_n", True, 6667, TITAN_H100),
    Published("llama3 8b", "h100", 128, 8192, 2, 1, "every_n", False, 5605, TITAN_H100),
    Published("llama3 8b", "h100", 128, 8192, 2, 1, "every_n", True, 6514, TITAN_H100),
    Published("llama3 8b", "a100_80", 64, 8192, 1, 1, "every_n", False, 2904, TITAN_A100),
    Published("llama3 70b", "a100_80", 64, 8192, 1, 1, "full", False, 331, TITAN_A100),
    Published("llama2 13b", "a100_80", 64, 4096, 2, 1, "none", False, 2162, TITAN_A100),
    Published("llama2 13b", "a100_80", 64, 4096, 2, 1, "every_n", False, 1914, TITAN_A100),
    Published("llama2 70b", "a100_80", 64, 4096, 2, 1, "full", False, 353, TITAN_A100),
)


@cache
def _on(hardware: str) -> JobConfig:
    return compose_job([f"hardware={hardware}"])


def job(row: Published) -> JobConfig:
    """The job of a row; all of them ran FULL_SHARD over everything, in bf16."""
    config = _on(row.hardware)
    if row.source == TITAN_H100:  # these H100s had HBM2e (2.4 TB/s), as the source says
        config = replace(config, hardware=replace(config.hardware, memory_gib=95.0, memory_gb_s=2400.0))
    if row.model.startswith("mpt"):
        d, layers, heads = MPT[row.model.split()[1]]
        model = LlamaConfig(
            vocab_size=50368, dim=d, n_layers=layers, n_heads=heads, n_kv_heads=heads, ffn_dim=8 * d // 3,
            tie_embeddings=True,
        )  # fmt: skip
    else:
        model = LLAMA[row.model]
    fsdp = FsdpConfig(
        strategy="full_shard",
        reduce_dtype="fp32" if "torchtitan" in row.source else "bf16",
        activation_checkpointing=row.checkpointing,
        compile=row.compiled,
        accumulate_unsharded=False,
    )
    batch = row.gpus * row.micro_batch * row.accumulate
    data = DataConfig("synthetic", seq_len=row.seq_len, global_batch=batch, micro_batch=row.micro_batch)
    return replace(config, nodes=row.gpus // 8, model=model, fsdp=fsdp, data=data)
