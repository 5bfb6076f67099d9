"""What a checkpoint holds of a training program: tensors by name, read from its objects and put back."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from fsdp_jobs.config.errors import JobFailed

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class State:
    """A model, its optimizer, this rank's random state, and objects that are the same on every rank."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, others: Mapping[str, Stateful], device: torch.device
    ):
        self.model, self.optimizer = model, optimizer
        self.others = {f"others.{name}": other for name, other in others.items()}
        self.random = {f"rng.{dist.get_rank()}": RandomState(device)}
        self._live: dict[str, Tensor] = {}  # steps change these tensors in place, never their names

    def live(self) -> dict[str, Tensor]:
        """Return the tensors of model and optimizer by name, hyperparameters left out."""
        state: dict[str, Tensor] = {}
        seen: set[int] = set()  # tied weights have two names and are saved once
        for name, value in get_model_state_dict(self.model).items():
            if isinstance(value, Tensor) and id(value) not in seen:
                seen.add(id(value))
                state[f"model.{name}"] = value
        optimizer_state = get_optimizer_state_dict(self.model, self.optimizer, options=_FLAT)
        state |= {f"optim.{k}": v for k, v in cast(dict[str, Any], optimizer_state).items() if isinstance(v, Tensor)}
        return state

    def to_save(self) -> dict[str, Tensor]:
        """Return all that a checkpoint holds, as it is now."""
        self._live = self._live or self.live()
        return self._live | {name: _packed(o.state_dict()) for name, o in (self.others | self.random).items()}

    def to_load(self, metadata: Metadata, checkpoint: str, same_world: bool) -> dict[str, Tensor]:
        """Return the tensors to read a checkpoint into, random states only at the same number of ranks.

        Raises:
            JobFailed: the checkpoint is of another model.
        """
        state = self.live()
        for name in self.others | (self.random if same_world else {}):
            saved = metadata.state_dict_metadata.get(name)
            size = saved.size if isinstance(saved, TensorStorageMetadata) else 0
            state[name] = torch.empty(size, dtype=torch.uint8)
        _check_same_model(state, metadata.state_dict_metadata, checkpoint)
        return state

    def take(self, state: dict[str, Tensor]) -> None:
        """Go on from what was read into the tensors of `to_load`; the model's are its own already."""
        flat: dict[str, Any] = dict(get_optimizer_state_dict(self.model, self.optimizer, options=_FLAT))
        flat |= {k.removeprefix("optim."): v for k, v in state.items() if k.startswith("optim.")}
        set_optimizer_state_dict(self.model, self.optimizer, flat, options=_FLAT)
        for name, other in (self.others | self.random).items():
            if name in state:
                other.load_state_dict(_unpacked(state[name]))


class Hyperparameters:
    """What an optimizer's groups hold besides parameters; schedulers compute the next rate from it."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"groups": [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for group, saved in zip(self.optimizer.param_groups, state["groups"], strict=True):
            group.update(saved)


class RandomState:
    """This rank's random state: torch on CPU and GPU, NumPy, Python."""

    def __init__(self, device: torch.device):
        self.device = device

    def state_dict(self) -> dict[str, Any]:
        generator, keys, *rest = np.random.get_state(legacy=True)
        version, words, gauss = random.getstate()
        state = {
            "torch": torch.get_rng_state(),
            "numpy": (generator, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
            "python": (version, torch.tensor(words), gauss),
        }
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        generator, keys, *rest = state["numpy"]
        np.random.set_state((generator, keys.numpy().astype(np.uint32), *rest))
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.device)


def _packed(values: dict[str, Any]) -> Tensor:
    file = io.BytesIO()
    torch.save(values, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> dict[str, Any]:
    """Raises: pickle.UnpicklingError for what is neither a plain value nor a tensor."""
    values: dict[str, Any] = torch.load(io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=True)
    return values


def _check_same_model(state: dict[str, Tensor], saved: dict[str, Any], checkpoint: str) -> None:
    """Raises: JobFailed naming up to five tensors that the checkpoint lacks, or has in another shape."""
    wrong = []
    for name, tensor in state.items():
        there = saved.get(name)
        if not isinstance(there, TensorStorageMetadata):
            wrong.append(f"{name} is not in it")
        elif tuple(there.size) != tuple(tensor.shape):
            wrong.append(f"{name} is {tuple(there.size)} there and {tuple(tensor.shape)} here")
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise JobFailed(
            f"{checkpoint} is of another model: {'; '.join(wrong[:5])}{more}. "
            "Use the model it was saved with, or another run name."
        )
