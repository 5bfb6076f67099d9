"""Predict the time of an optimizer step: compute and the communication it hides, per block, plus what is exposed."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_jobs.config.resolve import (
    accelerator,
    backend,
    loss_chunk,
    param_dtype,
    peak_flops,
    ranks_per_node,
    seconds_per_byte,
)
from fsdp_jobs.config.schema import HardwareConfig, JobConfig
from fsdp_jobs.plan.collectives import Group
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.plan.memory import DTYPE_BYTES, master_bytes, offloaded_blocks
from fsdp_jobs.plan.shapes import ModelShape
from fsdp_jobs.plan.traffic import Hops, RingBytes

# Constants that no data sheet gives. docs/how-it-works/planning.md says where they come from.
LAYER_MATMUL = 0.82  # a layer's matmuls, against the best large matmul of the same GPU
ATTENTION_IN_STEP = 0.8  # attention kernels in a training step, against their benchmark
MEMORY_IN_STEP = 0.8  # bytes/s of elementwise kernels, against the memory's rate
ELEMENTWISE_COMPILED = 0.4  # share of eager mode's memory passes that torch.compile leaves
CONTENTION = 0.2  # share of multiprocessors that NCCL takes from concurrent matmuls (24 of 108, 24 of 132)

# FlashAttention-2, causal, forward and backward (Dao 2023, arXiv:2307.08691, figures 5 and 6): on A100 and H100
# the rate at s tokens is that of long sequences x s / (s + 500); heads of 64 reach 0.88 of heads of 128.
HALF_RATE_TOKENS = 500
HALF_RATE_WIDTH = 19
ATTENTION_UNKNOWN = 0.45  # of the best large matmul, if `hardware.attention_tflops` is 0

# A logit is written in bf16 (2), widened (6), in log-softmax (8); two gradients (4, 12); narrowed (6).
LOSS_BYTES = 38
# In chunks: written (2), widened (6), in log-softmax (8), in the exponential (8), narrowed (6), in two matmuls (4).
CHUNKED_LOSS_BYTES = 34
SCORE_PASSES = 8  # whole matrices of scores: written and read by matmuls, the scale, the mask, the softmax
UPDATE_PASSES = 7  # AdamW reads parameter, gradient, two moments and writes three of them
CLIP_PASSES = 3  # the norm reads gradients, the clipping reads and writes them
# ZeRO-Offload's AdamW on two sockets (Ren et al. 2021, arXiv:2101.06840, table 4): 2.6 s for 10 B parameters.
HOST_UPDATE_BYTES_PER_S = 108e9


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, and rates."""

    compute: float  # seconds of kernels, optimizer included
    step: float  # seconds in all, communication that no compute hides included
    tokens_per_s: float  # of the whole job
    tokens_per_s_per_rank: float
    mfu: float  # model FLOPs over dense peak, 0 to 1


@dataclass(frozen=True)
class _Compute:
    """Seconds of kernels of one rank."""

    forward: float  # of a block
    backward: float
    head: float  # the final norm, the head, and the loss, forward and backward
    gathered: float  # casting this rank's part of a block, and copying the gathered block out of the flat buffer
    reduced: float  # copying a block's gradients into the reduce-scatter's input
    passed: float  # copying them out again in a group of one rank, which sends nothing
    accumulated: float  # adding a block's gradients to those of the microbatches before
    update: float  # clipping and AdamW


def _group(config: JobConfig, ranks: int, intra: float, inter: float) -> Group:
    """Describe a group of `ranks` ranks; those of each node make `intra` and `inter` hops of a ring.

    NCCL opens one ring per network card, so a node's edge carries its share of every rank's bytes at the
    sum of the cards' bandwidths.
    """
    hardware, per_node = config.hardware, ranks_per_node(config)
    seconds_intra = seconds_per_byte(hardware.intra_node_gb_s) if intra else 0.0
    seconds_inter = inter / per_node * seconds_per_byte(hardware.inter_node_gb_s)
    nodes = max(2, round(ranks * inter / (inter + intra))) if inter else 1
    return Group(hardware, ranks, nodes, max(seconds_intra, seconds_inter), backend(config) == "nccl")


def _beside(compute: float, communication: float) -> float:
    """Return the seconds of both at once: NCCL's kernels take multiprocessors from concurrent compute."""
    return max(communication, compute + CONTENTION * min(compute, communication))


def step_time(config: JobConfig, shape: ModelShape, layout: Layout, ring: RingBytes, at: Hops) -> StepTime:
    """Predict one optimizer step of `ring.gathers` microbatches on every rank.

    Forward hides the gather of the next block behind a block; backward hides the gather and the previous
    block's reduction. The first gather, the last reduction and the root's are exposed. `at` are the rings' hops.
    """
    fsdp, data, hardware = config.fsdp, config.data, config.hardware
    n, dtype = max(1, shape.n_blocks), param_dtype(fsdp, accelerator(config))
    samples = -(-data.global_batch // layout.world_size)  # of the busiest rank; its last microbatch may be smaller
    in_microbatch = samples * data.seq_len / ring.gathers  # tokens, mean
    c = _compute(config, shape, layout, dtype, in_microbatch)
    s_intra, s_inter, r_intra, r_inter = at
    near, far = _group(config, layout.shard_group, s_intra, s_inter), _group(config, layout.replicas, r_intra, r_inter)

    shard = shape.shard_numel(layout.shard_group)
    in_blocks = sum(b.shard_numel(layout.shard_group) * b.count for b in shape.blocks)
    root_part = 1 - in_blocks / shard  # root and head
    block_part = (1 - root_part) / n
    per_host_byte = seconds_per_byte(hardware.host_gb_s)
    # With offload a shard goes to the GPU before each gather, and its gradient to the host after each reduction.
    lifted = shard * master_bytes(fsdp) * per_host_byte if fsdp.cpu_offload else 0.0
    lowered = lifted * shape.trained
    # Blocks' inputs go to the host in forward and back in backward; torch copies them in the stream of the kernels.
    inputs = in_microbatch * shape.activations.block_input * DTYPE_BYTES[dtype]
    moved = offloaded_blocks(shape, fsdp) * inputs * per_host_byte / n
    gather = near.gather(ring.gather_forward * block_part) + lifted * block_part
    gather_again = near.gather(ring.gather_backward / n)
    if layout.reshard_after_forward and lifted:  # over the same link, in the same direction
        gather_again += lifted * block_part + moved
    reduce = near.gather(ring.reduce * block_part) + lowered * block_part + c.passed
    all_reduce = far.all_reduce(ring.all_reduce * block_part)
    root_gather = near.gather(ring.gather_forward * root_part) + lifted * root_part
    root_reduce = near.gather(ring.reduce * root_part) + lowered * root_part

    # A shard group inside a node and replicas that are all on other nodes use different links at the same time.
    is_apart = s_inter == 0 and r_intra == 0
    last = max(gather_again + reduce, all_reduce) if is_apart else gather_again + reduce + all_reduce
    forward = c.forward + c.gathered + moved
    backward = c.backward + (c.gathered if layout.reshard_after_forward else 0.0) + moved
    quiet_backward = _beside(backward + c.accumulated, gather_again)
    reducing_backward = _beside(backward + c.reduced, gather_again + reduce)
    last_backward = _beside(backward + c.reduced, last)
    micro = root_gather + gather + n * _beside(forward, gather) + c.head
    quiet, reducing = ring.gathers - ring.reductions, ring.reductions - 1
    step = ring.gathers * micro + n * (quiet * quiet_backward + reducing * reducing_backward + last_backward)
    step += reduce + all_reduce + root_reduce * ring.reductions + far.all_reduce(ring.all_reduce * root_part) + c.update

    copies = quiet * c.accumulated + ring.reductions * c.reduced
    compute = ring.gathers * (n * (forward + backward) + c.head) + n * copies + c.update
    tokens_per_s = data.global_batch * data.seq_len / step
    of_rank = tokens_per_s / layout.world_size  # mean; the busiest sets the time
    mfu = shape.flops_per_token(data.seq_len) * of_rank / peak_flops(hardware, dtype)
    return StepTime(compute, step, tokens_per_s, of_rank, mfu)


def attention_rate(hardware: HardwareConfig, best_rate: float, head_width: int, seq_len: int, dtype: str) -> float:
    """Return FLOP/s of causal attention in a training step, forward and backward together.

    Flash attention has no fp32: the memory-efficient kernel takes its place, at the rate of fp32 matmuls.
    """
    measured = 0.0 if dtype == "fp32" else hardware.attention_tflops * 1e12
    longest = measured or ATTENTION_UNKNOWN * best_rate
    by_width = head_width / (head_width + HALF_RATE_WIDTH) * (128 + HALF_RATE_WIDTH) / 128
    by_length = seq_len / (seq_len + HALF_RATE_TOKENS)
    return longest * min(1.0, by_width) * by_length * ATTENTION_IN_STEP


def _compute(config: JobConfig, shape: ModelShape, layout: Layout, dtype: str, tokens: float) -> _Compute:
    fsdp, data, hardware, a, trained = config.fsdp, config.data, config.hardware, shape.activations, shape.trained
    b_m, b_p, b_r = master_bytes(fsdp), DTYPE_BYTES[dtype], DTYPE_BYTES[fsdp.reduce_dtype]
    best_rate = peak_flops(hardware, dtype) * hardware.matmul_efficiency
    matmul_rate = best_rate * LAYER_MATMUL
    per_byte = seconds_per_byte(hardware.memory_gb_s)

    matmul = tokens * a.matmul_flops / matmul_rate
    kernel_rate = attention_rate(hardware, best_rate, a.head_width, data.seq_len, dtype)
    attention = tokens * 2 * a.attention_width * data.seq_len / kernel_rate  # causal: half of 4 x width x sequence
    elementwise = a.elementwise * (ELEMENTWISE_COMPILED if fsdp.compile else 1)
    scores = a.scores(data.seq_len, dtype, accelerator(config))
    passes = tokens * (elementwise + SCORE_PASSES * scores) * b_p * per_byte / MEMORY_IN_STEP
    per_block = a.layers / max(1, shape.n_blocks)
    layer = matmul + attention + passes
    forward = layer * per_block
    # A frozen weight has no gradient of its own, only that of its input. Flash attention's backward runs five matmuls
    # against two (Dao et al. 2022, arXiv:2205.14135).
    backward = ((1 + trained) * matmul + 2.5 * attention + 2 * passes) * per_block
    whole = layer - tokens * a.last_flops / matmul_rate  # torch stops once nothing is missing
    again = {
        "none": 0.0,
        "full": whole,
        "every_n": whole / fsdp.activation_checkpointing_every,
        "selective": passes,  # matmuls and attention are kept
    }[shape.recomputed(fsdp)]
    backward += shape.mean_layers * again
    loss_bytes = tokens * a.vocab * LOSS_BYTES
    if chunk := loss_chunk(fsdp, tokens, a.vocab if a.linear_head else 0, layout.chunked_loss):
        sums = -(-tokens // chunk) * a.head_flops // 2 * (8 if b_p == 4 else 8 + 2 * b_p)
        loss_bytes = tokens * a.vocab * CHUNKED_LOSS_BYTES + sums
    head = (2 + trained) * tokens * a.head_flops / matmul_rate + loss_bytes * per_byte

    shard = shape.shard_numel(layout.shard_group)
    block = sum(b.numel * b.count for b in shape.blocks) / max(1, shape.n_blocks)  # mean
    cast = b_m + b_p if b_m != b_p else 0
    updated = shard * trained * (UPDATE_PASSES + CLIP_PASSES) * b_m  # bytes
    update = updated * per_byte
    if fsdp.cpu_offload:
        update = updated * ranks_per_node(config) / HOST_UPDATE_BYTES_PER_S
    gathered = (2 * b_p + cast / layout.shard_group) * block * per_byte
    gradients = block * trained
    reduced = gradients * (b_p + b_r) * per_byte
    passed = gradients * 2 * b_r * per_byte if layout.shard_group == 1 else 0.0
    accumulated = gradients * (b_p + 2 * b_r) * per_byte
    return _Compute(forward, backward, head, gathered, reduced, passed, accumulated, update)
