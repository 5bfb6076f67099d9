"""Pretrained weights for a new run: safetensors, .pt and .bin files, or a folder that DCP wrote.

Every rank reads only its own part of each tensor: a .pt file is mapped into memory for that.
"""

from __future__ import annotations

import json
import pickle
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from fsdp_jobs.checkpoints.catalog import METADATA
from fsdp_jobs.checkpoints.ranks import Ranks
from fsdp_jobs.checkpoints.storage import SafeReader, load_alone
from fsdp_jobs.checkpoints.tensors import local
from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.keys import dotted
from fsdp_jobs.config.schema import HfConfig, JobConfig, LlamaConfig, ModelConfig
from fsdp_jobs.hub.huggingface import folder_of, is_hf, transformers
from fsdp_jobs.models.llama import hf_name
from fsdp_jobs.models.weights import copy_local_part, plain_name, weights_of
from fsdp_jobs.run.table import listed

_PREFIXES = ("model.", "module.", "state_dict.", "model_state_dict.", "_orig_mod.")
_NO_WEIGHTS = ("optim", "lr_scheduler", "scheduler", "train_state", "dataloader", "rng", "scaler")
_QUERIES_AND_KEYS = re.compile(r"\b(wq|wk|q_proj|k_proj)\.(weight|bias)$")


_Tensors = tuple[dict[str, tuple[int, ...]], Callable[[dict[str, Tensor]], None]]  # shapes, and their reader


@dataclass(frozen=True)
class Source:
    """Tensors by name, matched with the model that they fill."""

    shapes: dict[str, tuple[int, ...]]
    fill: Callable[[dict[str, Tensor]], None]  # copies this rank's parts into tensors, by the source's names
    found: dict[str, str]  # the model's names -> the source's
    missing: list[str]  # parameters of the model that the source lacks
    left_over: list[str]  # tensors that the model lacks


def _of_files(files: list[Path]) -> _Tensors:
    tensors: dict[str, Any] = {}
    for file in files:
        if file.suffix == ".safetensors":
            opened: Any = safe_open(file, framework="pt")
            tensors |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a dictionary
        else:
            tensors |= _of_pickle(file)

    def fill(targets: dict[str, Tensor]) -> None:
        for name, target in targets.items():
            copy_local_part(target, tensors[name])

    return {n: tuple(t.shape if isinstance(t, Tensor) else t.get_shape()) for n, t in tensors.items()}, fill


def _of_pickle(file: Path) -> dict[str, Any]:
    try:
        content = _loaded(file)
    except (pickle.UnpicklingError, IndexError, EOFError, RuntimeError) as e:
        why = (str(e) or type(e).__name__).splitlines()[0]
        raise BadInput.at(str(file), f"cannot be read: {why}", "a whole file that holds tensors only") from e
    if not isinstance(content, dict):
        raise BadInput.at(str(file), f"holds a {type(content).__name__}", "a dictionary of tensors")
    return {name: value for name, value in dotted(content) if isinstance(value, Tensor)}


def _loaded(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except RuntimeError:  # torch's format before 1.6 cannot be mapped
        return torch.load(file, map_location="cpu", weights_only=True)


def _open(path: Path, key: str) -> _Tensors:
    """Open a file or folder of weights; `key` is the setting that named it, for errors.

    Raises:
        BadInput: nothing there can be read.
    """
    if (path / METADATA).is_file():
        entries = SafeReader(path).read_metadata().state_dict_metadata
        shapes = {n: tuple(e.size) for n, e in entries.items() if isinstance(e, TensorStorageMetadata)}
        return shapes, partial(load_alone, path)
    for pattern in ("[!.]*.safetensors", "[!.]*.bin", "[!.]*.pt", "[!.]*.pth"):
        files = [path] if path.is_file() and path.match(pattern) else sorted(path.glob(pattern))
        files = [f for f in files if f.name != "training_args.bin"]  # of transformers' Trainer
        index = next(path.glob(f"{pattern}.index.json"), None)
        if len(files) > 1 and index is not None:  # a folder may hold the same weights twice
            named = {path / n for n in json.loads(index.read_text())["weight_map"].values()}
            files = [f for f in files if f in named] or files
        if files:
            return _of_files(files)
    what = "holds no .safetensors, .bin, .pt or .pth file and no DCP checkpoint" if path.exists() else "is not there"
    raise BadInput.at(f"{key}={path}", what, "a file of weights, or the folder they are in")


def open_source(model: nn.Module, config: JobConfig, path: Path, key: str) -> Source:
    """Open a file or folder of weights, named by the setting `key`, and match its names with the model's.

    Raises:
        BadInput: nothing there can be read.
    """
    (shapes, fill), weights = _open(path, key), weights_of(model)
    in_hf = {hf_name(name): name for name in weights} if isinstance(config.model, LlamaConfig) else {}
    found, left_over = match(shapes, weights.keys(), config.init_key_map, in_hf)
    filled = {id(weights[name]) for name in found}  # tied weights have several names, and any of them will do
    missing = [plain_name(n) for n, p in model.named_parameters() if id(p) not in filled]
    return Source(shapes, fill, found, missing, left_over)


def problems_of(model: nn.Module, config: JobConfig, source: Source | None = None) -> list[Problem]:
    """List why `init_from` cannot be this model's weights; the model may be on the meta device.

    Raises:
        BadInput: nothing there can be read.
    """
    source = source or open_source(model, config, Path(config.init_from or ""), "init_from")
    weights = weights_of(model)
    shapes = [(name, list(weights[name].shape), list(source.shapes[own])) for name, own in source.found.items()]
    wrong = [Problem(n, f"is {ours} in the model and {its} in the source") for n, ours, its in shapes if ours != its]
    return [*wrong, *_name_problems(f"init_from={config.init_from}", source.missing, source.left_over)]


def load_initial(model: nn.Module, config: JobConfig) -> None:
    """Load the weights that the configuration names, if any, into a new run's model. All ranks call it.

    Raises:
        BadInput: tensors are missing, left over, of another shape, or differ where the model ties them; names them.
    """
    if config.init_from is not None:
        path, key = Path(config.init_from), "init_from"
    elif isinstance(config.model, HfConfig) and config.model.pretrained:
        path, key = folder_of(config.model), "model.name_or_path"
    else:
        return
    source = open_source(model, config, path, key)
    if config.init_from is not None and (problems := problems_of(model, config, source)):
        raise BadInput(problems)
    if source.missing:
        _by_transformers(model, config.model)
        return
    weights = weights_of(model)
    targets = {name: weights[own] for own, name in source.found.items()}
    with torch.no_grad():
        source.fill(targets)
    if config.init_from is not None:
        _check_tied(source, targets)
    if config.init_rope == "interleaved":
        _reorder_rotated_rows(model, config)
    if dist.get_rank() == 0:
        print(f"initial weights: {len(source.found)} tensors of {path}", flush=True)
        if source.left_over:
            print(f"not used: {listed(source.left_over)}", flush=True)


def _check_tied(source: Source, targets: dict[str, Tensor]) -> None:
    """Raises: BadInput if the source has different values for what is one tensor in the model."""
    held = Counter(map(id, targets.values()))
    copies = {name: torch.empty_like(target) for name, target in targets.items() if held[id(target)] > 1}
    if not copies:
        return
    with torch.no_grad():
        source.fill(copies)
    if any(not torch.equal(local(copy), local(targets[name])) for name, copy in copies.items()):
        what = "are one tensor in this model, and differ in the source"
        raise BadInput.at(f"init_from: {listed([*copies])}", what, "model.tie_embeddings=false")


def match(
    source: Iterable[str], model: Collection[str], key_map: list[str], in_hf: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Match names: the model's -> the source's, and those of the source that match none.

    The key map is applied to the source's names first. Then names that the model lacks lose a common prefix, get one of
    the model's, or are translated from transformers' (`in_hf`: theirs -> the model's): whichever matches most names.
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
    pairs = [("", put) for put in added] + [(off, "") for off in _PREFIXES]

    def renamed(off: str, put: str) -> dict[str, str]:
        with_off = {new: name for new, name in mapped.items() if new.startswith(off)}
        return {new if new in model else put + new.removeprefix(off): name for new, name in with_off.items()}

    ways = [*(renamed(*pair) for pair in pairs), {in_hf.get(new, new): name for new, name in mapped.items()}]
    candidates = max(ways, key=lambda names: len(names.keys() & set(model)))
    left_over = [name for new, name in candidates.items() if new not in model and not name.startswith(_NO_WEIGHTS)]
    return {new: name for new, name in candidates.items() if new in model}, left_over


def _name_problems(where: str, missing: list[str], left_over: list[str]) -> Iterator[Problem]:
    if missing:
        instead = "init_key_map=['REGEX=>REPLACEMENT'] turns its names into the model's"
        yield Problem(where, f"has nothing for {listed(missing)}", instead)
    if left_over:
        instead = "init_key_map=['^NAME$=>'] leaves a tensor out"
        yield Problem(where, f"holds more than the model has: {listed(left_over)}", instead)


def _head_width(model: Any, config: JobConfig) -> int:
    if isinstance(config.model, LlamaConfig):
        return config.model.dim // config.model.n_heads
    if is_hf(model):
        shape = model.config
        return int(getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads)
    raise BadInput.at("init_rope=interleaved", "is not supported for this model", "model=llama... or model=hf")


def _reorder_rotated_rows(model: nn.Module, config: JobConfig) -> None:
    """Reorder queries and keys from rotated neighbours into pairs (i, i + width / 2) of each head."""
    width = _head_width(model, config)
    for name, parameter in model.named_parameters():
        if _QUERIES_AND_KEYS.search(plain_name(name)):
            assert isinstance(parameter, DTensor)
            pairs = parameter.full_tensor().detach().unflatten(0, (-1, width // 2, 2))
            copy_local_part(parameter, pairs.transpose(1, 2).flatten(0, 2))


def _by_transformers(model: nn.Module, config: ModelConfig) -> None:
    """Load weights whose layout differs from the model's: rank 0 reads them with transformers and sends them.

    Raises:
        BadInput: transformers does not find all of them either.
    """
    assert isinstance(config, HfConfig)
    state: dict[str, Any] = {}
    missing: list[str] = []
    if dist.get_rank() == 0:
        library = transformers().AutoModelForCausalLM
        whole, info = library.from_pretrained(
            config.name_or_path,
            dtype=torch.float32,
            output_loading_info=True,
            weights_only=True,
            trust_remote_code=False,
        )
        missing, state = sorted(info["missing_keys"]), whole.state_dict()
    if missing := Ranks().from_rank_0(lambda: missing):
        raise BadInput(list(_name_problems(f"model.name_or_path={config.name_or_path}", missing, [])))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
