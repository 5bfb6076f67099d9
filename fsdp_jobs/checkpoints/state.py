"""Convert the state of a training program to tensors by name, and back."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, _get_fqns, _init_optim_state, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from fsdp_jobs.checkpoints.ranks import Ranks
from fsdp_jobs.config.errors import JobFailed
from fsdp_jobs.run.table import counted, listed

RANDOM = "rng."  # prefix of the names of ranks' random states
_OPTIM = "optim.state."  # prefix of an optimizer's state; the parameter's name and the state's key follow
_HYPERPARAMETERS = "hyperparameters"  # name of the optimizer's hyperparameters among the other objects
_VALUES = "values"  # name of what model and optimizer hold besides tensors
Parts = tuple[dict[str, Tensor], dict[str, Any]]  # of a state, by name: tensors, and all else


class State:
    """A model, its optimizer, this rank's random state, and objects that are the same on every rank."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, others: Mapping[str, Stateful], device: torch.device
    ):
        """Check once that all of it can be saved.

        Raises:
            TypeError: something in it cannot be saved.
        """
        self.model, self.optimizer, self.device = model, optimizer, device
        if _HYPERPARAMETERS in others:
            raise TypeError(f"the optimizer's {_HYPERPARAMETERS} have this name in checkpoints: rename yours")
        for name, value in vars(optimizer).items():  # of ZeroRedundancyOptimizer, Lookahead, SAM, lists of optimizers
            for inner in tree_leaves(value):
                if isinstance(inner, torch.optim.Optimizer) and inner.state is not optimizer.state:
                    raise TypeError(
                        f"{type(optimizer).__name__} keeps its state in another optimizer, its {name}: if it keeps "
                        "nothing itself between steps, give that one to job.checkpointer; let several share one state"
                    )
        known = set(model.parameters())
        if isinstance(optimizer, torch.optim.LBFGS) and any(isinstance(p, DTensor) for p in known):
            raise TypeError("LBFGS keeps vectors of all parameters together, and under FSDP they cannot be restored")
        if any(p not in known for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
            raise TypeError("the optimizer has a parameter that is not the model's: make the optimizer after FSDP")
        others = {_HYPERPARAMETERS: Hyperparameters(optimizer), **others}
        self.others = {f"others.{name}": other for name, other in others.items()}
        self.random = {f"{RANDOM}{dist.get_rank()}": RandomState(device)}
        self._fqns: dict[str, str] = {}
        self._is_prepared = False
        self._unread: set[Tensor] = set()  # parameters whose optimizer state exists only to be loaded into
        self.buffers: frozenset[str] = frozenset()  # names of the tensors that a forward may change
        tensors, values = self._live()
        for name, tensor in tensors.items():
            if tensor.layout is not torch.strided:
                raise TypeError(f"{name} is sparse, and cannot be saved: register_buffer(..., persistent=False)")
            if not isinstance(tensor, DTensor) and torch._debug_has_internal_overlap(tensor) == 1:
                raise TypeError(f"{name} shares memory between its elements, so it cannot be restored: clone() it")
        for name, value in [*values.items(), *((name, o.state_dict()) for name, o in self.others.items())]:
            _packed(name, value)

    def live(self) -> Parts:
        """Return the tensors of model and optimizer by name, and their other values, without hyperparameters.

        An optimizer that has made no step first creates its initial state.
        """
        self._prepare(lambda params: params)
        return self._live()

    def _prepare(self, some: Callable[[list[Tensor]], list[Tensor]]) -> None:
        """Have an optimizer that has made no step create its state for `some` of the parameters of each group."""
        if not self._is_prepared:
            groups = self.optimizer.param_groups
            whole = [group["params"] for group in groups]
            own, step = vars(self.optimizer).get("step"), self.optimizer.step

            def step_once(closure: None) -> None:
                for needed in (closure, lambda: 0.0):  # SAM needs one
                    with suppress(Exception):  # not in its training mode: the state is then made like the checkpoint's
                        step(needed)
                        self._is_prepared = True
                        return

            self.optimizer.step = step_once  # type: ignore[method-assign, assignment]
            try:
                for group, params in zip(groups, whole, strict=True):
                    group["params"] = some(params)
                _init_optim_state(self.optimizer)
            finally:
                del self.optimizer.step
                if own is not None:  # a scheduler's
                    self.optimizer.step = own  # type: ignore[method-assign]
                for group, params in zip(groups, whole, strict=True):
                    group["params"] = params

    @property
    def may_be_infinite(self) -> frozenset[str]:
        """The tensors that may hold infinities, as masks do: buffers, and parameters that training does not change."""
        frozen = (name for name, p in self.model.named_parameters(remove_duplicate=False) if not p.requires_grad)
        return self.buffers | {self._fqn(name) for name in frozen}

    def to_compare(self) -> dict[str, Tensor]:
        """Return the tensors that replicas must hold alike: parameters, and the optimizer's state so far."""
        tensors, _ = self._live()
        return {name: tensor for name, tensor in tensors.items() if name not in self.buffers}

    def _live(self) -> Parts:
        """Look up the current tensors and values.

        Raises:
            TypeError: the optimizer holds state of a tensor that is not in the model, or a plain tensor for a sharded
                parameter.
        """
        parameters = [(self._fqn(n), p) for n, p in self.model.named_parameters(remove_duplicate=False)]
        names: dict[Tensor, str] = {p: name for name, p in reversed(parameters)}  # a tied weight has its first name
        state = {self._fqn(name): value for name, value in self.model.state_dict().items()}
        self.buffers = frozenset(state) - dict(parameters).keys()
        for parameter, of_parameter in self.optimizer.state.items():
            if parameter not in names:
                raise TypeError("the optimizer holds state of a tensor that is not a parameter: it cannot be saved")
            prefix = _of_parameter(names[parameter])
            leaves = [(key, leaf) for key, value in of_parameter.items() for leaf in tree_leaves(value)]
            tensors = [(key, leaf) for key, leaf in leaves if isinstance(leaf, Tensor) and leaf.numel() > 1]
            if _is_in_parts(parameter) and (own := [key for key, tensor in tensors if not _is_in_parts(tensor)]):
                raise TypeError(
                    f"{prefix}.{own[0]} is each rank's own, but its parameter is sharded: a checkpoint would keep "
                    "only one rank's. Make it with torch.zeros_like(p)"
                )
            state |= {f"{prefix}.{key}": value for key, value in of_parameter.items()}
        return split(state)

    def _fqn(self, name: str) -> str:
        """Return the name of a member of the model without the parts that wrappers insert."""
        if name not in self._fqns:
            self._fqns[name] = f"model.{next(iter(_get_fqns(self.model, name)))}"
        return self._fqns[name]

    def to_save(self) -> Parts:
        """Return all that a checkpoint holds: tensors, and by name the objects, which are still to be packed.

        The tensors are live: an update changes them. Buffers are copies, because the next forward may change them. An
        optimizer that has made no update has no state; creating it would count as one.
        """
        tensors, values = self._live()
        tensors |= {name: tensors[name].clone() for name in self.buffers & tensors.keys()}
        return tensors, {_VALUES: values, **{name: o.state_dict() for name, o in (self.others | self.random).items()}}

    def to_load(self, metadata: Metadata, checkpoint: str, same_world: bool) -> dict[str, Tensor]:
        """Return the tensors to load a checkpoint into; random states only if the number of ranks is the same.

        Objects that it does not have are left as they are.

        Raises:
            JobFailed: the checkpoint is of another model.
        """
        before = {*self.optimizer.state}
        if alike := self._alike(metadata.state_dict_metadata):  # making the others' state like one's is faster

            def one_of_each_dtype(params: list[Tensor]) -> list[Tensor]:
                largest_first = sorted(alike & {*params}, key=Tensor.numel, reverse=True)
                return [*{p.dtype: p for p in largest_first}.values()]

            self._prepare(one_of_each_dtype)
        state, _ = self.live()
        self._match_optimizer(state, metadata.state_dict_metadata)
        self._unread |= self.optimizer.state.keys() - before
        for name in [_VALUES, *self.others, *(self.random if same_world else ())]:
            saved = metadata.state_dict_metadata.get(name)
            if isinstance(saved, TensorStorageMetadata):
                state[name] = torch.empty(saved.size, dtype=torch.uint8, device="cpu")
            elif name in self.others and dist.get_rank() == 0:  # the program has added it since the save
                print(f"WARNING {checkpoint} has no {name.removeprefix('others.')}: it stays as it is", flush=True)
        trained = self._in_groups() | {p for p in self.model.parameters() if p.requires_grad}
        frozen = {prefix for prefix, p in self._parameters().items() if p not in trained}
        _check_same_model(state, metadata.state_dict_metadata, checkpoint, frozen)
        return state

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return the model's parameters by the prefix of their optimizer state's names."""
        return {_of_parameter(self._fqn(name)): p for name, p in self.model.named_parameters()}

    def _in_groups(self) -> set[Tensor]:
        """Return the optimizer's parameters."""
        return {p for group in self.optimizer.param_groups for p in group["params"]}

    def _alike(self, saved: Mapping[str, Any]) -> set[Tensor]:
        """Return the parameters that have optimizer state in a checkpoint.

        Returns none if any of it is neither a number nor a tensor of its parameter's shape.
        """
        parameters, there = self._parameters(), by_parameter(saved)
        for prefix, keys in there.items():
            shapes = {torch.Size(), torch.Size([1])}
            if prefix in parameters:
                shapes.add(parameters[prefix].shape)
            for key in keys:
                entry = saved[f"{prefix}.{key}"]
                if not isinstance(entry, TensorStorageMetadata) or entry.size not in shapes:
                    return set()
        return {p for prefix, p in parameters.items() if prefix in there and p.requires_grad}

    def _match_optimizer(self, state: dict[str, Tensor], saved: Mapping[str, Any]) -> None:
        """Have the optimizer hold state for exactly the parameters that have state in a checkpoint.

        Optimizers create it at a parameter's first gradient: one that had no gradient, or was frozen, has no state,
        and before the first update none has.
        """
        there, here = by_parameter(saved), by_parameter(state)
        if there and self._is_prepared and not any(self.optimizer.state.values()):
            return  # the state saved is another optimizer's
        states = self.optimizer.state.items()
        alike = {(p.dtype, k): v for p, one in states for k, v in one.items() if isinstance(v, Tensor)}
        in_groups = self._in_groups()
        for prefix, parameter in self._parameters().items():
            if prefix in here and prefix not in there:
                del self.optimizer.state[parameter]
                for key in here[prefix]:
                    del state[f"{prefix}.{key}"]
            elif prefix in there and parameter in in_groups:
                for key in {*there[prefix]} - {*here.get(prefix, ())}:  # some optimizers add a key after steps
                    entry, other = saved[f"{prefix}.{key}"], alike.get((parameter.dtype, key))
                    device = None if other is None else other.device  # counters of a fused optimizer are on the GPU
                    dtype = entry.properties.dtype if other is None else other.dtype  # it may differ from the saved one
                    like = parameter if entry.size == parameter.shape else torch.empty(entry.size, device=device)
                    made = torch.empty_like(like, dtype=dtype, requires_grad=False)
                    self.optimizer.state[parameter][key] = state[f"{prefix}.{key}"] = made

    def begin_anew(self) -> None:
        """Drop the optimizer's state that was made to be loaded into: nothing was loaded."""
        for parameter in self._unread & self.optimizer.state.keys():
            del self.optimizer.state[parameter]
        self._unread.clear()
        self._is_prepared = False

    def take(self, state: dict[str, Tensor]) -> None:
        """Take over the loaded tensors of `to_load`; those of model and optimizer were loaded in place."""
        self._unread.clear()
        self._put_back(_unpacked(state[_VALUES]) if _VALUES in state else {})
        for name, other in (self.others | self.random).items():
            if name in state:
                other.load_state_dict(_unpacked(state[name]))

    def _put_back(self, values: dict[str, Any]) -> None:
        """Set the values of model and optimizer that are not tensors."""
        extra = {name.removeprefix("model."): v for name, v in values.items() if name.startswith("model.")}
        if extra:
            set_model_state_dict(self.model, extra, options=StateDictOptions(strict=False))
        in_groups = self._in_groups()
        keys = {str(key): key for of_one in self.optimizer.state.values() for key in of_one}  # a key may be a number
        for prefix, parameter in self._parameters().items():
            of_one = {n.removeprefix(f"{prefix}."): v for n, v in values.items() if n.startswith(f"{prefix}.")}
            if of_one and parameter in in_groups:  # else it was frozen since the save
                self.optimizer.state[parameter].update({keys.get(n, n): v for n, v in of_one.items()})


class LiveState:
    """The state after a step, which a thread copies before the next update changes it."""

    def __init__(self, state: State):
        self.tensors, objects = state.to_save()
        self._objects = copy.deepcopy(objects)
        self._versions = {name: _version(tensor) for name, tensor in self.tensors.items() if not tensor.is_inference()}
        self._ready = torch.cuda.current_stream().record_event() if state.device.type == "cuda" else None

    def parts(self) -> dict[str, Tensor]:
        """Wait until a GPU has computed it, and return all of it as tensors by name.

        Raises:
            TypeError: a value is neither plain nor a tensor.
        """
        if self._ready is not None:
            self._ready.synchronize()
        return self.tensors | {name: _packed(name, value) for name, value in self._objects.items()}

    def changed(self) -> str:
        """Say which tensors have changed since this was made, by autograd's version counters; empty for none.

        Changes that bypass the counters, such as `p.data.mul_` and foreach operations on DTensors, are not detected.
        """
        changed = [name for name, version in self._versions.items() if _version(self.tensors[name]) != version]
        if not changed:
            return ""
        return f"{listed(changed, 3)} changed before the next optimizer step, while they were being copied"


def _version(tensor: Tensor) -> tuple[int, int]:
    return tensor._version, tensor._local_tensor._version if isinstance(tensor, DTensor) else 0


class Hyperparameters:
    """Values of an optimizer's groups besides parameters, from which schedulers compute the next rate.

    Also what its own `state_dict` adds, such as a step size for all parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        values: dict[str, Any] = {}
        if type(self.optimizer).state_dict is not torch.optim.Optimizer.state_dict:
            with suppress(NotImplementedError):  # some optimizers have values that differ per rank
                values = self.optimizer.state_dict()
        return {"groups": groups, "added": {k: v for k, v in values.items() if k not in ("state", "param_groups")}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: JobFailed if the optimizer has another number of groups."""
        here, there = self.optimizer.param_groups, state["groups"]
        if len(here) != len(there):
            raise JobFailed(
                f"the optimizer has {counted(len(here), 'group')} of parameters, and {len(there)} in the checkpoint: "
                "make the same groups before restore(), or use another run name"
            )
        for group, saved in zip(here, there, strict=True):
            group.update(saved)
        if added := state.get("added"):
            of_parameters = self.optimizer.state  # loaded as it was: torch's method would convert it
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": {}, **added})
            self.optimizer.state = of_parameters


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
        np.random.set_state(state["numpy"])
        random.setstate(state["python"])
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.device)


def split(state: dict[str, Any]) -> Parts:
    """Return the tensors of a state, and the rest."""
    values = {k: v for k, v in state.items() if not isinstance(v, Tensor) or k.endswith("_extra_state")}
    return {k: v for k, v in state.items() if k not in values}, values


def _is_in_parts(tensor: Tensor) -> bool:
    """Whether a tensor is sharded over ranks, not replicated on all."""
    return isinstance(tensor, DTensor) and any(
        placement.is_shard() and size > 1
        for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    )


def _packed(name: str, values: Any) -> Tensor:
    """Return a tensor of bytes; NumPy's numbers, which `_unpacked` refuses, become Python's.

    Raises:
        TypeError: some values could not be loaded: they are neither plain nor unsharded tensors.
    """
    if any(isinstance(value, Tensor) and _is_in_parts(value) for value in tree_leaves(values)):
        raise TypeError(f"{name} holds sharded tensors, and only one rank's parts would be saved: pass full_tensor()")
    file = io.BytesIO()
    try:
        torch.save(tree_map(lambda value: value.item() if isinstance(value, np.generic) else value, values), file)
        packed = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        _unpacked(packed)
    except Exception as e:
        raise TypeError(f"{name} holds more than plain values and tensors, and cannot be saved") from e
    return packed


def _of_parameter(name: str) -> str:
    """Return the prefix of the names of a parameter's optimizer state."""
    return f"{_OPTIM}{name.removeprefix('model.')}"


def parameter_of(name: str) -> str:
    """Return the name of the parameter that a tensor of an optimizer's state belongs to, if it does."""
    return f"model.{name.removeprefix(_OPTIM).rpartition('.')[0]}"


def by_parameter(names: Iterable[str]) -> dict[str, list[str]]:
    """Group the keys of an optimizer's state by parameter."""
    found: dict[str, list[str]] = {}
    for prefix, _, key in (name.rpartition(".") for name in names if name.startswith(_OPTIM)):
        found.setdefault(prefix, []).append(key)
    return found


def _unpacked(packed: Tensor) -> Any:
    """Raises: pickle.UnpicklingError for what is neither a plain value nor a tensor."""
    return torch.load(io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=True)


def _check_same_model(state: dict[str, Tensor], saved: dict[str, Any], checkpoint: str, frozen: set[str]) -> None:
    """Compare a state with a checkpoint's, on all ranks together, without optimizer state of `frozen` parameters.

    Raises:
        JobFailed: names up to five tensors that the checkpoint lacks, or has in another shape, or that no rank has.
    """
    here = {name: tuple(tensor.shape) for name, tensor in state.items()}
    there = {name: tuple(entry.size) for name, entry in saved.items() if isinstance(entry, TensorStorageMetadata)}
    wrong = [
        f"{name} is {there[name]} there and {shape} here" if name in there else f"{name} is not in it"
        for name, shape in here.items()
        if there.get(name) != shape
    ]
    lacking = {name for name in saved if name.startswith(("model.", "optim.")) and name not in here}
    of_frozen = {name for name in lacking if name.rpartition(".")[0] in frozen}
    by_rank = Ranks().gather(lacking - of_frozen)  # pipeline stages have their own parameters
    wrong += [f"{name} is not here" for name in saved if all(name in of_rank for of_rank in by_rank)]
    if wrong:
        kind = "optimizer" if all(name.startswith("optim.") for name in wrong) else "model"
        raise JobFailed(
            f"{checkpoint} is of another {kind}: {listed(wrong, separator='; ')}. "
            f"Use the {kind} as it was at the save, or another run name."
        )
    if of_frozen and dist.get_rank() == 0:
        what = counted(len(by_parameter(of_frozen)), "parameter")
        print(f"{checkpoint}: left out the optimizer state of {what}, now frozen", flush=True)
