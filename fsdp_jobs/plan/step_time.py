"""Predict the time of an optimizer step: max(compute, communication) per block, plus what cannot overlap."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_jobs.config.resolve import peak_flops
from fsdp_jobs.config.schema import DataConfig, FsdpConfig, HardwareConfig
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.plan.memory import DTYPE_BYTES
from fsdp_jobs.plan.shapes import ModelShape
from fsdp_jobs.plan.traffic import RingBytes, hops

# Three constants that no data sheet gives. docs/planning.md says where they come from.
LAYER_MATMUL = 0.85  # a layer's matmuls, against the best large matmul of the same GPU
FLASH_ATTENTION = 0.55  # causal attention kernels, against the best large matmul
ELEMENTWISE_COMPILED = 0.4  # memory passes that torch.compile leaves of eager mode's

# A logit is written in bf16 (2), widened (6), in log-softmax (8); two gradients (4, 12); narrowed (6).
LOSS_BYTES = 38
OPTIMIZER_BYTES = 28  # AdamW reads parameter, gradient, two moments and writes three of them, fp32


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, and rates."""

    compute: float  # seconds of kernels, optimizer included
    communication: float  # seconds the links are busy, hidden or not
    exposed: float  # seconds of communication that no compute hides
    step: float  # seconds in all
    tokens_per_s: float  # of the whole job
    tokens_per_s_per_rank: float
    mfu: float  # model FLOPs over dense peak, 0 to 1


@dataclass(frozen=True)
class _Link:
    """Times of ring collectives over one kind of group: per byte that a rank sends, and per pass."""

    seconds_per_byte: float
    latency: float  # seconds of one pass around the ring

    def seconds(self, sent: float, passes: int = 1) -> float:
        return sent * self.seconds_per_byte + passes * self.latency if sent else 0.0


def _link(hardware: HardwareConfig, members: int, per_node: int, intra: float, inter: float) -> _Link:
    """Describe a ring of `members` ranks, of which each node's make `intra` and `inter` hops.

    NCCL opens one ring per network card, so a node's edge carries its share of every rank's bytes at the
    sum of the cards' bandwidths.
    """
    per_byte_intra = 1 / (hardware.intra_node_gb_s * 1e9) if intra and hardware.intra_node_gb_s else 0.0
    per_byte_inter = inter / per_node / (hardware.inter_node_gb_s * 1e9) if hardware.inter_node_gb_s else 0.0
    share = inter / (inter + intra) if inter + intra else 0.0
    steps_inter = (members - 1) * share
    latency = (
        steps_inter * hardware.inter_node_latency_us + (members - 1 - steps_inter) * hardware.intra_node_latency_us
    )
    return _Link(max(per_byte_intra, per_byte_inter), latency * 1e-6)


def step_time(
    shape: ModelShape,
    layout: Layout,
    fsdp: FsdpConfig,
    data: DataConfig,
    hardware: HardwareConfig,
    ring: RingBytes,
    ranks_per_node: int,
    param_dtype: str,
    in_domain: bool = False,
) -> StepTime:
    """Predict one optimizer step of `ring.gathers` microbatches on every rank.

    Forward hides the gather of the next block behind a block; backward hides the gather and the previous
    block's reduction. The first gather, the last reduction and the root's are exposed. With `in_domain`, a shard
    group's nodes reach each other over NVLink.
    """
    n = max(1, shape.n_blocks)
    forward, backward, head, update = _compute(shape, layout, fsdp, data, hardware, param_dtype)
    s_intra, s_inter, r_intra, r_inter = hops(layout, ranks_per_node)
    if in_domain:
        s_intra, s_inter = s_intra + s_inter, 0.0
    near = _link(hardware, layout.shard_group, ranks_per_node, s_intra, s_inter)
    far = _link(hardware, layout.replicas, ranks_per_node, r_intra, r_inter)

    in_blocks = sum(b.shard_numel(layout.shard_group) * b.count for b in shape.blocks)
    root_part = 1 - in_blocks / shape.shard_numel(layout.shard_group)  # root and head
    block_part = (1 - root_part) / n
    gather = near.seconds(ring.gather_forward * block_part)
    gather_again = near.seconds(ring.gather_backward / n)
    reduce = near.seconds(ring.reduce * block_part)
    all_reduce = far.seconds(ring.all_reduce * block_part, 2)
    root_gather = near.seconds(ring.gather_forward * root_part)
    root_reduce = near.seconds(ring.reduce * root_part) + far.seconds(ring.all_reduce * root_part, 2)

    # A shard ring inside a node and a replica ring between nodes use different links at the same time.
    both = reduce + all_reduce
    last = max(gather_again + reduce, all_reduce) if s_inter == 0 else gather_again + both
    quiet_backward = max(backward, gather_again)
    reducing_backward = max(backward, gather_again + reduce)
    final_backward = max(backward, last)
    micro = root_gather + gather + n * max(forward, gather) + head
    reducing = ring.reductions - 1
    quiet = ring.gathers - 1 - reducing
    step = ring.gathers * micro + n * (quiet * quiet_backward + reducing * reducing_backward + final_backward)
    step += both + root_reduce * ring.reductions + update

    compute = ring.gathers * (n * (forward + backward) + head) + update
    busy = ring.gathers * (root_gather + n * (gather + gather_again)) + ring.reductions * n * reduce
    busy += n * all_reduce + root_reduce * ring.reductions
    tokens = data.global_batch * data.seq_len / layout.world_size  # a rank's mean; the busiest sets the time
    peak = peak_flops(hardware, param_dtype)
    return StepTime(
        compute=compute,
        communication=busy,
        exposed=step - compute,
        step=step,
        tokens_per_s=tokens * layout.world_size / step,
        tokens_per_s_per_rank=tokens / step,
        mfu=shape.flops_per_token(data.seq_len) * tokens / step / peak,
    )


def _compute(
    shape: ModelShape,
    layout: Layout,
    fsdp: FsdpConfig,
    data: DataConfig,
    hardware: HardwareConfig,
    param_dtype: str,
) -> tuple[float, float, float, float]:
    """Return seconds of a block's forward and backward, of the head with the loss, and of the update."""
    a, tokens = shape.activations, data.micro_batch * data.seq_len
    best_rate = peak_flops(hardware, param_dtype) * hardware.matmul_efficiency
    matmul_rate, attention_rate = best_rate * LAYER_MATMUL, best_rate * FLASH_ATTENTION
    per_byte = 1 / (hardware.memory_gb_s * 1e9) if hardware.memory_gb_s else 0.0

    matmul = tokens * a.matmul_flops / matmul_rate
    attention = tokens * 2 * a.attention_width * data.seq_len / attention_rate  # causal: half of 4 x width x seq
    elementwise = a.elementwise * (ELEMENTWISE_COMPILED if fsdp.compile else 1)
    passes = tokens * elementwise * DTYPE_BYTES[param_dtype] * per_byte
    per_block = a.layers / max(1, shape.n_blocks)
    forward = (matmul + attention + passes) * per_block
    # Flash attention's backward runs five matmuls against two (Dao et al. 2022, arXiv:2205.14135).
    backward = (2 * matmul + 2.5 * attention + 2 * passes) * per_block
    backward += {
        "none": 0.0,
        "full": forward,
        "every_n": forward / max(1, fsdp.activation_checkpointing_every),
        "selective": passes * per_block,  # matmuls and attention are kept
    }[fsdp.activation_checkpointing]
    head = 3 * tokens * a.head_flops / matmul_rate + tokens * a.vocab * LOSS_BYTES * per_byte
    update = shape.shard_numel(layout.shard_group) * OPTIMIZER_BYTES * per_byte
    if fsdp.cpu_offload and hardware.host_gb_s:
        # Parameters go up and gradients come down once a step at least; the host's own update is not counted.
        update += shape.shard_numel(layout.shard_group) * 8 / (hardware.host_gb_s * 1e9)
    return forward, backward, head, update
