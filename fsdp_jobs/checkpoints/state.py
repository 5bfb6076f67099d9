"""The state of a training program as tensors by name: read from its objects, and put back."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, _get_fqns, _init_optim_state, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fsdp_jobs.config.errors import JobFailed
from fsdp_jobs.run.table import listed

RANDOM = "rng."  # names of ranks' random states begin so
_OPTIM = "optim.state."  # names of an optimizer's state begin so; then come the parameter's and the state's own
_VALUES = "values"  # what model and optimizer hold besides tensors


class State:
    """A model, its optimizer, this rank's random state, and objects that are the same on every rank."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, others: Mapping[str, Stateful], device: torch.device
    ):
        """Look at all of it once.

        Raises:
            TypeError: something in it cannot be saved.
        """
        self.model, self.optimizer, self.device = model, optimizer, device
        known = set(model.parameters())
        if any(p not in known for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
            raise TypeError("the optimizer has a parameter that the model has not: make the optimizer after FSDP")
        others = {"hyperparameters": Hyperparameters(optimizer), **others}
        self.others = {f"others.{name}": other for name, other in others.items()}
        self.random = {f"{RANDOM}{dist.get_rank()}": RandomState(device)}
        self._fqns: dict[str, str] = {}
        self._is_prepared = False
        self.buffers: frozenset[str] = frozenset()  # the tensors that a forward may change, by name
        _, values = self._live()
        for name, value in [*values.items(), *((name, o.state_dict()) for name, o in self.others.items())]:
            _packed(name, value)

    def live(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors of model and optimizer by name, and their other values; hyperparameters left out.

        An optimizer that has made no step gets the state that it would have before its first.
        """
        self._prepare(lambda params: params)
        return self._live()

    def _prepare(self, some: Callable[[list[Tensor]], list[Tensor]]) -> None:
        """Have an optimizer that has made no step make the state of some of the parameters of each group."""
        if not self._is_prepared:
            groups = self.optimizer.param_groups
            whole = [group["params"] for group in groups]
            try:
                for group, params in zip(groups, whole, strict=True):
                    group["params"] = some(params)
                _init_optim_state(self.optimizer)
            finally:
                for group, params in zip(groups, whole, strict=True):
                    group["params"] = params
            self._is_prepared = True

    @property
    def may_be_infinite(self) -> frozenset[str]:
        """The tensors that may hold infinities, as masks do: buffers, and parameters that training does not change."""
        frozen = (name for name, p in self.model.named_parameters(remove_duplicate=False) if not p.requires_grad)
        return self.buffers | {self._fqn(name) for name in frozen}

    def to_compare(self) -> dict[str, Tensor]:
        """Return what replicas hold in common, as it is now: parameters, and what the optimizer holds so far."""
        tensors, _ = self._live()
        return {name: tensor for name, tensor in tensors.items() if name not in self.buffers}

    def _live(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Look up what there is now.

        Raises:
            TypeError: the optimizer holds state of a tensor that the model does not have, or this rank's own part of
                what should be sharded.
        """
        parameters = [(self._fqn(n), p) for n, p in self.model.named_parameters(remove_duplicate=False)]
        names: dict[Tensor, str] = {p: name for name, p in reversed(parameters)}  # a tied weight's first one
        state = {self._fqn(name): value for name, value in self.model.state_dict().items()}
        self.buffers = frozenset(state) - dict(parameters).keys()
        for parameter, of_parameter in self.optimizer.state.items():
            if parameter not in names:
                raise TypeError("the optimizer holds state of a tensor that is not a parameter: it cannot be saved")
            prefix = _of_parameter(names[parameter])
            tensors = {k: v for k, v in of_parameter.items() if isinstance(v, Tensor) and v.numel() > 1}
            if _is_in_parts(parameter) and (own := [k for k, v in tensors.items() if not _is_in_parts(v)]):
                raise TypeError(
                    f"{prefix}.{own[0]} is each rank's own, and of a parameter that is sharded: a checkpoint would "
                    "keep one rank's. Make it like the parameter, by torch.zeros_like(p)"
                )
            state |= {f"{prefix}.{key}": value for key, value in of_parameter.items()}
        return self._split(state)

    def _split(self, state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        values = {k: v for k, v in state.items() if not isinstance(v, Tensor) or k.endswith("_extra_state")}
        return {k: v for k, v in state.items() if k not in values}, values

    def _fqn(self, name: str) -> str:
        """Return the name of a member of the model without what wrappers have put into it."""
        if name not in self._fqns:
            self._fqns[name] = f"model.{next(iter(_get_fqns(self.model, name)))}"
        return self._fqns[name]

    def to_capture(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all that a checkpoint holds: its tensors, and by name the objects that are still to be `packed`.

        The tensors are those that an update changes; buffers are copied, so that the next forward may change them.
        """
        tensors, values = self.live()
        tensors |= {name: tensors[name].clone() for name in self.buffers & tensors.keys()}
        return tensors, {_VALUES: values, **{name: o.state_dict() for name, o in (self.others | self.random).items()}}

    def packed(self, objects: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return a tensor of bytes for each object.

        Raises:
            TypeError: a value is neither plain nor a tensor.
        """
        return {name: _packed(name, value) for name, value in objects.items()}

    def to_load(self, metadata: Metadata, checkpoint: str, same_world: bool) -> dict[str, Tensor]:
        """Return the tensors to read a checkpoint into, random states only at the same number of ranks.

        Raises:
            JobFailed: the checkpoint is of another model.
        """
        if alike := self._alike(metadata.state_dict_metadata):  # by one's the others' are made, in less time
            self._prepare(lambda params: sorted(alike & {*params}, key=Tensor.numel)[:1])
        state, _ = self.live()
        self._match_optimizer(state, metadata.state_dict_metadata)
        for name in [_VALUES, *self.others, *(self.random if same_world else ())]:
            saved = metadata.state_dict_metadata.get(name)
            if name != _VALUES or saved is not None:  # which version 0.1 did not save
                size = saved.size if isinstance(saved, TensorStorageMetadata) else 0
                state[name] = torch.empty(size, dtype=torch.uint8)
        _check_same_model(state, metadata.state_dict_metadata, checkpoint)
        return state

    def _alike(self, saved: Mapping[str, Any]) -> set[Tensor]:
        """Return the parameters that the optimizer has state of in a checkpoint.

        None, where it has other state than numbers and tensors of its parameter's shape.
        """
        parameters = {_of_parameter(self._fqn(name)): p for name, p in self.model.named_parameters()}
        there = by_parameter(saved)
        for prefix, keys in there.items():
            for entry in (saved[f"{prefix}.{key}"] for key in keys):
                shapes = {torch.Size(), torch.Size([1])} | {p.shape for p in [parameters.get(prefix)] if p is not None}
                if not isinstance(entry, TensorStorageMetadata) or entry.size not in shapes:
                    return set()
        return {p for prefix, p in parameters.items() if prefix in there and p.requires_grad}

    def _match_optimizer(self, state: dict[str, Tensor], saved: Mapping[str, Any]) -> None:
        """Have the optimizer hold state of the parameters of which a checkpoint has some.

        An optimizer makes it at a parameter's first gradient: one that has had none, or was frozen, has none there.
        """
        there, here = by_parameter(saved), by_parameter(state)
        if not there or not here:
            return  # of another optimizer
        of_others = [*self.optimizer.state.values()]
        devices = {k: v.device for one in of_others for k, v in one.items() if isinstance(v, Tensor)}
        in_groups = {p for group in self.optimizer.param_groups for p in group["params"]}
        for name, parameter in self.model.named_parameters():
            prefix = _of_parameter(self._fqn(name))
            if prefix in here and prefix not in there:
                del self.optimizer.state[parameter]
                for key in here[prefix]:
                    del state[f"{prefix}.{key}"]
            elif prefix in there and prefix not in here and parameter in in_groups:
                for key in there[prefix]:
                    entry = saved[f"{prefix}.{key}"]
                    device = devices.get(key)  # counters of a fused optimizer are on the GPU
                    like = parameter if entry.size == parameter.shape else torch.empty(entry.size, device=device)
                    made = torch.zeros_like(like, dtype=entry.properties.dtype, requires_grad=False)
                    self.optimizer.state[parameter][key] = state[f"{prefix}.{key}"] = made

    def take(self, state: dict[str, Tensor]) -> None:
        """Go on from what was read into the tensors of `to_load`; model's and optimizer's are their own already."""
        self._put_back(_unpacked(state[_VALUES]) if _VALUES in state else {})
        for name, other in (self.others | self.random).items():
            if name in state:
                other.load_state_dict(_unpacked(state[name]))

    def _put_back(self, values: dict[str, Any]) -> None:
        """Give model and optimizer the values that are no tensors."""
        extra = {name.removeprefix("model."): v for name, v in values.items() if name.startswith("model.")}
        if extra:
            set_model_state_dict(self.model, extra, options=StateDictOptions(strict=False))
        for name, parameter in self.model.named_parameters():
            prefix = f"{_of_parameter(self._fqn(name))}."
            of_parameter = {n.removeprefix(prefix): v for n, v in values.items() if n.startswith(prefix)}
            self.optimizer.state[parameter].update(of_parameter) if of_parameter else None


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
        numpy = (generator, np.asarray(keys).tolist(), *rest)
        state = {"torch": torch.get_rng_state(), "numpy": numpy, "python": random.getstate()}
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        generator, keys, *rest = state["numpy"]  # once the keys and words were tensors
        np.random.set_state((generator, np.asarray(keys, np.uint32), *rest))
        version, words, gauss = state["python"]
        random.setstate((version, tuple(map(int, words)), gauss))
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.device)


def _is_in_parts(tensor: Tensor) -> bool:
    """Whether it is sharded over ranks; what they all have whole is not."""
    return isinstance(tensor, DTensor) and any(
        placement.is_shard() and size > 1
        for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    )


def _packed(name: str, values: Any) -> Tensor:
    """Raises: TypeError for what could not be read back: neither plain values nor whole tensors."""
    if any(isinstance(value, Tensor) and _is_in_parts(value) for value in tree_leaves(values)):
        raise TypeError(f"{name} holds sharded tensors, of which one rank's parts would be saved: give full_tensor()")
    file = io.BytesIO()
    try:
        torch.save(values, file)
        packed = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        _unpacked(packed)
    except Exception as e:
        raise TypeError(f"{name} holds more than plain values and tensors, and cannot be saved") from e
    return packed


def _of_parameter(name: str) -> str:
    """Return how the names of an optimizer's state of a parameter begin."""
    return f"{_OPTIM}{name.removeprefix('model.')}"


def by_parameter(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the keys of an optimizer's state by the parameter that it is of."""
    found: dict[str, list[str]] = {}
    for prefix, _, key in (name.rpartition(".") for name in names if name.startswith(_OPTIM)):
        found.setdefault(prefix, []).append(key)
    return found


def _unpacked(packed: Tensor) -> Any:
    """Raises: pickle.UnpicklingError for what is neither a plain value nor a tensor."""
    return torch.load(io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=True)


def _check_same_model(state: dict[str, Tensor], saved: dict[str, Any], checkpoint: str) -> None:
    """Raises: JobFailed naming up to five tensors that the checkpoint lacks, or has in another shape."""
    here = {name: tuple(tensor.shape) for name, tensor in state.items()}
    there = {name: tuple(entry.size) for name, entry in saved.items() if isinstance(entry, TensorStorageMetadata)}
    wrong = [
        f"{name} is {there[name]} there and {shape} here" if name in there else f"{name} is not in it"
        for name, shape in here.items()
        if there.get(name) != shape
    ]
    wrong += [f"{name} is not here" for name in saved if name.startswith(("model.", "optim.")) and name not in here]
    if wrong:
        raise JobFailed(
            f"{checkpoint} is of another model: {listed(wrong, separator='; ')}. "
            "Use the model it was saved with, or another run name."
        )
