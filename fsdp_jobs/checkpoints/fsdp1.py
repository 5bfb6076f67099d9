"""The state of FSDP1 models (`FullyShardedDataParallel`), with the names and shards of FSDP2."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    _init_optim_state,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._init_utils import HYBRID_SHARDING_STRATEGIES

from fsdp_jobs.checkpoints.state import Parts, State, by_parameter, split


class Fsdp1State(State):
    """State of a model with flat parameters: torch gathers each FSDP unit, and shards copies of its tensors by rows.

    Saves and restores therefore communicate, and need memory for a second copy of the rank's shard.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, others: Mapping[str, Stateful], device: torch.device
    ):
        """Build the state once, as a save does; an optimizer without state is left without it.

        Raises:
            TypeError: it cannot be saved, or the ranks do not train one model.
        """
        self._copies: dict[str, Any] = {}
        _check_groups(model)
        is_new, groups = not optimizer.state, [dict(group) for group in optimizer.param_groups]
        try:
            _init_optim_state(optimizer)
            super().__init__(model, optimizer, others, device)
        except (AssertionError, KeyError, RuntimeError, ValueError) as e:
            why = f"{type(e).__name__}: {e}".partition("\n")[0]
            raise TypeError(
                f"torch cannot tell which part of FSDP1's flat parameters this optimizer's state belongs to ({why})"
            ) from e
        self._copies.clear()
        if is_new:
            optimizer.state.clear()
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                group.update(before)

    def _live(self) -> Parts:
        """Copy the current state; tensors sharded by rows are DTensors.

        Raises:
            TypeError: an optimizer's state differs from its parameter in shape.
        """
        with self._as_dtensors():
            model: dict[str, Any] = get_model_state_dict(self.model)
            has_state = bool(self.optimizer.state)  # torch would create it
            optim: Any = get_optimizer_state_dict(self.model, self.optimizer) if has_state else {"state": {}}
        self._copies = {"model": model, "optim": optim}
        self.buffers = frozenset(self._fqn(name) for name, _ in self.model.named_buffers(remove_duplicate=False))
        state = {f"model.{name}": value for name, value in model.items()}
        for name, key, value in _entries(optim):
            if isinstance(value, Tensor) and value.dim() and value.shape != model[name].shape:
                raise TypeError(
                    f"the optimizer's {key} of {name} has the shape {tuple(value.shape)}, and the parameter "
                    f"{tuple(model[name].shape)}: with FSDP1 only state of each element can be saved"
                )
            state[f"optim.state.{name}.{key}"] = value
        return split(state)

    def to_save(self) -> Parts:
        state = super().to_save()
        self._copies.clear()
        return state

    def to_compare(self) -> dict[str, Tensor]:
        """Return nothing: unflattening parameters costs as much as a save. Snapshots are compared instead."""
        return {}

    def _alike(self, saved: Mapping[str, Any]) -> set[Tensor]:
        """Return none: torch unflattens parameters only if the optimizer has state for all that they hold."""
        return set()

    def _match_optimizer(self, state: dict[str, Tensor], saved: Mapping[str, Any]) -> None:
        """Zero the state of parameters that had no gradient before the save, in place of loading it.

        Drop all of it if the optimizer had made no update.
        """
        there, here = by_parameter(saved), by_parameter(state)
        for prefix in here.keys() - there.keys():
            for key in here[prefix]:
                state.pop(f"{prefix}.{key}").zero_()
        if not there:
            self.optimizer.state.clear()
            self._copies["optim"]["state"].clear()

    def _put_back(self, values: dict[str, Any]) -> None:
        """Put the loaded copies back into model and optimizer."""
        model, optim = self._copies["model"], self._copies["optim"]
        model = {name: values.get(f"model.{name}", value) for name, value in model.items()}
        for name, key, value in list(_entries(optim)):
            optim["state"][name][key] = values.get(f"optim.state.{name}.{key}", value)
        with self._as_dtensors():
            set_model_state_dict(self.model, model)
            if optim["state"]:
                set_optimizer_state_dict(self.model, self.optimizer, optim)
        self._copies.clear()

    @contextmanager
    def _as_dtensors(self) -> Iterator[None]:
        """Have FSDP1 use DTensors, as with a device mesh; without one it uses ShardedTensors, which DCP cannot copy."""
        units = [unit for unit in FullyShardedDataParallel.fsdp_modules(self.model) if unit._device_mesh is None]
        for unit in units:
            unit._device_mesh = DeviceMesh.from_group(unit.process_group, self.device.type)  # type: ignore[arg-type]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # from torch's own calls
                yield
        finally:
            for unit in units:
                unit._device_mesh = None


def is_used(model: nn.Module) -> bool:
    """Whether FSDP1 wraps a model or parts of it."""
    return bool(FullyShardedDataParallel.fsdp_modules(model))


def _entries(optim: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield (parameter, key, value) of an optimizer's state."""
    for name, of_parameter in optim["state"].items():
        for key, value in of_parameter.items():
            yield name, key, value


def _check_groups(model: nn.Module) -> None:
    """Raises: TypeError when groups of ranks train separate models: a checkpoint would keep only one of them."""
    world = dist.get_world_size()
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        is_hybrid = unit.sharding_strategy in HYBRID_SHARDING_STRATEGIES  # False if its shard groups have one rank
        ranks = dist.get_world_size(unit.process_group) * (unit._inter_node_pg.size() if is_hybrid else 1)
        if ranks < world:
            raise TypeError(
                f"FSDP spans {ranks} of {world} ranks, and each such group trains a model of its own: "
                "pass device_mesh=job.mesh() to FSDP, with shard groups of two ranks or more"
            )
