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
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.schema import JobConfig, load_config
from fsdp_jobs.models.build import build_model, find_blocks, head_modules_of, linear_head_of
from fsdp_jobs.plan.shapes import Activations, ModelShape, Params, Unit, merged

MATMULS = ("mm", "addmm", "bmm", "baddbmm")
ATTENTION = "_scaled_dot_product"


class _Attention(TorchFunctionMode):
    """Have attention take the kernel that a GPU would, and note its heads.

    With dropout a CPU multiplies whole matrices of scores; a GPU's fused kernels have dropout.
    """

    def __init__(self) -> None:
        super().__init__()
        self.head_width, self.grouped = 128, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), args, strict=False)) | (kwargs or {})
        self.head_width = given["query"].shape[-1]
        self.grouped = given["query"].shape[-3] != given["key"].shape[-3]
        return func(**given | {"dropout_p": 0.0})


class _Counter(TorchDispatchMode):
    """Sum up matmul FLOPs, outputs worth keeping and elements moved, inside blocks and outside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inside = False
        self.flops = {True: 0, False: 0}
        self.kept = self.moved = self.attention = 0
        self.last = 0  # FLOPs of the newest matmul, after which nothing was saved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        first = out[0] if isinstance(out, tuple | list) and out else out
        if not isinstance(first, Tensor):
            return out
        if name in MATMULS:
            # a bias comes first: the last operand is [K, N]
            self.last = 2 * first.numel() * args[-1].shape[-2]
            self.flops[self.inside] += self.last
            self.kept += first.numel() if self.inside else 0
        elif name.startswith(ATTENTION):
            self.kept += first.numel() if self.inside else 0
            self.attention += first.numel()
        elif self.inside and not func.is_view:
            self.moved += first.numel() + sum(a.numel() for a in args if isinstance(a, Tensor))
        return out


def activations_of(model: nn.Module, blocks: Sequence[nn.Module], seq_len: int) -> Activations:
    """Measure what a token costs in this model, from one sample of `seq_len` tokens; means over the blocks."""
    counter, attention = _Counter(), _Attention()
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    saved: dict[int, tuple[Tensor, bool]] = {}  # the tensor is kept, so that its storage's address stays its own
    inputs: list[int] = []
    last: list[int] = []
    made: list[Tensor] = []  # by the head

    def enter(_module: nn.Module, args: tuple[Any, ...]) -> None:
        counter.inside = True
        inputs.append(next((a.numel() for a in args if isinstance(a, Tensor)), 0))

    def leave(_module: nn.Module, _args: Any, _out: Any) -> None:
        counter.inside = False
        last.append(counter.last)

    def pack(t: Tensor) -> Tensor:
        counter.last = 0
        key = t.untyped_storage()._cdata
        if key not in parameters:
            saved.setdefault(key, (t, counter.inside))
        return t

    for block in blocks:
        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave)
    if (head := linear_head_of(model)) is not None:
        head.register_forward_hook(lambda _module, _args, out: made.append(out))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), counter, attention:
        logits = model(torch.zeros((1, seq_len), dtype=torch.int64))

    def elements(inside: bool) -> int:
        return sum(t.untyped_storage().nbytes() // t.element_size() for t, at in saved.values() if at is inside)

    layers = max(1, len(blocks))
    each = layers * seq_len
    widest = max((p.shape[0] for b in blocks for p in b.parameters() if p.ndim > 1), default=0)
    return Activations(
        layers=layers,
        block_input=sum(inputs) // each,
        block_saved=elements(True) // each,
        block_saved_fp32=0,
        block_matmul=counter.kept // each,
        block_peak=2 * widest,
        head_saved=elements(False) // seq_len,
        vocab=logits.shape[-1],
        linear_head=len(made) == 1 and logits is made[0],
        matmul_flops=counter.flops[True] // each,
        last_flops=sum(last) // each,
        head_flops=counter.flops[False] // seq_len,
        attention_width=counter.attention // each,
        head_width=attention.head_width,
        grouped_heads=attention.grouped,
        elementwise=counter.moved // each,
    )


def units_of(
    model: nn.Module, blocks: Sequence[nn.Module], head: Sequence[nn.Module], activations: Activations
) -> ModelShape:
    """List the model's parameters by FSDP unit, as job/sharding.py makes them: blocks, head, and the rest."""
    names = {p: n for n, p in model.named_parameters()}
    taken: set[nn.Parameter] = set()

    def unit(modules: Sequence[nn.Module]) -> Params:
        own = dict.fromkeys(p for m in modules for p in m.parameters() if p not in taken)
        taken.update(own)
        return tuple((names[p], tuple(p.shape)) for p in own)

    made = [(f"block {i}", unit([b])) for i, b in enumerate(blocks)]
    head_unit, root = Unit("head", unit(head)), Unit("root", unit([model]))
    holders = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    of_head = {n for n, _ in head_unit.params}
    if any(count > 1 and names[p] in of_head for p, count in holders.items()):
        # A weight that the head shares is gathered first and reduced last, like a root's.
        whole = Unit("root", root.params + head_unit.params)
        return ModelShape(whole, merged(made), activations, waiting=head_unit.numel)
    # Without a head of its own, the root's gradients may all be there before the blocks' backward.
    return ModelShape(root, merged(made), activations, head_unit, waiting=0 if head_unit.params else root.numel)


def positions_of(model: nn.Module) -> int:
    """Return for how many tokens a model of transformers has places in a table; 0 where it computes them."""
    count = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(count, int) or not hasattr(model, "get_input_embeddings"):
        return 0
    tokens = cast(Any, model).get_input_embeddings()
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding) and m is not tokens]
    return count if any(count <= rows <= count + 2 for rows in tables) else 0  # OPT and BART have two rows more


def shape_of(config: JobConfig) -> ModelShape:
    """Build the model on fake tensors, run one sample, and describe it."""
    with FakeTensorMode():
        model = build_model(config.model)
        blocks = find_blocks(model, config.model, config.fsdp)
        activations = activations_of(model, blocks, config.data.seq_len)
    head = head_modules_of(model) if config.fsdp.wrap == "layer" else []
    return replace(units_of(model, blocks, head, activations), positions=positions_of(model))


def initial_weights_of(config: JobConfig) -> str:
    """List what keeps `init_from` from being this model's weights: a JSON list of [where, what, cure]."""
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
        sys.exit(f"{type(e).__name__}: {(str(e).strip() or 'no message').splitlines()[0]}")
    print(answer)


if __name__ == "__main__":
    main()
