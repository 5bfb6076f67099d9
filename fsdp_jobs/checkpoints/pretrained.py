"""Pretrained weights for a new run: safetensors, .pt and .bin files, or a folder that DCP wrote.

Every rank reads its own rows of each tensor only; of a .pt file, which is mapped into memory, the pages they are in.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from fsdp_jobs.checkpoints.storage import SafeReader, load_alone
from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.schema import HfConfig, JobConfig, LlamaConfig, ModelConfig
from fsdp_jobs.models.huggingface import folder_of, is_hf, transformers
from fsdp_jobs.models.shards import plain_name, rows_of

_PREFIXES = ("", "model.", "module.", "state_dict.", "model_state_dict.", "_orig_mod.")
_NO_WEIGHTS = ("optim", "lr_scheduler", "scheduler", "train_state", "dataloader", "rng", "scaler")
_QUERIES_AND_KEYS = re.compile(r"\b(wq|wk|q_proj|k_proj)\.(weight|bias)$")


class Source(ABC):
    """Tensors by name, of which each rank reads its own rows."""

    shapes: dict[str, tuple[int, ...]]

    @abstractmethod
    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Return rows [first, last) of a tensor; one without dimensions whole."""

    def fill(self, parameters: dict[str, DTensor]) -> None:
        """Copy into each parameter, by the source's names, what this rank holds of it."""
        for name, parameter in parameters.items():
            parameter.to_local().copy_(self.rows(name, *rows_of(parameter)))


class _Safetensors(Source):
    def __init__(self, files: list[Path]):
        self._files: dict[str, Any] = {}
        self.shapes = {}
        for file in files:
            opened: Any = safe_open(file, framework="pt")
            for name in opened.keys():  # noqa: SIM118 - no dictionary
                self._files[name] = opened
                self.shapes[name] = tuple(opened.get_slice(name).get_shape())

    def rows(self, name: str, first: int, last: int) -> Tensor:
        file = self._files[name]
        whole: Tensor = file.get_slice(name)[first:last] if self.shapes[name] else file.get_tensor(name)
        return whole


class _Pickled(Source):
    def __init__(self, files: list[Path]):
        self._tensors: dict[str, Tensor] = {}
        for file in files:
            try:
                content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
            except RuntimeError:  # torch's form from before 1.6 cannot be mapped
                content = torch.load(file, map_location="cpu", weights_only=True)
            self._tensors |= dict(_flat("", content))
        self.shapes = {n: tuple(t.shape) for n, t in self._tensors.items()}

    def rows(self, name: str, first: int, last: int) -> Tensor:
        tensor = self._tensors[name]
        return tensor[first:last] if tensor.ndim else tensor


class _Dcp(Source):
    def __init__(self, folder: Path):
        self.folder = folder
        entries = SafeReader(folder).read_metadata().state_dict_metadata
        self._entries = {n: e for n, e in entries.items() if isinstance(e, TensorStorageMetadata)}
        self.shapes = {n: tuple(e.size) for n, e in self._entries.items()}

    def rows(self, name: str, first: int, last: int) -> Tensor:
        whole = torch.empty(self.shapes[name], dtype=self._entries[name].properties.dtype)
        self._load({name: whole})
        return whole[first:last] if whole.ndim else whole

    def fill(self, parameters: dict[str, DTensor]) -> None:
        self._load(cast(dict[str, Tensor], parameters))

    def _load(self, state: dict[str, Tensor]) -> None:
        load_alone(self.folder, state)


def _flat(prefix: str, content: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dictionaries, names joined by dots."""
    for key, value in content.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
        elif isinstance(value, dict):
            yield from _flat(f"{prefix}{key}.", value)


def open_source(path: Path, key: str) -> Source:
    """Open a file or folder of weights; `key` is the setting that named it, for errors.

    Raises:
        BadInput: nothing there can be read.
    """
    if (path / ".metadata").is_file():
        return _Dcp(path)
    kinds: tuple[tuple[str, type[Any]], ...] = (
        ("*.safetensors", _Safetensors),
        ("*.bin", _Pickled),
        ("*.pt", _Pickled),
        ("*.pth", _Pickled),
    )
    for pattern, kind in kinds:
        files = [path] if path.is_file() and path.match(pattern) else sorted(path.glob(pattern))
        index = next(iter(path.glob(f"{pattern[2:]}.index.json")), None) or next(path.glob("*.index.json"), None)
        if len(files) > 1 and index is not None:  # a folder may hold the same weights twice
            named = {path / n for n in json.loads(index.read_text())["weight_map"].values()}
            files = [f for f in files if f in named] or files
        if files:
            source: Source = kind(files)
            return source
    what = "holds no .safetensors, .bin, .pt or .pth file and no DCP checkpoint" if path.exists() else "is not there"
    raise BadInput([Problem(f"{key}={path}", what, "a file of weights, or the folder they are in")])


def compare(model: nn.Module, config: JobConfig, source: Source) -> tuple[dict[str, str], list[str], list[str]]:
    """Compare names: the model's -> the source's; parameters missing in the source; tensors missing in the model."""
    # Tied weights have several names, and any of them will do.
    parameters = {plain_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}
    found, left_over = match(source.shapes, _shapes(model), config.init_key_map)
    missing = {p: n for n, p in reversed(parameters.items())}
    for name in found.keys() & parameters.keys():
        missing.pop(parameters[name], None)
    return found, list(missing.values())[::-1], left_over


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {plain_name(n): tuple(t.shape) for n, t in tensors}


def problems_of(model: nn.Module, config: JobConfig) -> list[Problem]:
    """List what keeps `init_from` from being this model's weights; the model may be on the meta device.

    Raises:
        BadInput: nothing there can be read.
    """
    assert config.init_from is not None
    source = open_source(Path(config.init_from), "init_from")
    found, missing, left_over = compare(model, config, source)
    where = f"init_from={config.init_from}"
    return [*_shape_problems(found, source.shapes, _shapes(model)), *_name_problems(where, missing, left_over)]


def load_initial(model: nn.Module, config: JobConfig) -> None:
    """Load the weights that the configuration names, if it names any, into a new run's model. Called by every rank.

    Raises:
        BadInput: tensors that are missing, left over, or of another shape, by name.
    """
    if config.init_from is not None:
        path, key = Path(config.init_from), "init_from"
        problems = problems_of(model, config)
        if problems:
            raise BadInput(problems)
    elif isinstance(config.model, HfConfig) and config.model.pretrained:
        path, key = folder_of(config.model), "model.name_or_path"
    else:
        return
    source = open_source(path, key)
    found, missing, left_over = compare(model, config, source)
    if missing:
        _by_transformers(model, config.model)
        return
    with torch.no_grad():
        _fill(model, config, source, found)
    if dist.get_rank() == 0:
        print(f"initial weights: {len(found)} tensors of {path}", flush=True)
        if left_over:
            print(f"not used: {_first(left_over)}", flush=True)


def _fill(model: nn.Module, config: JobConfig, source: Source, found: dict[str, str]) -> None:
    """Copy the matching tensors into buffers and this rank's part of parameters."""
    buffers = {plain_name(n): b for n, b in model.named_buffers()}
    width = _head_width(model, config) if config.init_rope == "interleaved" else 0
    as_they_are: dict[str, DTensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        name = plain_name(name)
        if name not in found:
            continue
        assert isinstance(parameter, DTensor)
        if width and _QUERIES_AND_KEYS.search(name):
            first, last = rows_of(parameter)
            whole = source.rows(found[name], 0, parameter.shape[0])
            parameter.to_local().copy_(_halves(whole, width)[first:last])
        else:
            as_they_are[found[name]] = parameter
    source.fill(as_they_are)
    for name in found.keys() & buffers.keys():
        buffers[name].copy_(source.rows(found[name], 0, buffers[name].shape[0] if buffers[name].ndim else 0))


def match(
    source: dict[str, tuple[int, ...]], model: dict[str, tuple[int, ...]], key_map: list[str]
) -> tuple[dict[str, str], list[str]]:
    """Match names: the model's -> the source's, and those of the source that match none.

    The source's names go through the key map first; then one common prefix is removed, or one of the model's added,
    whichever matches most.
    """
    rules = [entry.partition("=>") for entry in key_map]
    mapped: dict[str, str] = {}
    for name in source:
        new = name
        for pattern, _, replacement in rules:
            new = re.sub(pattern, replacement, new)
        if new:
            mapped[new] = name
    added = ["", *sorted({f"{n.partition('.')[0]}." for n in model})]
    pairs = [("", put) for put in added] + [(off, "") for off in _PREFIXES[1:]]

    def renamed(off: str, put: str) -> dict[str, str]:
        return {put + new.removeprefix(off): name for new, name in mapped.items() if new.startswith(off)}

    off, put = max(pairs, key=lambda pair: len(renamed(*pair).keys() & model.keys()))
    candidates = renamed(off, put)
    if put:  # only what lacks the prefix gets it
        candidates = {(new if new in model else put + new): name for new, name in mapped.items()}
    left_over = [name for new, name in candidates.items() if new not in model and not name.startswith(_NO_WEIGHTS)]
    return {new: name for new, name in candidates.items() if new in model}, left_over


def _shape_problems(
    found: dict[str, str], theirs: dict[str, tuple[int, ...]], ours: dict[str, tuple[int, ...]]
) -> Iterator[Problem]:
    for name, their_name in found.items():
        if theirs[their_name] != ours[name]:
            yield Problem(name, f"is {list(ours[name])} in the model and {list(theirs[their_name])} in the source")


def _name_problems(where: str, missing: list[str], left_over: list[str]) -> Iterator[Problem]:
    if missing:
        instead = "init_key_map=['REGEX=>REPLACEMENT'] turns its names into the model's"
        yield Problem(where, f"has nothing for {_first(missing)}", instead)
    if left_over:
        instead = "init_key_map=['^NAME$=>'] leaves a tensor out"
        yield Problem(where, f"holds more than the model has: {_first(left_over)}", instead)


def _first(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _head_width(model: Any, config: JobConfig) -> int:
    if isinstance(config.model, LlamaConfig):
        return config.model.dim // config.model.n_heads
    if is_hf(model):
        shape = model.config
        return int(getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads)
    raise BadInput([Problem("init_rope=interleaved", "is not supported for this model", "model=llama... or model=hf")])


def _halves(whole: Tensor, width: int) -> Tensor:
    """Reorder rows of a query or key projection whose rotated pairs are neighbours into pairs (i, i + width / 2)."""
    heads: Tensor = whole.unflatten(0, (-1, width // 2, 2))
    halves: Tensor = heads.transpose(1, 2).flatten(0, 2)
    return halves


def _by_transformers(model: nn.Module, config: ModelConfig) -> None:
    """Load weights whose layout differs from the model's: rank 0 has transformers read them, and sends them.

    Raises:
        BadInput: transformers does not find all of them either.
    """
    assert isinstance(config, HfConfig)
    state: dict[str, Any] = {}
    missing: list[Any] = [[]]
    if dist.get_rank() == 0:
        library = transformers().AutoModelForCausalLM
        whole, info = library.from_pretrained(config.name_or_path, dtype=torch.float32, output_loading_info=True)
        missing, state = [sorted(info["missing_keys"])], whole.state_dict()
    dist.broadcast_object_list(missing, src=0)
    if missing[0]:
        raise BadInput(list(_name_problems(f"model.name_or_path={config.name_or_path}", missing[0], [])))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
