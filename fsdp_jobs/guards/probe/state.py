"""Save a model's state besides parameters before a probe, restore it after, compare it between ranks."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fsdp_jobs.checkpoints.state import RandomState
from fsdp_jobs.checkpoints.tensors import checksum

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_OF_TORCH = vars(nn.Module()).keys()


def _is_plain(value: object) -> bool:
    """Whether a value consists only of numbers, strings and tensors, so that a copy can replace it."""
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN) or (type(value) is Tensor and not value.requires_grad)


def _held(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield name, dict and key of each buffer, and of each plain Python attribute, of the modules."""
    for prefix, module in model.named_modules():
        own = vars(module)
        buffers = [(module._buffers, name) for name, buffer in module._buffers.items() if type(buffer) is Tensor]
        attributes = [(own, name) for name in own.keys() - _OF_TORCH if _is_plain(own[name])]
        for held, name in (*buffers, *attributes):
            yield f"{prefix}.{name}", held, name


def _described(value: object) -> str:
    """Describe a plain value; equal values have the same description on all ranks."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {int(checksum(value)):x}"
    if isinstance(value, dict):
        return ", ".join(f"{key!r}: {_described(held)}" for key, held in value.items())
    if isinstance(value, set | frozenset):
        return ", ".join(sorted(map(_described, value)))
    if isinstance(value, list | tuple):
        return ", ".join(map(_described, value))
    return repr(value)


def held_by(model: nn.Module) -> dict[str, str]:
    """Describe the buffers and the plain attributes of a model's modules, by name."""
    return {name: _described(held[key]) for name, held, key in _held(model)}


@contextmanager
def kept(model: nn.Module, device: torch.device, seed: int) -> Iterator[None]:
    """Seed all ranks alike, and at the end restore what a forward pass may change."""
    found = [(held, key, held[key], _copy_of(held[key])) for _, held, key in _held(model)]
    generators = RandomState(device)
    drawn = generators.state_dict()
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        generators.load_state_dict(drawn)
        for held, key, value, before in found:
            held[key] = _as_before(value, before)


def _copy_of(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


@torch.no_grad()
def _as_before(value: Any, before: Any) -> Any:
    """Restore a value in place from its copy, because others may hold the same object; return it."""
    if isinstance(value, Tensor):
        value.copy_(before)
    elif isinstance(value, list):
        value[:] = before
    elif isinstance(value, dict | set):
        value.clear()
        value.update(before)
    return value
