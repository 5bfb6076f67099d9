"""Apply parallelism to a plain model: mesh, activation checkpointing, compile, FSDP2, weights."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from fsdp_jobs.checkpoints.ranks import Ranks
from fsdp_jobs.checkpoints.tensors import checksum
from fsdp_jobs.config.resolve import output_dtype, param_dtype
from fsdp_jobs.config.schema import FsdpConfig, HfConfig, JobConfig
from fsdp_jobs.hub.huggingface import initial_pieces
from fsdp_jobs.models.build import build_model, find_blocks, head_modules_of
from fsdp_jobs.models.weights import copy_local_part, plain_name, seed_of
from fsdp_jobs.plan.layout import Layout, shard_dim
from fsdp_jobs.plan.shapes import MATMULS

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Selective checkpointing keeps the outputs of these: they are expensive to recompute.
_ATTENTION = ("cudnn_attention", "efficient_attention", "flash_attention", "flash_attention_for_cpu")
_EXPENSIVE = (*MATMULS, *(f"_scaled_dot_product_{kernel}" for kernel in _ATTENTION))
_EXPENSIVE_OPS = [getattr(torch.ops.aten, name).default for name in _EXPENSIVE]


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """Return the mesh of a layout over all ranks in ascending order.

    Raises:
        RuntimeError: the layout is for another world, or a rank's mesh coordinate differs from its
            rank in the group. (DCP addresses shards by mesh coordinates and process groups sort their
            ranks: if the two disagree, training works and checkpoints are silently wrong.)
    """
    if layout.world_size != dist.get_world_size():
        raise RuntimeError(f"the layout is for {layout.world_size} ranks, the world has {dist.get_world_size()}")
    shape = layout.mesh_shape
    mesh = init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for dim, place in enumerate(coordinate):
        if place != dist.get_rank(mesh.get_group(dim)):
            raise RuntimeError(f"mesh row {torch.as_tensor(mesh.mesh).tolist()} is out of rank order in dim {dim}")
    return mesh


def sharded_model(config: JobConfig, layout: Layout, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """Build the model of a configuration, sharded as the layout says.

    With `fsdp.meta_init` weights and saved buffers are still empty: a checkpoint or `fill_weights` fills them.

    Raises:
        ValueError: a wrap class matches no module of the model.
    """
    fsdp = config.fsdp
    with torch.device("meta" if fsdp.meta_init else "cpu"):
        torch.manual_seed(config.seed)
        model = build_model(config.model)
        if fsdp.master_dtype != "fp32":
            for parameter in model.parameters():  # buffers keep their dtype
                parameter.data = parameter.data.to(torch.bfloat16)
    shard(model, find_blocks(model, config.model, fsdp), fsdp, layout, mesh, device)
    if fsdp.meta_init:
        model.to_empty(device="cpu" if fsdp.cpu_offload else device)
        for module in model.modules():  # FSDP offloads only parameters
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = torch.empty_like(buffer, device=device)
        buffers = {plain_name(name) for name, _ in model.named_buffers()}
        _fill(model, config, device, buffers - model.state_dict().keys())
    return model


def make_equal(model: nn.Module, on_cpu: dist.ProcessGroup) -> None:
    """Send rank 0's weights and buffers to all ranks where they differ, except sparse ones.

    Args:
        on_cpu: a group of all ranks for tensors on a CPU; the default group may support only GPUs.
    """
    tensors = [t for t in [*model.parameters(), *model.buffers()] if t.layout is torch.strided]
    by_rank = Ranks(on_cpu).gather([int(checksum(tensor)) for tensor in tensors])
    for tensor, *sums in zip(tensors, *by_rank, strict=True):
        if len({*sums}) > 1:
            _send(tensor.detach(), on_cpu if tensor.device.type == "cpu" else None)


def _send(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Send rank 0's tensor to all, as bytes: gloo and NCCL do not know every dtype."""
    whole = tensor.contiguous().resolve_conj()
    dist.broadcast(whole.flatten().view(torch.uint8), src=0, group=group)
    tensor.copy_(whole)


def shard(
    model: nn.Module, blocks: list[nn.Module], fsdp: FsdpConfig, layout: Layout, mesh: DeviceMesh, device: torch.device
) -> None:
    """Apply activation checkpointing, compilation and FSDP2 to a model and its `blocks`.

    Each block becomes an FSDP unit, and so do the root and the head, which stays gathered: backward needs it at once.
    """
    blocks = _checkpoint_activations(model, blocks, fsdp)
    if fsdp.compile:
        for block in blocks:
            block.compile()
    inner = MixedPrecisionPolicy(TORCH_DTYPES[param_dtype(fsdp, device.type)], TORCH_DTYPES[fsdp.reduce_dtype])
    output = output_dtype(fsdp)
    outer = inner if output is None else replace(inner, output_dtype=TORCH_DTYPES[output])
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if fsdp.cpu_offload else OffloadPolicy()

    def place(parameter: nn.Parameter) -> Shard:
        return Shard(shard_dim(parameter.shape, layout.shard_group))

    def apply(module: nn.Module | list[nn.Module], policy: MixedPrecisionPolicy, reshard: bool) -> None:
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard,
            shard_placement_fn=place,
            mp_policy=policy,
            offload_policy=offload,
        )

    for block in reversed(blocks):  # those inside others first
        apply(block, inner, layout.reshard_after_forward)
    head = head_modules_of(model) if fsdp.wrap == "layer" else []
    if head:
        apply(head, inner, False)
    apply(model, outer, False)
    for ahead, order, prefetch in (
        (fsdp.forward_prefetch, blocks, "set_modules_to_forward_prefetch"),
        (fsdp.backward_prefetch, blocks[::-1], "set_modules_to_backward_prefetch"),
    ):
        for i, block in enumerate(order):
            getattr(block, prefetch)(order[i + 1 : i + 1 + ahead])


def _checkpoint_activations(model: nn.Module, blocks: list[nn.Module], fsdp: FsdpConfig) -> list[nn.Module]:
    """Wrap blocks so that their activations are recomputed in backward. Returns all blocks, wrapped or not."""
    kind = fsdp.activation_checkpointing
    if kind == "none":
        return blocks
    options: dict[str, Any] = {}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _EXPENSIVE_OPS)
    chosen = set(blocks[:: fsdp.activation_checkpointing_every] if kind == "every_n" else blocks)

    @cache  # a block has one wrapper, wherever the model holds it
    def wrap(block: nn.Module) -> nn.Module:
        recomputed = checkpoint_wrapper(block, **options)
        return offload_wrapper(recomputed) if fsdp.activation_offload else recomputed

    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=chosen.__contains__)
    return [wrap(block) if block in chosen else block for block in blocks]


def fill_weights(model: nn.Module, config: JobConfig, device: torch.device) -> None:
    """Give a model that was built empty its initial weights. All ranks call it; no random state changes.

    They depend only on the seed, not on the world size, the strategy or the grouping. The parameters of a pretrained
    model stay empty, because hub/pretrained.py reads them.
    """
    if not config.fsdp.meta_init:
        return
    names = set(model.state_dict())
    if isinstance(config.model, HfConfig) and config.model.pretrained:
        names -= {plain_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    _fill(model, config, device, names)


def _fill(model: nn.Module, config: JobConfig, device: torch.device, names: set[str]) -> None:
    """Give the parameters and buffers in `names`, which to_empty() emptied, their initial values.

    A model with `init_parameter` fills one whole parameter at a time on every rank and keeps its
    shard: no traffic, and never more than one parameter in memory. A model of transformers is filled
    a layer at a time. Any other is built by rank 0 on its CPU and sent out tensor by tensor.
    """
    if not names:
        return
    if isinstance(config.model, HfConfig):
        weights = {plain_name(n): t for n, t in [*model.named_parameters(), *model.named_buffers()]}  # tied ones once
        for piece in initial_pieces(config.model, device, config.seed, names):
            for name in piece.keys() & weights.keys() & names:
                copy_local_part(weights[name], piece[name])
        return
    if (init_parameter := getattr(model, "init_parameter", None)) is not None:
        for wrapped, parameter in model.named_parameters():
            if (name := plain_name(wrapped)) not in names:
                continue
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            with torch.no_grad():
                init_parameter(name, whole, torch.Generator(device).manual_seed(seed_of(config.seed, name)))
            copy_local_part(parameter, whole)
        return
    state, buffers = {}, {}
    if dist.get_rank() == 0:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device("cpu"):
            torch.manual_seed(config.seed)
            whole_model = build_model(config.model)
        state, buffers = whole_model.state_dict(), dict(whole_model.named_buffers())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    if names & {plain_name(name) for name, _ in model.named_parameters()}:
        set_model_state_dict(model, state, options=options)
    for name, buffer in model.named_buffers():
        if buffers:
            buffer.copy_(buffers[plain_name(name)])
        _send(buffer)


def set_gradient_communication(model: nn.Module, layout: Layout, last: bool) -> None:
    """Set, before a microbatch's backward, how its gradients are reduced.

    The last microbatch of a step always reduces in full. The earlier ones send nothing if the layout accumulates
    unsharded gradients; otherwise they reduce-scatter inside the shard group, and a hybrid's all-reduce between
    replicas waits for the last.
    """
    assert isinstance(model, FSDPModule)
    if layout.accumulate_unsharded or layout.shard_group == 1:
        model.set_requires_gradient_sync(last)
    else:
        model.set_requires_all_reduce(last)
