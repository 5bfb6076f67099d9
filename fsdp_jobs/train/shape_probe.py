"""Answer the planner's questions about a model by building it, in a process that may import torch.

    python -m fsdp_jobs.train.shape_probe shape CONFIG.yaml            # its shape, by running it on fake tensors
    python -m fsdp_jobs.train.shape_probe initial-weights CONFIG.yaml  # problems of `init_from`, by names and shapes

The answer is the last line on standard output, as JSON; an error is the last line on standard error.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path
from textwrap import shorten
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.resolve import accelerator, param_dtype
from fsdp_jobs.config.schema import CustomModelConfig, FsdpConfig, JobConfig, ModelConfig, load_config
from fsdp_jobs.models.build import build_model, find_blocks, head_modules_of, linear_head_of
from fsdp_jobs.plan.shapes import MATMULS, Activations, ModelShape, Params, Unit, merged

ATTENTION = "_scaled_dot_product"
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}  # of a recurrent layer, by torch's function

MOST_OPERATIONS = 50_000  # of a measured forward: a minute at most; 120 layers have 12,000


class TooManyOperations(RuntimeError):
    """The model loops over tokens, as Mamba does without its own kernels."""


# Errors of models that read values, or use kernels that a CPU lacks. Such models run on a GPU.
_NOT_ON_FAKE_TENSORS = (
    TooManyOperations,
    DynamicOutputShapeException,
    DataDependentOutputException,
    UnsupportedOperatorException,
    UnsupportedFakeTensorException,
    NotImplementedError,
)
_NO_KERNEL = "No viable backend"  # torch's words if it has no attention kernel that the model allows


class _Recurrent(torch.autograd.Function):
    """Keep for backward what a GPU's kernel of all recurrent layers keeps: input, output, and a reserve."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, width: int, reserve: int, states: Sequence[Tensor], *_weights: Tensor
    ) -> tuple[Tensor, ...]:
        out = x.new_empty((*x.shape[:-1], width))
        ctx.save_for_backward(x, out, x.new_empty((*x.shape[:-1], reserve)))
        return out, *map(torch.empty_like, states)


class _Kernels(TorchFunctionMode):
    """Make attention and recurrent layers use the kernels that a GPU would, and record heads.

    With dropout a CPU multiplies whole matrices of attention scores; a GPU's fused kernels support dropout. A CPU runs
    recurrent layers step by step, and their Python code takes minutes for a long sample.
    """

    def __init__(self, counter: _Counter) -> None:
        super().__init__()
        self.head_width, self.grouped, self.counter, self.operations = 128, False, counter, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        if self.operations > MOST_OPERATIONS:
            raise TooManyOperations(f"more than {MOST_OPERATIONS:,} operations for one sample")
        if (gates := GATES.get(getattr(func, "__name__", ""))) is not None:
            return self._recurrent(gates, args)
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), args, strict=False)) | (kwargs or {})
        query, value = given["query"], given["value"]
        self.head_width = query.shape[-1]
        self.grouped = query.shape[-3] != given["key"].shape[-3]
        wider = max(0, query.shape[-1] - value.shape[-1])  # as in DeepSeek's; a GPU's kernel takes both
        out = func(**given | {"dropout_p": 0.0, "value": F.pad(value, (0, wider)) if wider else value})
        return out[..., : value.shape[-1]] if wider else out

    def _recurrent(self, gates: int, args: Sequence[Any]) -> Any:
        """Run the layers of an `nn.RNNBase`, which passes their weights as a list that follows the initial states.

        cuDNN does not say what its reserve has. Backward needs of each layer, direction and token the gates, the
        hidden state, and an LSTM's cell or the hidden part of a GRU's new gate.
        """
        at = max(i for i, argument in enumerate(args) if isinstance(argument, list))
        x, initial, weights, directions = args[0], args[at - 1], args[at], 1 + args[at + 5]
        states = (initial,) if isinstance(initial, Tensor) else initial
        tokens = x[..., 0].numel()
        of_gates, width = weights[1].shape
        matrices = sum(w.numel() for w in weights if w.ndim > 1)
        self.counter.multiplied(2 * tokens * matrices, directions * tokens * of_gates)
        reserve = len(states[0]) * of_gates // gates * (gates + 1 + (gates > 1))
        return _Recurrent.apply(x, directions * width, reserve, states, *weights)  # type: ignore[no-untyped-call]


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


class _FakeMode(FakeTensorMode):
    """The mode of a model's fake tensors, which modules that are copied share."""

    def __deepcopy__(self, memo: object) -> _FakeMode:
        return self


class _Counter(TorchDispatchMode):
    """Sum up matmul FLOPs, outputs worth keeping and bytes moved, inside blocks and outside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.depth = 0  # blocks around; some are inside others
        self.flops = {True: 0, False: 0}
        self.kept = self.moved = self.attention = 0
        self.widest = 0  # elements of the largest output of a matmul in a block
        self.last = 0  # FLOPs of the newest matmul, after which nothing was saved
        self.plain: dict[int, str] = {}  # tensors that are neither parameters nor buffers, by their storage

    @property
    def inside(self) -> bool:
        return self.depth > 0

    def multiplied(self, flops: int, outputs: int) -> None:
        self.last = flops
        self.flops[self.inside] += flops
        self.widest = max(self.widest, outputs if self.inside else 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        tensors = [a for a in args if isinstance(a, Tensor)]
        for tensor in tensors if self.plain else ():
            if (attribute := self.plain.get(tensor.untyped_storage()._cdata)) is not None:
                cure = "register_buffer(..., persistent=False), or fsdp.meta_init=false"
                raise ValueError(f"{attribute} is neither parameter nor buffer, and stays empty on the ranks: {cure}")
        if name == "_grouped_mm":  # of experts; fake tensors support it only in bf16
            out = func(*_cast(args, torch.bfloat16), **(kwargs or {})).to(args[0].dtype)
        else:
            out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple | list) and out else out
        if not isinstance(first, Tensor):
            return out
        if name in MATMULS or name == "convolution":
            # a bias comes first, and the experts' offsets last: the last matrix is [K, N]
            right = [t for t in tensors if t.ndim > 1][-1]
            terms = right.shape[-2] if name in MATMULS else right[0].numel()
            self.multiplied(2 * first.numel() * terms, first.numel())
            self.kept += first.numel() if self.inside else 0
        elif name.startswith(ATTENTION):
            self.kept += first.numel() if self.inside else 0
            self.attention += first.numel()
        elif self.inside and not func.is_view:
            self.moved += first.nbytes + sum(t.nbytes for t in tensors)
        return out


def activations_of(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    seq_len: int,
    dtype: torch.dtype = torch.float32,
    is_filled: bool = False,
) -> Activations:
    """Measure the cost of a token in this model, by one sample of `seq_len` tokens; means over the blocks.

    With `is_filled`, ranks build the model empty, and only its parameters and buffers are filled.

    Parameters and the inputs of blocks and head are cast to `dtype`, as FSDP's mixed precision casts them.
    """
    counter = _Counter()
    kernels = _Kernels(counter)
    for module in model.modules() if is_filled else ():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                counter.plain[value.untyped_storage()._cdata] = f"{type(module).__name__}.{name}"
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    stored = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    saved: dict[int, tuple[Tensor, bool]] = {}  # with the tensor, so that no other gets its storage's address
    inputs: list[int] = []
    last: list[int] = []
    made: list[Tensor] = []  # by the head

    def enter(_module: nn.Module, args: tuple[Any, ...]) -> None:
        counter.depth += 1
        inputs.append(next((a.numel() for a in args if isinstance(a, Tensor)), 0))

    def leave(_module: nn.Module, _args: Any, _out: Any) -> None:
        counter.depth -= 1
        last.append(counter.last)

    def pack(t: Tensor) -> Tensor:
        counter.last = 0
        key = t.untyped_storage()._cdata
        if key not in stored:
            saved.setdefault(key, (t, counter.inside))
        return t

    for unit in [*blocks, *head_modules_of(model)]:
        unit.register_forward_pre_hook(lambda _module, *given: _cast(given, dtype), with_kwargs=True)
    for block in blocks:
        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave)
    if (head := linear_head_of(model)) is not None:
        head.register_forward_hook(lambda _module, _args, out: made.append(out))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), counter, kernels:
        logits = model(torch.zeros((1, seq_len), dtype=torch.int64))

    def elements(inside: bool, computed: bool) -> int:
        """Count what is saved in `dtype`, or the rest, in fp32's four bytes."""
        of = (t for t, at in saved.values() if at is inside and (t.dtype == dtype) is computed)
        return sum(t.untyped_storage().nbytes() for t in of) // (dtype.itemsize if computed else 4)

    layers = max(1, len(blocks))
    each = layers * seq_len
    return Activations(
        layers=layers,
        block_input=sum(inputs) // each,
        block_saved=elements(True, True) // each,
        block_saved_fp32=elements(True, False) // each,
        block_matmul=counter.kept // each,
        block_peak=2 * counter.widest // seq_len,
        head_saved=elements(False, True) // seq_len,
        head_saved_fp32=elements(False, False) // seq_len,
        vocab=logits.shape[-1],
        linear_head=len(made) == 1 and logits is made[0],
        matmul_flops=counter.flops[True] // each,
        last_flops=sum(last) // each,
        head_flops=counter.flops[False] // seq_len,
        attention_width=counter.attention // each,
        head_width=kernels.head_width,
        grouped_heads=kernels.grouped,
        elementwise=counter.moved // dtype.itemsize // each,
    )


def units_of(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    layers: Sequence[nn.Module],
    head: Sequence[nn.Module],
    activations: Activations,
) -> ModelShape:
    """List the model's parameters by FSDP unit, as job/sharding.py makes them: blocks, head, and the rest.

    A unit has as much of a layer as of its parameters.
    """
    names = {p: n for n, p in model.named_parameters()}
    taken: set[nn.Parameter] = set()

    def unit(modules: Sequence[nn.Module]) -> Params:
        own = dict.fromkeys(p for m in modules for p in m.parameters() if p not in taken)
        taken.update(own)
        return tuple((names[p], tuple(p.shape)) for p in own)

    share: dict[str, float] = {}  # of a layer
    for layer in layers[::-1]:
        its = {names[p]: p.numel() for p in layer.parameters() if names[p] not in share}
        share |= {name: size / sum(its.values()) for name, size in its.items()}
    made = [(f"block {i}", unit([b])) for i, b in reversed([*enumerate(blocks)])][::-1]  # those inside others first
    head_unit, root = Unit("head", unit(head)), Unit("root", unit([model]))
    held = [round(sum(share.get(name, 0.0) for name, _ in params), 6) for _, params in made]  # layers
    holders = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    of_head = {n for n, _ in head_unit.params}
    if any(count > 1 and names[p] in of_head for p, count in holders.items()):
        # A weight that the head shares is gathered first and reduced last, like a root's.
        root, head_unit, waiting = Unit("root", root.params + head_unit.params), Unit("head", ()), head_unit.numel
    else:  # Without a head of its own, all of the root's gradients may exist before the blocks' backward.
        waiting = 0 if head_unit.params else root.numel
    most, loose = max(held, default=0.0), max(0.0, activations.layers - sum(held))
    return ModelShape(root, merged(made), activations, head_unit, waiting=waiting, unit_layers=most, root_layers=loose)


def positions_of(model: nn.Module) -> int:
    """Return how many positions the table of a transformers model has; 0 if it computes positions."""
    count = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(count, int) or not hasattr(model, "get_input_embeddings"):
        return 0
    tokens = cast(Any, model).get_input_embeddings()
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding) and m is not tokens]
    return count if any(count <= rows <= count + 2 for rows in tables) else 0  # OPT and BART have two rows more


def shape_of(config: JobConfig) -> ModelShape:
    """Build the model on fake tensors, run one sample, and describe it.

    Raises:
        ValueError: FSDP cannot shard the model.
    """
    unmeasured = ""
    with _FakeMode():
        model = build_model(config.model)
        if scalars := [name for name, p in model.named_parameters() if p.ndim == 0]:
            raise ValueError(f"FSDP does not shard a parameter without dimensions, {scalars[0]}: torch.ones(1) is one")
        blocks, positions = find_blocks(model, config.model, config.fsdp), positions_of(model)
        layers = (
            blocks
            if config.fsdp.wrap == "layer"
            else find_blocks(model, ModelConfig(wrap_classes=config.model.wrap_classes), FsdpConfig())
        )
        is_fp32 = param_dtype(config.fsdp, accelerator(config)) == "fp32"
        dtype = torch.float32 if is_fp32 else torch.bfloat16  # fp16 has the same sizes
        try:
            is_filled = config.fsdp.meta_init and isinstance(config.model, CustomModelConfig)
            length = min(config.data.seq_len, positions or config.data.seq_len)  # a longer one is refused later
            activations = activations_of(model, layers, length, dtype, is_filled)
        except RuntimeError as e:
            if not isinstance(e, _NOT_ON_FAKE_TENSORS) and _NO_KERNEL not in str(e):
                raise  # an error of the model's own
            activations, unmeasured = _estimated(model, layers), _said(e)
    head = head_modules_of(model) if config.fsdp.wrap == "layer" else []
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    units = units_of(model, blocks, layers, head, activations)
    return replace(units, positions=positions, frozen=frozen, buffers=buffers, unmeasured=unmeasured)


def _said(error: Exception) -> str:
    """Return an error's first lines as one: Hydra and transformers say the cause and the cure in the next two.

    For a model that is no language model, transformers lists all that are.
    """
    lines = (str(error).strip() or "no message").splitlines()[:3]
    return shorten(f"{type(error).__name__}: {' '.join(lines)}", 600, placeholder=" ...")


def _estimated(model: nn.Module, blocks: Sequence[nn.Module]) -> Activations:
    """Return what a model's parameters tell of the cost of a token: 2 FLOPs each, and no activations."""
    head = linear_head_of(model)
    in_blocks = sum(p.numel() for p in {p for block in blocks for p in block.parameters()})
    layers = max(1, len(blocks))
    return Activations(
        *(layers, 0, 0, 0, 0, 0),
        vocab=0 if head is None else head.out_features,
        matmul_flops=2 * in_blocks // layers,
        head_flops=0 if head is None else 2 * head.weight.numel(),
    )


def initial_weights_of(config: JobConfig) -> str:
    """List why `init_from` cannot be this model's weights, as JSON: [where, what, cure] each."""
    from fsdp_jobs.hub.pretrained import problems_of  # its imports take longer than a shape

    with torch.device("meta"):
        model = build_model(config.model)
    try:
        problems = problems_of(model, config)
    except BadInput as e:
        problems = e.problems
    return json.dumps([astuple(p) for p in problems])


def main() -> None:
    question, path = sys.argv[1:]
    try:
        config = load_config(Path(path))
        answer = initial_weights_of(config) if question == "initial-weights" else shape_of(config).to_json()
    except Exception as e:
        sys.exit(_said(e))
    print(answer)


if __name__ == "__main__":
    main()
