"""The planner's view of a model: its parameters by FSDP unit, and what one token costs. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from fsdp_jobs.config.schema import FsdpConfig, LlamaConfig
from fsdp_jobs.plan.layout import shard_dim
from fsdp_jobs.run.record import Record

MATMULS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")  # torch's operations; the last is of experts

Shape = tuple[int, ...]
Params = tuple[tuple[str, Shape], ...]  # name and shape of each parameter


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered and reduced together: one `fully_shard` call, `count` times over."""

    name: str
    params: Params
    count: int = 1

    @cached_property
    def numel(self) -> int:
        """Elements of one unit."""
        return sum(math.prod(shape) for _, shape in self.params)

    @cached_property
    def largest_param(self) -> int:
        """Elements of its largest parameter."""
        return max((math.prod(shape) for _, shape in self.params), default=0)

    def shards(self, group: int) -> list[int]:
        """Elements one rank stores of each parameter: FSDP2 gives it ceil(size / group) rows, padding included."""
        return [_stored(shape, group) for _, shape in self.params]

    def shard_numel(self, group: int) -> int:
        """Elements of it that one rank stores."""
        return sum(self.shards(group))

    def inside_numel(self, group: int) -> int:
        """Elements of parameters that are not sharded on the first dimension: FSDP2 gathers them by one copy more."""
        return sum(math.prod(shape) for _, shape in self.params if shard_dim(shape, group))


def _stored(shape: Shape, group: int) -> int:
    dim = shard_dim(shape, group)
    rows = -(-(shape[dim] if shape else 1) // group)
    return rows * math.prod(shape[:dim] + shape[dim + 1 :])


@dataclass(frozen=True)
class Activations:
    """Costs of one token: elements kept for backward (compute dtype unless named fp32), and FLOPs."""

    layers: int  # transformer blocks, FSDP units or not
    block_input: int  # the residual stream that enters a block; what full recomputation keeps
    block_saved: int  # what autograd saves in a block, its input included
    block_saved_fp32: int  # saved in fp32 whatever the compute dtype: norms, log-sum-exp
    block_matmul: int  # outputs of matmuls and attention: what selective checkpointing keeps
    block_peak: int  # gradients in flight at the widest point of a block's backward
    head_saved: int = 0  # what the final norm and head keep
    head_saved_fp32: int = 0
    vocab: int = 0  # width of the logits; 0: unknown
    linear_head: bool = False  # logits are a linear layer's output, unchanged: the loss can be made in chunks
    matmul_flops: int = 0  # forward FLOPs of a block's matmuls, attention's own excluded
    last_flops: int = 0  # those of a block's last matmul, which recomputation does not need again
    head_flops: int = 0  # forward FLOPs of the head
    attention_width: int = 0  # heads x head_dim: attention costs 4 x width x context FLOPs forward
    head_width: int = 128  # elements of an attention head
    grouped_heads: bool = False  # the attention kernel itself is given fewer key than query heads
    elementwise: int = 0  # elements that a block's forward reads and writes outside matmuls and attention

    def scores(self, seq_len: int, dtype: str, accelerator: str) -> int:
        """Return the attention scores that a token keeps in a block: none if a fused kernel supports its heads.

        CUDA has no fused kernel for grouped heads in fp32, so torch multiplies whole matrices.
        """
        fused = not self.grouped_heads or dtype != "fp32" or accelerator != "cuda"
        return 0 if fused else self.attention_width // self.head_width * seq_len


@dataclass(frozen=True)
class ModelShape(Record):
    """A model as FSDP sees it.

    The root and the head stay gathered from forward to backward; the head is reduced first in backward, the
    root last. `waiting` counts the elements of the root whose gradients exist before the blocks' backward:
    a head that is not a unit of its own, or that shares the embedding's weight.
    """

    root: Unit
    blocks: tuple[Unit, ...]  # units of equal shape are one entry with a count, in forward order
    activations: Activations
    head: Unit = Unit("head", ())
    waiting: int = 0
    frozen: int = 0  # parameters without gradients and optimizer state
    buffers: int = 0  # bytes; FSDP does not shard them
    unmeasured: str = ""  # why activations and FLOPs are not known: FLOPs are then estimated, activations missing
    unit_layers: float = 1.0  # of the unit that has most
    root_layers: float = 0.0  # in no unit: never recomputed
    positions: int = 0  # longest sample that a transformers model has positions for, tokens; 0: any

    @property
    def n_blocks(self) -> int:
        return sum(b.count for b in self.blocks)

    @property
    def mean_layers(self) -> float:
        """Layers of a block, on average."""
        return (self.activations.layers - self.root_layers) / max(1, self.n_blocks)

    def recomputed(self, fsdp: FsdpConfig) -> str:
        """Return `fsdp.activation_checkpointing`, which concerns whole units of the model: "none" without any."""
        return fsdp.activation_checkpointing if self.blocks else "none"

    @property
    def units(self) -> tuple[Unit, ...]:
        return (self.root, *self.blocks, self.head)

    @cached_property
    def numel(self) -> int:
        """Parameters of the whole model."""
        return sum(u.numel * u.count for u in self.units)

    @property
    def trained(self) -> float:
        """The share of its parameters that have gradients and optimizer state."""
        return 1 - self.frozen / max(1, self.numel)

    @cached_property
    def largest(self) -> Unit:
        """The block with the most parameters; an empty unit when there are no blocks."""
        return max(self.blocks, key=lambda b: b.numel, default=Unit("no block", ()))

    def shard_numel(self, group: int) -> int:
        """Elements one rank stores of the whole model, padding included."""
        return sum(u.shard_numel(group) * u.count for u in self.units)

    def flops_per_token(self, seq_len: int) -> float:
        """Return the model FLOPs of forward and backward, as MFU counts them.

        6 x matmul weights + 12 x layers x width x seq_len: Chowdhery et al. 2022 (PaLM, arXiv:2204.02311),
        appendix B; 4 x frozen weights. Recomputation and the causal mask do not count.
        """
        a = self.activations
        matmuls = a.layers * a.matmul_flops + a.head_flops
        return (2 + self.trained) * matmuls + 12.0 * a.layers * a.attention_width * seq_len


def llama_activations(model: LlamaConfig, accelerator: str, dtype: str) -> Activations:
    """Count what a token costs in models/llama.py.

    Saved per block, from what autograd keeps for each operation (compare Korthikanti et al. 2022,
    arXiv:2205.05198, section 4.1): input, attention_norm's output, q, attention's output by heads
    and by tokens, middle of the block, ffn_norm's output (7 d), k and v (2 d_kv; in fp32 on CUDA repeated for all
    query heads), w1, its SiLU, w3, their product (4 f). CUDA's norm kernel keeps its input and one number per token;
    on the CPU the norm keeps its input and its normalised input in fp32.
    """
    d, f, v = model.dim, model.ffn_dim, model.vocab_size
    kv = d // model.n_heads * model.n_kv_heads
    cpu = accelerator == "cpu"
    kept_kv = d if dtype == "fp32" and not cpu else kv
    return Activations(
        layers=model.n_layers,
        block_input=d,
        block_saved=(5 if cpu else 7) * d + 2 * kept_kv + 4 * f,
        block_saved_fp32=(4 * d if cpu else 0) + model.n_heads + 2,
        block_matmul=4 * d + 2 * kv + 2 * f,
        block_peak=d + 2 * f,
        head_saved=(1 if cpu else 2) * d,
        head_saved_fp32=(2 * d if cpu else 0) + 1,
        vocab=v,
        linear_head=True,
        matmul_flops=2 * (2 * d * d + 2 * d * kv + 3 * d * f),
        last_flops=2 * d * f,
        head_flops=2 * d * v,
        attention_width=d,
        head_width=d // model.n_heads,
        # Read and written by eager kernels: 2 norms (4 d); the rotary embedding of q and k in fp32 (48 bytes
        # per element, or 24 bf16 elements); SiLU and product (5 f); 2 residual sums (6 d).
        elementwise=10 * d + 24 * (d + kv) + 5 * f,
    )


def llama_shape(model: LlamaConfig, accelerator: str = "cuda", dtype: str = "bf16") -> ModelShape:
    """Cut models/llama.py, given its dimensions, into the units of `fsdp.wrap=layer`, as job/sharding.py does."""
    d, f, v = model.dim, model.ffn_dim, model.vocab_size
    kv = d // model.n_heads * model.n_kv_heads
    layer: Params = (
        ("attention.wq.weight", (d, d)),
        ("attention.wk.weight", (kv, d)),
        ("attention.wv.weight", (kv, d)),
        ("attention.wo.weight", (d, d)),
        ("feed_forward.w1.weight", (f, d)),
        ("feed_forward.w2.weight", (d, f)),
        ("feed_forward.w3.weight", (f, d)),
        ("attention_norm.weight", (d,)),
        ("ffn_norm.weight", (d,)),
    )
    layers = (Unit("layers", layer, model.n_layers),)
    embedding: Params = (("tok_embeddings.weight", (v, d)),)
    norm: Params = (("norm.weight", (d,)),)
    head: Params = (*norm, ("output.weight", (v, d)))
    activations = llama_activations(model, accelerator, dtype)
    if model.tie_embeddings:
        return ModelShape(Unit("root", embedding + norm), layers, activations, waiting=(v + 1) * d)
    return ModelShape(Unit("root", embedding), layers, activations, head=Unit("head", head))


def merged(units: list[tuple[str, Params]]) -> tuple[Unit, ...]:
    """Merge units of equal shapes into one with a count, in the order they first appear."""
    by_shapes: dict[tuple[Shape, ...], Unit] = {}
    for name, params in units:
        shapes = tuple(shape for _, shape in params)
        unit = by_shapes.get(shapes, Unit(name, params, 0))
        by_shapes[shapes] = replace(unit, count=unit.count + 1)
    return tuple(by_shapes.values())
