"""Published speeds that no constant of the plan was set with; `python -m tests.plan.unseen` prints the docs' tables.

What a publication does not state is written at its rows. Speeds are tokens/s a GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.schema import DataConfig, FsdpConfig, JobConfig, LlamaConfig
from fsdp_jobs.plan.plan import Plan, make_plan
from fsdp_jobs.plan.shape_client import shape_of
from tests.plan.published import LLAMA, MPT_ELEMENTWISE

# eager; 400 and 800 Gb/s per node; 13b recomputes every third block, as its HFU says, 7b is sharded inside nodes
IBM = "pytorch.org/blog/maximizing-training, 13 March 2024"
# TFLOP/s with recomputation, by the formula in example_utils.py; lengths are the scripts' default
ATORCH = "github.com/intelligent-machine-learning/dlrover atorch/examples/llama2/README.md at d39a369"
TINY = "github.com/jzhang38/TinyLlama README.md at 026587c"  # fused kernels, here compile; the network is not stated
TITAN_929 = "github.com/pytorch/torchtitan issues/929, 7 March 2025"
AO = "github.com/pytorch/ao torchao/prototype/float8nocompile"  # batch 1, as its memory says
# H100, the number not stated: one node, as the scripts' default; a fused or compiled loss, in the plan an eager one
OLMO = "allenai/OLMo-core README.md at v1.5.0, src/scripts/train/OLMo-*B.py"
# Llama 3.1 8B at 8,192 tokens; neither stated: compiled, with selective checkpointing of which every_n stands for
CRUSOE = "github.com/crusoecloud/torchtitan README.md at 2dacbf1"
# in bf16 (in the plan fp32), every parameter trained, or LoRA of rank 8; gradients are summed over 4 microbatches
VECTORLM = "github.com/VectorInstitute/vectorlm docs/reference_throughput.md at 0703e07"
# LoRA; Transformer Engine's and Triton's kernels, here compile
AUTOMODEL = "github.com/NVIDIA-NeMo/Automodel docs/performance-summary.mdx at 2861c41"
# Llama 7B; the middles of the ranges
TITAN_165 = "github.com/pytorch/torchtitan pull/165, 26 March 2024"
# 4 p5.48xlarge; batch and recomputation not stated: torchtitan's defaults
AWS = "Efficient pre-training of Llama 3-like model architectures using torchtitan on Amazon SageMaker, AWS blog"
# its step time gives the length; recomputation not stated: without it the job would not fit
ACCELERATE = "github.com/huggingface/blog deepspeed-to-fsdp-and-back.md at 09e9aa2"
TORCHTUNE = "github.com/meta-pytorch/torchtune README.md at 7d470bf"  # all in bf16; compiled with its loss
# FSDP1 of November 2023, batch 1, without the rows that recompute some blocks; neither network nor reduction stated
YAFSDP = "github.com/yandex/YaFSDP README.md at 669fc36"
LEONARDO = "github.com/Modalities/modalities docs/scaling_experiments/scaling_leonardo.md at 8a9b661"
MARENOSTRUM = "github.com/Modalities/modalities docs/scaling_experiments/scaling_mn5.md at 5644c95"

# Both have 4 GPUs a node: A100 of 124 multiprocessors at 1,640 GB/s, 4 x 100 Gb/s; H100 at 2,000 GB/s, 4 x 200 Gb/s.
SITES = {
    LEONARDO: ("a100_80", {"memory_gib": 63.5, "bf16_tflops": 358.0, "memory_gb_s": 1640.0, "inter_node_gb_s": 11.4}),
    MARENOSTRUM: ("h100", {"memory_gib": 63.5, "memory_gb_s": 2000.0, "inter_node_gb_s": 22.8}),
}
TITAN = {"memory_gib": 95.0, "memory_gb_s": 2400.0, "bf16_tflops": (989.0 + 835.0) / 2}  # as in published.py
# The published MFU and speeds give 12 x width^2 weights in each block; eager, since nothing says otherwise.
GPT = {"2.7b": (2560, 32, 32), "6.7b": (4096, 32, 32), "13b": (5120, 40, 40), "28b": (6144, 60, 48)}
MODELS = {
    **LLAMA,
    "tinyllama": LlamaConfig(vocab_size=32000, dim=2048, n_layers=22, n_heads=32, n_kv_heads=4, ffn_dim=5632),
    "llama3.2 3b": LlamaConfig(
        vocab_size=128256, dim=3072, n_layers=28, n_heads=24, n_kv_heads=8, ffn_dim=8192, tie_embeddings=True
    ),
    "qwen2.5 7b": LlamaConfig(vocab_size=152064, dim=3584, n_layers=28, n_heads=28, n_kv_heads=4, ffn_dim=18944),
    "olmo 1b": LlamaConfig(vocab_size=100352, dim=2048, n_layers=18, n_heads=16, n_kv_heads=16, ffn_dim=8192),
    "olmo 7b": LlamaConfig(vocab_size=100352, dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, ffn_dim=11008),
    "olmo 13b": LlamaConfig(vocab_size=100352, dim=5120, n_layers=40, n_heads=40, n_kv_heads=40, ffn_dim=13824),
} | {
    name: LlamaConfig(vocab_size=50304, dim=d, n_layers=n, n_heads=heads, n_kv_heads=heads, ffn_dim=8 * d // 3)
    for name, (d, n, heads) in GPT.items()
}

# model, microbatch, tokens per sample, recomputation, sharding, and samples/s of all GPUs
_LEONARDO_ROWS = """\
2.7b 1 4096 none full_shard 8:16.64 16:33.26 32:62.52 64:86.16 128:100.37
2.7b 1 4096 none hybrid_shard 8:16.71 16:32.79 32:64.78 64:129.26 128:218.74 256:294.5
2.7b 2 4096 none full_shard 8:18.63 16:36.96 32:73.76 64:146.12 128:205.96 256:303.17
2.7b 2 4096 none hybrid_shard 8:18.43 16:36.68 32:72.63 64:145.31 128:285.64 256:495.44
2.7b 4 4096 none full_shard 8:19.94 16:39.68 32:78.3 64:155.21 128:303.76 256:506.08
6.7b 1 4096 none full_shard 8:8.01 16:14.97 32:29.57 64:47.94 128:81.64 256:103.64
6.7b 1 4096 none hybrid_shard 8:8.05 16:15.78 32:31.35 64:57.43 128:108.05
6.7b 2 4096 none full_shard 8:9.28 16:18.35 32:36.65 64:72.72 128:131.59 256:225.24
13b 1 4096 none full_shard 16:8.19 32:14.18 64:30.07 128:50.07 256:65.19
"""
_MARENOSTRUM_ROWS = """\
2.7b 1 4096 none full_shard 4:12.7 8:25.17 16:50.33 32:97.85 64:193.05 128:346.45 256:563.82 512:822.76
2.7b 1 4096 none hybrid_shard 4:12.68 32:95.89 64:192.11 128:380.13 512:1272.83
2.7b 2 4096 none full_shard 4:15.06 8:29.75 16:59.61 32:117.62 64:235.96 128:455.87 256:883.07 512:1365.31
2.7b 2 4096 none hybrid_shard 4:15.14 8:29.6 16:58.7 32:117.07 64:234.65 512:1831.71 1024:3618
2.7b 2 8192 none full_shard 8:14.11 16:28.16 32:56.16 64:110.76 512:866.02 1024:1105.99
2.7b 3 4096 none full_shard 4:16.17 512:1724.39
2.7b 3 4096 none hybrid_shard 4:16.05 512:1975.35
2.7b 4 4096 none full_shard 8:32.91 64:258.33 512:1962.75
6.7b 1 4096 none full_shard 8:12.51 16:24.05 32:48.32 64:92.97 128:169.51 256:294.46 512:499.51
6.7b 1 4096 none hybrid_shard 8:12.22 16:24.07 32:47.63 64:94.5 128:186.12 256:347.64 512:568.27
6.7b 1 8192 none full_shard 8:7.02 16:14.09 64:56.13 128:110.46 256:214.71 512:403.06 1024:507.69
6.7b 2 4096 none full_shard 8:15.26 16:30.66 64:123.2 128:241 256:468.82 512:852.15 1024:1406.32
13b 1 4096 none full_shard 8:6.26 16:13.29 64:51.25 128:91.4 256:173.17 512:294.97 1024:474.42
13b 1 8192 full full_shard 8:3.21 16:6.41 32:12.76 64:25.62 128:45.98 256:100.04 512:196.74 1024:329
28b 1 8192 full full_shard 16:2.9 32:5.53 64:11.61 128:22.95 256:44.22 512:87.36 1024:162.16 2048:297
"""


@dataclass(frozen=True)
class Unseen:
    """One row: the job, in bf16, and tokens/s a GPU as published."""

    source: str
    model: str
    hardware: str
    gpus: int
    seq_len: int
    micro_batch: int
    published: float
    checkpointing: str = "none"
    compiled: bool = False
    strategy: str = "full_shard"
    accumulate: int = 1
    per_node: int = 8
    reduce_dtype: str = "fp32"
    master_dtype: str = "fp32"
    frozen: float = 0.0  # share of the parameters
    known: dict[str, float] = field(default_factory=dict, hash=False)  # what differs from the preset


def _atorch(gpus: int, tflops: float) -> Unseen:
    """Speed from TFLOP/s in which blocks count four times their forward and the head three times."""
    m, s = MODELS["llama2 7b"], 4096
    block = 8 * m.dim**2 + 4 * s * m.dim + 6 * m.dim * m.ffn_dim  # FLOPs per token
    flops = 4 * m.n_layers * block + 6 * m.dim * m.vocab_size
    known = {"inter_node_gb_s": 11.4}  # 800 Gb/s per node
    return Unseen(ATORCH, "llama2 7b", "a100_80", gpus, s, 4, tflops * 1e12 / flops, "full", known=known)


def _crusoe(
    hardware: str, micro_batch: int, speeds: dict[int, float], per_node: int = 8, domain: int = 8
) -> list[Unseen]:
    job = (8192, micro_batch)
    known = {"nvlink_domain": domain}
    return [
        Unseen(CRUSOE, "llama3 8b", hardware, gpus, *job, speed, "every_n", True, per_node=per_node, known=known)
        for gpus, speed in speeds.items()
    ]


def _site(source: str, rows: str) -> Iterator[Unseen]:
    hardware, known = SITES[source]
    for row in rows.splitlines():
        model, micro_batch, seq_len, checkpointing, strategy, *speeds = row.split()
        for gpus, samples in (map(float, speed.split(":")) for speed in speeds):
            yield Unseen(
                source, model, hardware, int(gpus), int(seq_len), int(micro_batch), samples * int(seq_len) / gpus,
                checkpointing, strategy=strategy, per_node=4, reduce_dtype="bf16", known=known,
            )  # fmt: skip


# GPUs, share of frozen parameters, tokens/s of all GPUs at 2,048, 4,096 and 8,192 tokens
_VECTORLM = (
    (2, 0.0, (6346.0, 6182.59, 5772.91)),
    (4, 0.0, (12688.44, 12249.74, 11463.46)),
    (2, 0.998, (7182.97, 6955.58, 6452.96)),
    (4, 0.998, (14299.47, 13834.43, 12769.23)),
)
# microbatch, recomputation, compiled, tokens/s a GPU
_TITAN_165 = (
    (8, "full", False, 6200),
    (8, "every_n", False, 6700),
    (8, "full", True, 7350),
    (8, "every_n", True, 8250),
    (16, "every_n", True, 8600),
    (8, "none", True, 9200),
)
# GPUs, seconds of a step at 2,048, 4,096 and 8,192 tokens
_YAFSDP = (
    ("llama2 7b", 64, (0.90, 1.21, 2.29)),
    ("llama2 7b", 128, (0.97, 1.22, 2.31)),
    ("llama2 13b", 128, (1.76, 2.14)),
    ("llama2 34b", 128, (4.27,)),
    ("llama2 34b", 256, (4.50,)),
    ("llama3 8b", 64, (1.10, 1.48)),
)
_IBM = (("7b", "none", "hybrid_shard"), ("13b", "every_n", "full_shard"))
_IBM += (("34b", "full", "full_shard"), ("70b", "full", "full_shard"))
_IBM_SPEEDS = {("a100_80", 128, 5.7): (3700, 1800, 700, 370), ("h100", 96, 11.4): (7500, 3800, 1550, 800)}
UNSEEN = (
    *(
        Unseen(
            IBM, f"llama2 {model}", hardware, gpus, 4096, 2, speed, checkpointing, strategy=strategy,
            reduce_dtype="bf16", known={"inter_node_gb_s": network},
        )
        for (hardware, gpus, network), speeds in _IBM_SPEEDS.items()
        for (model, checkpointing, strategy), speed in zip(_IBM, speeds, strict=True)
    ),
    *(_atorch(gpus, tflops) for gpus, tflops in ((8, 204.67), (16, 197.22), (32, 196.04), (64, 195.14))),
    Unseen(TINY, "tinyllama", "a100_40", 16, 2048, 8, 24000, compiled=True, accumulate=4),
    # selective checkpointing of torchtitan as in published.py
    Unseen(TITAN_929, "llama3 8b", "h100", 8, 8192, 1, 6500, "every_n", compiled=True, known=TITAN),
    Unseen(AO, "llama3 8b", "h100", 8, 4096, 1, 5339, known=TITAN),
    Unseen(AO, "llama3 8b", "h100", 8, 4096, 1, 4882.4, "every_n", known=TITAN),
    Unseen(AO, "llama3 8b", "h100", 8, 4096, 1, 4502, "full", known=TITAN),
    Unseen(OLMO, "olmo 1b", "h100", 8, 4096, 4, 44000, compiled=True, accumulate=32),
    Unseen(OLMO, "olmo 7b", "h100", 8, 4096, 2, 10000, compiled=True, accumulate=64),
    Unseen(OLMO, "olmo 13b", "h100", 8, 4096, 1, 4600, compiled=True, accumulate=256),
    *_crusoe("h100", 2, {16: 8714, 32: 7582, 128: 7169}),
    *_crusoe("h200", 4, {32: 8895, 64: 8844, 128: 9044}),
    *_crusoe("b200", 5, {8: 17469, 16: 17500}),
    *_crusoe("b200", 5, {12: 18284, 36: 17975, 68: 17581}, per_node=4, domain=72),
    Unseen(AUTOMODEL, "llama3 8b", "h100", 1, 4096, 2, 12472.87, compiled=True, strategy="no_shard", per_node=1,
           accumulate=16, frozen=0.995),
    *(
        Unseen(VECTORLM, "llama3 8b", "a100_80", gpus, seq_len, 16384 // seq_len, speed / gpus, "full", per_node=gpus,
               accumulate=4, frozen=frozen)
        for gpus, frozen, speeds in _VECTORLM
        for seq_len, speed in zip((2048, 4096, 8192), speeds, strict=True)
    ),
    Unseen(AUTOMODEL, "qwen2.5 7b", "h100", 1, 4096, 2, 14110.05, compiled=True, strategy="no_shard", per_node=1,
           accumulate=16, frozen=0.995),
    *(
        Unseen(TITAN_165, "llama2 7b", "h100", 8, 2048, micro_batch, speed, checkpointing, compiled, known=TITAN)
        for micro_batch, checkpointing, compiled, speed in _TITAN_165
    ),
    Unseen(AWS, "llama3 8b", "h100", 32, 8192, 1, 6475, "every_n"),
    Unseen(AWS, "llama3 8b", "h100", 32, 8192, 1, 7166, "every_n", compiled=True),
    Unseen(ACCELERATE, "llama2 7b", "a100_80", 4, 4096, 8, 3158.7, "full", per_node=4),
    *(
        Unseen(TORCHTUNE, "llama3.2 3b", "a100_80", 1, 4096, 2, speed, compiled=compiled, strategy="no_shard",
               per_node=1, reduce_dtype="bf16", master_dtype="bf16")
        for compiled, speed in ((False, 7075), (True, 8998))
    ),
)  # fmt: skip
LINKED = tuple(
    Unseen(YAFSDP, model, "a100_80", gpus, seq_len, 1, seq_len / step)
    for model, gpus, steps in _YAFSDP
    for seq_len, step in zip((2048, 4096, 8192), steps, strict=False)
)
SCALED = (*_site(LEONARDO, _LEONARDO_ROWS), *_site(MARENOSTRUM, _MARENOSTRUM_ROWS))


@cache
def _preset(hardware: str) -> JobConfig:
    return compose_job([f"hardware={hardware}"])


def planned(row: Unseen, strategy: str = "", **known: float) -> Plan:
    """Plan a row as published; `auto` leaves the sharding to the plan. `known` replaces numbers of its hardware."""
    config, strategy = _preset(row.hardware), strategy or row.strategy
    fsdp = FsdpConfig(
        strategy=strategy,
        shard_group=row.per_node if strategy == "hybrid_shard" else "auto",
        reduce_dtype=row.reduce_dtype,
        master_dtype=row.master_dtype,
        activation_checkpointing=row.checkpointing,
        activation_checkpointing_every=3 if row.source == IBM else 2,
        compile=row.compiled,
        accumulate_unsharded=False,
        chunked_loss=False,
    )
    batch = row.gpus * row.micro_batch * row.accumulate
    links = {"gpus_per_node": row.per_node, "nvlink_domain": row.per_node}
    config = replace(
        config,
        nodes=row.gpus // row.per_node,
        model=MODELS[row.model],
        hardware=replace(config.hardware, **links | row.known | known),
        fsdp=fsdp,
        data=DataConfig("synthetic", seq_len=row.seq_len, global_batch=batch, micro_batch=row.micro_batch),
    )
    shape = shape_of(config)
    assert shape is not None
    shape = replace(shape, frozen=int(shape.numel * row.frozen))
    if row.model in GPT:  # two matrices of 4 d, no rotary embedding: as MPT in published.py
        d = shape.activations.block_input
        of = replace(shape.activations, block_saved=16 * d, elementwise=MPT_ELEMENTWISE * d, last_flops=8 * d * d)
        shape = replace(shape, activations=of)
    return make_plan(config, shape=shape, seek_remedies=False)


def ratio(row: Unseen, **known: float) -> float:
    """Predicted over published speed."""
    return planned(row, **known).time.tokens_per_s_per_rank / row.published


def fitted_efficiency(row: Unseen) -> float:
    """The matmul efficiency with which the plan predicts a row's speed, so that larger rows show only their links."""
    low, high = 0.05, 1.2
    for _ in range(14):
        middle = (low + high) / 2
        low, high = (low, middle) if ratio(row, matmul_efficiency=middle) > 1 else (middle, high)
    return low


def main() -> None:
    for row in UNSEEN:
        print(f"{row.model:10} {row.gpus:4} {row.hardware:8} {row.seq_len:5} x {row.micro_batch} {row.checkpointing:8} "
              f"{row.published:7,.0f} {ratio(row):5.2f}  {row.source}")  # fmt: skip
    for row in LINKED:
        ratios = " ".join(f"{ratio(row, inter_node_gb_s=share):.2f}" for share in (22.8, 11.4, 5.7))
        print(f"{row.model:10} {row.gpus:4} {row.seq_len:5}  1,600, 800, 400 Gb/s per node: {ratios}  {row.source}")
    series = defaultdict(list)
    for row in SCALED:
        series[row.source, row.model, row.micro_batch, row.seq_len].append(row)
    for (source, model, micro_batch, seq_len), rows in series.items():
        first = min((row for row in rows if row.strategy == "full_shard"), key=lambda row: row.gpus)
        fitted = fitted_efficiency(first)
        print(f"{model} {seq_len} x {micro_batch}: {ratio(first):.2f} on {first.gpus} GPUs  {source}")
        for latency in (0, 120, 900):
            known = {"inter_node_latency_us": float(latency)} if latency else {}
            shown = (f"{r.strategy[0]}{r.gpus}:{ratio(r, matmul_efficiency=fitted, **known):.2f}" for r in rows)
            print(f"  latency {latency or 'of the preset'}:", *shown)


if __name__ == "__main__":
    main()
