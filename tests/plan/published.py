"""Training speeds that others published, and what is needed to plan the same jobs.

Of llm-foundry's 209 rows every fifth is here; the constants were set with all of them in view, none for a single row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.schema import DataConfig, FsdpConfig, JobConfig, LlamaConfig
from fsdp_jobs.plan.shape_client import shape_of
from fsdp_jobs.plan.shapes import ModelShape
from fsdp_jobs.plan.step_time import MEMORY_IN_STEP

FOUNDRY = "github.com/mosaicml/llm-foundry scripts/train/benchmarking/README.md at 061f2c7"
TITAN_H100 = "github.com/pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md at 31a17bf"
FMS = "github.com/foundation-model-stack/fms-fsdp README.md"
# 80.7 GB on one GPU: masters in bf16
KEMPNER = "github.com/KempnerInstitute/KempnerForge benchmarks/mfu_scaling/mfu_scaling.md at 01b461a"
ACCELERATE = "github.com/huggingface/blog pytorch-fsdp.md at 00e67ae (2 Titan RTX of 23.65 GiB)"
TITAN_A100 = "github.com/pytorch/torchtitan docs/performance.md at 0413364"

# MPT has two feed-forward matrices of 4 d where Llama has three: 8/3 d gives the same weights. Its elementwise work,
# in d: LayerNorms 4, GELU 8, residual sums 6, and what the attention kernel copies in backward, about 10. Its attention
# was the first FlashAttention, written in Triton: the rates are those at which its rows of 16k tokens and more agree.
MPT_ELEMENTWISE = 28
MPT_ATTENTION_TFLOPS = {"a100_40": 130.0, "a100_80": 130.0, "h100": 220.0}
# Composer's mixed precision: PURE gathers in bf16, as this trainer does. DEFAULT gathers in fp32 and reduces in bf16.
# Autocast then casts the weights in each pass (4 bytes read, 2 written), and their gradients to fp32 and back (6 + 6).
# FSDP2 copies 4 bytes of each weight in either gather and in the reduction.
DEFAULT_TRAFFIC = (4 + 4 + 2) / (2 + 2 + 2)
CASTS = {"none": 6 + 6 + 6 - 3 * 4, "full": 6 + 6 + 6 + 6 - 3 * 4}  # bytes for each weight of a block, beyond FSDP2's
MPT = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
LLAMA = {
    "llama2 7b": LlamaConfig(vocab_size=32000, dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, ffn_dim=11008),
    "gpt2 xl": LlamaConfig(
        vocab_size=50257, dim=1600, n_layers=48, n_heads=25, n_kv_heads=25, ffn_dim=4267, tie_embeddings=True
    ),  # two matrices of 4 d, as MPT
    "llama2 34b": LlamaConfig(vocab_size=32000, dim=8192, n_layers=48, n_heads=64, n_kv_heads=8, ffn_dim=22016),
    "llama3 14b": LlamaConfig(vocab_size=128256, dim=5120, n_layers=40, n_heads=40, n_kv_heads=8, ffn_dim=17920),
    "llama3 405b": LlamaConfig(vocab_size=128256, dim=16384, n_layers=126, n_heads=128, n_kv_heads=8, ffn_dim=53248),
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
    published: float  # tokens/s a GPU; 0: it ran out of memory
    source: str
    pure: bool = False  # gathered in bf16 (llm-foundry), or parameters, gradients and moments in bf16 (KempnerForge)
    strategy: str = "full_shard"
    per_node: int = 8


# model, GPU, GPUs, tokens per sample, microbatch, microbatches, recomputation, tokens/s a GPU; what else
_FOUNDRY_ROWS = """\
70b  h100      512   2048    8   1  full     1007
30b  h100      128   2048    8   1  full     2199
7b   h100      256   2048    6   1  none    10119
1b   h100      512   2048   12   1  none    39837  zero2
70b  h100       64   2048    8   4  full     1039
70b  h100       32   2048    2  16  full      882
30b  h100        8   8192    1  21  full     1384
30b  h100        8   4096    1  21  full     1802
30b  h100       32   2048   14   3  full     2308
30b  h100        8   1024    6  21  full     2084
13b  h100        8   4096   10   3  full     4717
13b  h100       64   2048    2   1  none     4800
13b  h100       32   2048    2   1  none     4811
7b   h100        8  32768    2   2  full     3318
7b   h100        8   4096   16   2  full     8611
7b   h100        8   2048    6   1  none    10643
3b   h100        8  65536    1   2  full     3262
3b   h100       64   2048    6   3  none    22525
1b   h100        8  65536    1   2  full     5506
1b   h100       64   2048   20   1  none    44402
1b   h100        8    512   56   4  none    52275
760m h100       32   2048   24   1  none    67971
70b  a100_80    64   2048    8   4  full      410  pure
70b  a100_80    32   2048    2  16  full      373  pure
30b  a100_80     8   4096    1  21  full      814
30b  a100_80     8   2048    3  21  full      916
30b  a100_80     8   1024    6  21  full      946
13b  a100_80     8   4096   10   3  full     2060
13b  a100_80     8   2048    2   3  none     2262
7b   a100_80     8  16384    4   2  full     2453
7b   a100_80     8   4096   16   2  full     3684
7b   a100_80     8   2048    6   2  none     4641
3b   a100_80     8  65536    1   2  full     1767
3b   a100_80     8   2048   10   2  none    10811
1b   a100_80     8  16384    2   4  none     9956
1b   a100_80     8   2048   14   4  none    20513
1b   a100_80     8    512   56   4  none    23148
760m a100_80     8   4096   12   2  none    27351
350m a100_80     8  32768    2   2  none    13652
350m a100_80     8   1024   64   2  none    64813
125m a100_80     8   8192    8   2  none    90392
125m a100_80     8    512  128   2  none   165681
13b  a100_40     8   8192    1  16  full     1407  pure
13b  a100_40    64   2048   16   1  full     1976  pure
13b  a100_40    16   2048   10   1  full     1993  pure
7b   a100_40     8   8192    3   4  full     2887  pure
7b   a100_40   128   2048   18   1  full     3623  pure
7b   a100_40    16   2048   16   1  full     3645  pure
3b   a100_40     8  16384    2   8  full     4465  pure
3b   a100_40    32   2048    6   1  none     9914  pure
1b   a100_40     8  32768    1   4  full     5095  pure
1b   a100_40    64   2048   10   1  none    19001  pure
1b   a100_40     8    512   32   8  none    21782  pure
760m a100_40   128   2048   12   1  none    28940  pure
760m a100_40     8   1024   24   4  none    33422  pure
350m a100_40     8   4096    8   4  none    46833  pure
350m a100_40     8   2048   16   4  none    55995  pure
125m a100_40     8   8192    5   3  none    86858  pure
125m a100_40    16   2048   26   1  none   130535  pure
"""


def _foundry(row: str) -> Published:
    model, hardware, gpus, seq_len, micro_batch, accumulate, checkpointing, speed, *more = row.split()
    sizes = map(int, (gpus, seq_len, micro_batch, accumulate))
    strategy = "shard_grad_op" if "zero2" in more else "full_shard"
    job = (f"mpt {model}", hardware, *sizes, checkpointing, False, float(speed), FOUNDRY)
    return Published(*job, pure="pure" in more, strategy=strategy)


ROWS = (
    *map(_foundry, _FOUNDRY_ROWS.splitlines()),
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
    Published("llama2 70b", "a100_80", 64, 4096, 1, 1, "every_n", False, 355, TITAN_A100),
    Published("llama2 13b", "a100_80", 64, 4096, 2, 1, "every_n", False, 1904, TITAN_A100),
    Published("llama3 8b", "a100_80", 64, 8192, 1, 1, "every_n", False, 2973, TITAN_A100),
    # every third block is recomputed at 13b, every one above, as the quotients of HFU and MFU say
    Published("llama2 7b", "a100_80", 128, 4096, 2, 1, "none", True, 4550, FMS, strategy="hybrid_shard"),
    Published("llama2 13b", "a100_80", 128, 4096, 2, 1, "every_n", True, 2150, FMS),
    Published("llama2 34b", "a100_80", 128, 4096, 2, 1, "full", True, 820, FMS),
    Published("llama2 70b", "a100_80", 128, 4096, 2, 1, "full", True, 410, FMS),
    Published("llama2 7b", "h100", 96, 4096, 2, 1, "none", True, 9600, FMS, strategy="hybrid_shard"),
    Published("llama2 13b", "h100", 96, 4096, 2, 1, "every_n", True, 4850, FMS),
    Published("llama2 34b", "h100", 96, 4096, 2, 1, "full", True, 1830, FMS),
    Published("llama2 70b", "h100", 96, 4096, 2, 1, "full", True, 890, FMS),
    Published("llama3 8b", "h200", 1, 4096, 4, 2, "full", True, 10471, KEMPNER, True, strategy="no_shard", per_node=1),
    Published("llama3 8b", "h200", 2, 4096, 4, 2, "full", True, 9364, KEMPNER, True, per_node=2),
    Published("llama3 8b", "h200", 4, 4096, 4, 2, "full", True, 9746, KEMPNER, True, per_node=4),
    Published("llama3 14b", "h200", 8, 4096, 4, 4, "full", False, 4426, KEMPNER, True, per_node=4),
)

OUT_OF_MEMORY = (
    Published("llama2 70b", "a100_80", 64, 4096, 2, 1, "every_n", False, 0, TITAN_A100),
    Published("llama3 405b", "h100", 128, 8192, 2, 1, "full", False, 0, TITAN_H100),
    Published("gpt2 xl", "l40s", 1, 12, 1, 1, "none", False, 0, ACCELERATE, strategy="no_shard", per_node=1),
    Published("gpt2 xl", "l40s", 2, 12, 1, 1, "none", False, 0, ACCELERATE, strategy="no_shard", per_node=2),
)


def shape(row: Published) -> ModelShape:
    """The shape of a row's model; MPT keeps 16 d a block: 4 d and its GELU where a Llama has four of 8/3 d.

    It has no rotary embedding.
    """
    config = job(row)
    found = shape_of(config)
    assert found is not None
    if row.model.startswith("mpt"):
        d = found.activations.block_input
        elementwise = MPT_ELEMENTWISE * d
        if not row.pure:
            passes = 4 if row.checkpointing == "full" else 3  # forward once, backward twice, recomputation once
            casts = CASTS[row.checkpointing] * found.largest.numel * MEMORY_IN_STEP
            elementwise += int(casts / (2 * passes * row.micro_batch * row.seq_len))
        kept = replace(found.activations, block_saved=16 * d, elementwise=elementwise, last_flops=8 * d * d)
        found = replace(found, activations=kept)
    return found


@cache
def _on(hardware: str) -> JobConfig:
    return compose_job([f"hardware={hardware}"])


def job(row: Published) -> JobConfig:
    """The job of a row, in bf16."""
    config = _on(row.hardware)
    known = {"gpus_per_node": row.per_node, "nvlink_domain": row.per_node}
    if row.source == TITAN_H100:  # HBM2e (2.4 TB/s) and 500 W: "between SXM and NVL", as the source says
        known |= {"memory_gib": 95.0, "memory_gb_s": 2400.0, "bf16_tflops": (989.0 + 835.0) / 2}
    if row.source == FMS:  # 400 and 800 Gb/s per node
        known |= {"inter_node_gb_s": 5.7 if row.hardware == "a100_80" else 11.4}
    if row.source == ACCELERATE:
        known |= {"memory_gib": 23.65}
    if row.source == FOUNDRY:
        known |= {"attention_tflops": MPT_ATTENTION_TFLOPS[row.hardware]}
        if not row.pure:
            links = ("intra_node_gb_s", "inter_node_gb_s")
            known |= {link: getattr(config.hardware, link) / DEFAULT_TRAFFIC for link in links}
    config = replace(config, hardware=replace(config.hardware, **known))
    if row.model.startswith("mpt"):
        d, layers, heads = MPT[row.model.split()[1]]
        model = LlamaConfig(
            vocab_size=50368, dim=d, n_layers=layers, n_heads=heads, n_kv_heads=heads, ffn_dim=8 * d // 3,
            tie_embeddings=True,
        )  # fmt: skip
    else:
        model = LLAMA[row.model]
    fsdp = FsdpConfig(
        strategy=row.strategy,
        shard_group=row.per_node if row.strategy == "hybrid_shard" else "auto",
        master_dtype="bf16" if row.pure and row.source == KEMPNER else "fp32",
        reduce_dtype="bf16" if row.source in (FOUNDRY, FMS) else "fp32",
        activation_checkpointing=row.checkpointing,
        activation_checkpointing_every=3 if row.source == FMS else 2,
        compile=row.compiled,
        accumulate_unsharded=False,
        chunked_loss="auto" if row.published else False,  # as those that ran out of memory made it
    )
    batch = row.gpus * row.micro_batch * row.accumulate
    data = DataConfig("synthetic", seq_len=row.seq_len, global_batch=batch, micro_batch=row.micro_batch)
    return replace(config, nodes=row.gpus // row.per_node, model=model, fsdp=fsdp, data=data)
