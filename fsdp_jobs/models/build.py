"""Build the model of a configuration, and find the parts that become FSDP units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hydra.utils import get_method
from torch import nn

from fsdp_jobs.config.schema import CustomModelConfig, FsdpConfig, HfConfig, LlamaConfig, ModelConfig
from fsdp_jobs.hub.huggingface import build_hf, is_hf, layer_classes
from fsdp_jobs.models.llama import Llama


def build_model(config: ModelConfig) -> nn.Module:
    """Build the model on the current default device (`with torch.device("meta")` for shapes only).

    Raises:
        TypeError: a custom factory does not return an nn.Module.
        ImportError, AttributeError: a custom factory does not exist.
        BadInput, OSError, ValueError: a transformers model cannot be loaded.
    """
    if isinstance(config, LlamaConfig):
        return Llama(config)
    if isinstance(config, HfConfig):
        return build_hf(config)
    assert isinstance(config, CustomModelConfig)
    factory: Callable[..., Any] = get_method(config._target_)
    model = factory(**config.kwargs)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model._target_={config._target_} returned a {type(model).__name__}, not an nn.Module")
    return model


def head_modules_of(model: Any) -> list[nn.Module]:
    """Return the modules that run last and are needed first in backward, as one FSDP unit; empty if unknown."""
    if not is_hf(model):
        return list(model.head_modules()) if hasattr(model, "head_modules") else []
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None:
        return []
    return [embedding, head] if embedding.weight is head.weight else [head]


def linear_head_of(model: nn.Module) -> nn.Linear | None:
    """Return the linear layer that computes the logits; None if a model names none."""
    head = head_modules_of(model)
    return head[-1] if head and isinstance(head[-1], nn.Linear) else None


def find_blocks(
    model: nn.Module, model_config: ModelConfig, fsdp: FsdpConfig, classes: Sequence[str] = ()
) -> list[nn.Module]:
    """Return the modules that become FSDP units of their own, in the order they run.

    With `fsdp.wrap=layer` these are the modules of the classes named here or in the configuration. Without such names
    they are the layers that a transformers model names itself; in any other model the members of its module lists or,
    without lists, the modules of a class that an `nn.Sequential` repeats. A module that shares a weight with one
    outside of it is none: FSDP would train the weight as two.

    Raises:
        ValueError: no module has one of the named classes, or a custom model has no list of layers.
    """
    if fsdp.wrap == "none":
        return []
    if fsdp.wrap == "size":
        return _blocks_by_size(model, fsdp.min_num_params)
    named = list(classes) or model_config.wrap_classes
    wanted = named or (layer_classes(model) if is_hf(model) else [])
    found = [m for m in model.modules() if type(m).__name__ in wanted]
    if named and not found:
        there = sorted({type(m).__name__ for m in model.modules()})
        raise ValueError(f"model.wrap_classes={named} matches no module; the model has {', '.join(there)}")
    holders = _holders(model)
    found = [m for m in found or [*_members(model)] or [*_repeated(model)] if not _shares(m, holders)]
    if not found and isinstance(model_config, CustomModelConfig):
        what = "the model has no list of layers with weights of their own"
        raise ValueError(f"{what}: name their class, model.wrap_classes='[Block]'")
    return found


def _members(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of the outermost lists, also of lists in them, as stages are: FSDP wraps no container."""
    for child in module.children():
        if isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _members(child)


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of the outermost `nn.Sequential`s that have submodules, and whose class occurs repeatedly."""
    for child in module.children():
        members = list(child.children()) if isinstance(child, nn.Sequential) else []
        count = Counter(map(type, members))
        found = [m for m in members if count[type(m)] > 1 and any(True for _ in m.children())]
        yield from found or _repeated(child)


def _holders(module: nn.Module) -> Counter[nn.Parameter]:
    """Count the modules that hold each parameter."""
    return Counter(p for m in module.modules() for p in m.parameters(recurse=False))


def _shares(module: nn.Module, holders: Counter[nn.Parameter]) -> bool:
    """Return whether a module outside this one holds one of its parameters."""
    return any(count < holders[p] for p, count in _holders(module).items())


def _blocks_by_size(module: nn.Module, min_num_params: int) -> list[nn.Module]:
    """Return the smallest modules with at least `min_num_params` parameters not held by a deeper unit."""
    units: list[nn.Module] = []
    holders = _holders(module)

    def visit(m: nn.Module) -> int:
        at = len(units)
        rest = sum(p.numel() for p in m.parameters(recurse=False)) + sum(map(visit, m.children()))
        is_list = isinstance(m, nn.ModuleList | nn.ModuleDict)
        if rest < min_num_params or m is module or is_list or _shares(m, holders):
            return rest
        units.insert(at, m)  # before those inside it
        return 0

    visit(module)
    return units
