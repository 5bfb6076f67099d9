"""Peak memory of one rank in an optimizer step, part by part, in bytes.

The moments follow FSDP2's own order of allocation (torch 2.13, `_fsdp_param_group.py` and
`_fsdp_collectives.py`): a block is gathered into a flat buffer and copied out of it; in backward the next
block is gathered while one computes; its gradients are copied into a reduce-scatter input that lives until
the next block's reduction.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from fsdp_jobs.config.resolve import loss_chunk, param_dtype
from fsdp_jobs.config.schema import DataConfig, FsdpConfig
from fsdp_jobs.plan.layout import HYBRID, Layout
from fsdp_jobs.plan.shapes import ModelShape

GIB = 2**30
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

CUDA_CONTEXT = int(0.9 * GIB)  # context, kernels, cuBLAS workspaces; 0.5 to 1.2 GiB seen, by GPU and version
NCCL_PER_GROUP = int(0.35 * GIB)  # channel buffers of one communicator (NCCL_BUFFSIZE 4 MiB x channels x peers)
CPU_RUNTIME = int(0.35 * GIB)  # a Python process with torch, by its resident size
FRAGMENTATION = 0.05  # of what the caching allocator hands out; the trainer's expandable segments keep it below
MARGIN = 0.05  # of the device memory that a plan leaves free


def master_bytes(fsdp: FsdpConfig) -> int:
    """Return the bytes of a stored parameter, of its gradient, and of each of AdamW's two moments."""
    return 4 if fsdp.master_dtype == "fp32" else 2


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank's device at the moment of the peak; `host` is what offload keeps on the host."""

    moment: str
    parameters: int = 0  # this rank's shards, stored dtype
    gradients: int = 0  # this rank's reduced shards
    optimizer: int = 0
    gathered: int = 0  # whole parameters in the compute dtype, and the buffer the next ones arrive in
    reduction: int = 0  # whole gradients of the block at hand, and the reduce-scatter's input
    accumulation: int = 0  # whole gradients kept between microbatches
    activations: int = 0
    buffers: int = 0  # the model's buffers, whole
    logits: int = 0  # logits, loss and their gradients; with a chunked loss also its sums of the head's gradient
    reserve: int = 0  # context, communicator buffers, fragmentation
    host: int = 0  # host memory of what this rank offloads
    snapshots: int = 0  # host memory of its snapshots, and of its share of copies of another node's

    @property
    def tensors(self) -> int:
        """Return what PyTorch allocates: all but the reserve."""
        return self.total - self.reserve

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in _PARTS)

    def scaled(self, share: float, *parts: str) -> Memory:
        """Return it with only a share of these parts."""
        sizes: dict[str, Any] = {name: int(getattr(self, name) * share) for name in parts}
        return replace(self, **sizes)

    def parts(self) -> dict[str, int]:
        """Return the device's parts by name, largest first; they add up to `total`."""
        sizes = {name: getattr(self, name) for name in _PARTS}
        return dict(sorted(sizes.items(), key=lambda item: -item[1]))


_PARTS = tuple(f.name for f in fields(Memory) if f.name not in ("moment", "host", "snapshots"))


def peak_memory(
    shape: ModelShape, layout: Layout, fsdp: FsdpConfig, data: DataConfig, accelerator: str, microbatches: int
) -> Memory:
    """Return the moment of a step at which one rank needs the most memory.

    Args:
        shape: the model, cut into FSDP units.
        layout: the sharding.
        fsdp: dtypes, checkpointing, offload, accumulation.
        data: only micro_batch and seq_len count.
        accelerator: cpu or cuda, for the dtype `auto` and for the reserve.
        microbatches: of one rank in one optimizer step.
    """
    peak = max(_moments(shape, layout, fsdp, data, accelerator, microbatches), key=lambda m: m.total)
    reserve = CPU_RUNTIME
    if accelerator == "cuda":
        communicators = 2 if layout.strategy in HYBRID else 1
        reserve = CUDA_CONTEXT + NCCL_PER_GROUP * communicators + int(FRAGMENTATION * peak.total)
    return replace(peak, reserve=reserve, host=_host_bytes(shape, layout, fsdp, data, accelerator))


def snapshot_bytes(shape: ModelShape, layout: Layout, fsdp: FsdpConfig, is_one_node: bool) -> int:
    """Return the host memory that snapshots take per rank: two snapshots, and two copies of another rank's.

    There are copies only if no replica on another node has the same shards.
    """
    copies = 2 if layout.replicas == 1 and not is_one_node else 1
    return int(shape.shard_numel(layout.shard_group) * (1 + 2 * shape.trained) * master_bytes(fsdp)) * 2 * copies


def _moments(
    shape: ModelShape, layout: Layout, fsdp: FsdpConfig, data: DataConfig, accelerator: str, microbatches: int
) -> list[Memory]:
    dtype = param_dtype(fsdp, accelerator)
    b_p, scores = DTYPE_BYTES[dtype], shape.activations.scores(data.seq_len, dtype, accelerator)
    group, b_r, b_m = layout.shard_group, DTYPE_BYTES[fsdp.reduce_dtype], master_bytes(fsdp)
    shard = shape.shard_numel(group)
    n = shape.n_blocks
    reshard = layout.reshard_after_forward

    # Gathered parameters. A group of one rank copies its own to the compute dtype and receives nothing.
    block, head, root = (u.shard_numel(group) for u in (shape.largest, shape.head, shape.root))
    blocks = shard - head - root
    held = (root + (block if reshard else blocks)) * group * b_p  # at a block, without the head
    arriving = block * group * b_p if group > 1 and n > 1 else 0
    copied = shape.largest.inside_numel(group) * b_p
    in_forward = held + (head * group * b_p) * (2 if group > 1 else 1)
    in_loss = (root + head + (0 if reshard else blocks)) * group * b_p
    next_block = arriving if reshard else 0
    in_head, in_block = in_loss + next_block, held + next_block

    # Gradients: sums kept between microbatches are whole (layout.accumulate_unsharded) or already reduced shards.
    whole_sums = microbatches > 1 and (layout.accumulate_unsharded or group == 1)
    early = shard * b_m if microbatches > 1 and not whole_sums else 0
    b_sum = b_r if whole_sums else 0
    waiting = shape.waiting * b_p
    reduce_input, head_input = block * group * b_r, head * group * b_r

    saved, head_saved, live = _activations(shape, fsdp, data, b_p, scores)
    all_saved = saved * max(n, 1) + head_saved
    tokens = data.micro_batch * data.seq_len
    # Whole logits: log-softmax, its gradient and the gradient of its input are fp32 each; only the first outlives
    # forward, so the head's backward begins with the gradient of the logits alone.
    logits = tokens * shape.activations.vocab
    made, in_loss_function, in_head_backward = (logits * b for b in (b_p, 12, b_p))
    vocabulary = shape.activations.vocab if shape.activations.linear_head else 0
    if chunk := loss_chunk(fsdp, tokens, vocabulary, layout.chunked_loss):
        # Inside the head's forward: a chunk's logits and log-softmax (of widened logits), or its errors and
        # its part of the head's gradient; that gradient's sums, fp32; the gradient of the hidden states.
        weight = shape.activations.head_flops // 2
        hidden, summed = tokens * shape.activations.block_input * b_p, weight * 4 if b_p < 4 else 0
        at_once, widened = min(chunk, tokens) * shape.activations.vocab, 4 if b_p < 4 else 0
        in_chunk = max(at_once * (b_p + 4 + widened), (at_once + weight) * b_p if summed else 0)
        in_loss_function, in_loss = in_chunk + hidden + weight * 4, in_loss + head * group * b_p * (group > 1)
        made, in_head_backward = 0, summed + hidden

    state = Memory("", parameters=shard * b_m, optimizer=shard * 2 * b_m, gradients=early, buffers=shape.buffers)
    before = replace(state, accumulation=shape.numel * b_sum, activations=all_saved)
    moments = [
        replace(before, moment="end of forward", gathered=in_forward, logits=made),
        replace(before, moment="loss", gathered=in_loss, logits=in_loss_function),
        replace(before, moment="backward of the head", gathered=in_head, logits=in_head_backward,
                reduction=waiting + shape.head.numel * b_p),
        replace(before, moment="reduction of the head's gradients", gathered=in_head - head * group * b_p,
                reduction=waiting + shape.head.numel * b_p + head_input),
        replace(state, moment="optimizer step", gradients=shard * b_m),
    ]  # fmt: skip

    if copied:  # out of the flat buffer, then into place; in forward the previous buffer still lives
        moments += [
            replace(before, moment="gathering of the last block", gathered=held + 2 * arriving + copied,
                    activations=saved * (n - 1)),
            replace(before, moment="gathering of the last block for backward", gathered=in_block + copied,
                    activations=saved * n, reduction=waiting + head_input),
        ]  # fmt: skip
    # The last block that prefetches so many others. In forward its own buffer lives until the next one's arrives.
    forward_ahead, backward_ahead = (
        min(ahead, n - 1) if reshard else 0 for ahead in (fsdp.forward_prefetch, fsdp.backward_prefetch)
    )
    if forward_ahead > 1:
        moments += [
            replace(before, moment="forward of a block", gathered=held + (forward_ahead + 1) * arriving,
                    activations=saved * (n - forward_ahead)),
        ]  # fmt: skip

    def backward(k: int, name: str) -> list[Memory]:
        """Return the moments in backward of the k-th block from the end; the head and k - 1 blocks are reduced.

        A block's backward begins with all of its activations and its first weight's gradient, and ends with
        all of its gradients and none of its activations.
        """
        reduced = max(early, (head + min((k - 1) * block, blocks)) * b_m)
        left = max(0, shape.numel - shape.head.numel - (k - 1) * shape.largest.numel) * b_sum
        more = max(0, min(backward_ahead, n - k) - 1) * arriving  # beyond the next one
        freed = 0 if reshard else min(k - 1, n - 1) * blocks // n * group * b_p  # each block's after its backward
        at = replace(state, moment=name, gradients=reduced, gathered=in_block + more - freed, accumulation=left)
        reducing = waiting + (reduce_input if k > 1 else head_input)
        first, whole = reducing + shape.largest.largest_param * b_p, reducing + shape.largest.numel * b_p
        return [
            replace(at, activations=saved * (n - k + 1) + live, reduction=first),
            replace(at, activations=saved * (n - k), reduction=whole),
        ]

    if n:
        moments += backward(1, "backward of the last block")
    if n > 1:
        moments += backward(2, "backward of the last block but one") + backward(n, "backward of the first block")
    if backward_ahead > 1:
        moments += backward(n - backward_ahead, "backward of a block")
    root_input = root * group * b_r
    moments += [
        replace(state, moment="reduction of the root's gradients", gradients=shard * b_m,
                gathered=root * group * b_p if reduce_input > root_input else 0,
                reduction=shape.root.numel * b_p + max(root_input, reduce_input),
                accumulation=shape.root.numel * b_sum, activations=0 if n else all_saved),
    ]  # fmt: skip
    if shape.frozen:
        # As if they were spread evenly over the units.
        moments = [m.scaled(shape.trained, "optimizer", "gradients", "accumulation", "reduction") for m in moments]
    if fsdp.cpu_offload:
        moments = [m.scaled(0, "parameters", "gradients", "optimizer") for m in moments]
    return moments


def _host_bytes(shape: ModelShape, layout: Layout, fsdp: FsdpConfig, data: DataConfig, accelerator: str) -> int:
    """Return the host memory of what one rank offloads: CPUOffloadPolicy's state, and the inputs of blocks.

    Parameters, reduced gradients and inputs are pinned; the optimizer's state is not.
    """
    pinned = _pinned if accelerator == "cuda" else int
    inputs = data.micro_batch * data.seq_len * shape.activations.block_input
    host = offloaded_blocks(shape, fsdp) * pinned(inputs * DTYPE_BYTES[param_dtype(fsdp, accelerator)])
    if fsdp.cpu_offload:
        stored, group = master_bytes(fsdp), layout.shard_group
        whole = sum(unit.count * pinned(shard * stored) for unit in shape.units for shard in unit.shards(group))
        host += int(whole * (1 + shape.trained)) + int(2 * stored * shape.shard_numel(group) * shape.trained)
    return host


def _pinned(size: int) -> int:
    """Return the bytes of host memory that a pinned tensor takes: torch rounds up to a power of two.

    See `ATen/core/CachingHostAllocator.h`, and `pinned_max_round_threshold_mb`, which has no limit by default.
    """
    return 1 << (size - 1).bit_length()


def offloaded_blocks(shape: ModelShape, fsdp: FsdpConfig) -> int:
    """Count the blocks whose inputs `fsdp.activation_offload` keeps in host memory: those that are recomputed."""
    every = fsdp.activation_checkpointing_every if fsdp.activation_checkpointing == "every_n" else 1
    return -(-shape.n_blocks // every) if fsdp.activation_offload else 0


def _activations(shape: ModelShape, fsdp: FsdpConfig, data: DataConfig, b_p: int, scores: int) -> tuple[int, int, int]:
    """Return the bytes that a unit keeps for backward (mean), that the head keeps, and that backward adds (most).

    A unit may have several layers, or a part of one. It is recomputed as a whole, from its input.
    """
    a, tokens, kind = shape.activations, data.micro_batch * data.seq_len, shape.recomputed(fsdp)
    layer = tokens * (a.block_saved * b_p + (a.block_saved_fp32 + scores) * 4)
    loose = shape.root_layers * layer / max(1, shape.n_blocks)
    layers = shape.mean_layers
    full = layers * layer
    inputs = tokens * a.block_input * b_p
    selective = min(full, inputs + tokens * layers * a.block_matmul * b_p)
    head = tokens * (a.head_saved * b_p + a.head_saved_fp32 * 4)
    kept_input = 0 if fsdp.activation_offload else inputs
    every = fsdp.activation_checkpointing_every
    kept = {
        "none": full,
        "full": kept_input,
        "every_n": (kept_input + (every - 1) * full) // every,
        "selective": selective - inputs + kept_input,
    }[kind]
    recomputed = {"none": 0, "selective": full - selective}.get(kind, full) * shape.unit_layers / (layers or 1)
    return int(kept + loose), head, int(recomputed) + tokens * (a.block_peak * b_p + scores * 4)
