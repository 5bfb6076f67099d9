"""Export a checkpoint for other programs: safetensors in Hugging Face's layout, or one .pt file. No GPU.

Memory never holds more than the tensors of one output file (safetensors), or one copy of the model (.pt).
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fsdp_jobs.checkpoints import catalog
from fsdp_jobs.checkpoints.storage import SafeReader, load_alone
from fsdp_jobs.config.errors import BadInput, JobFailed
from fsdp_jobs.config.schema import HfConfig, JobConfig, LlamaConfig
from fsdp_jobs.hub.huggingface import SMALL_FILES, folder_of, transformers
from fsdp_jobs.models.llama import hf_config, hf_name
from fsdp_jobs.run.directory import RunDir, checkpoints_of
from fsdp_jobs.run.files import replacing, write_json

_FILE_BYTES = 5 * 2**30  # a safetensors file's size, at most (one larger tensor has a file of its own)


def export(run: RunDir, config: JobConfig, file_format: str, step: int | None, out: str | None) -> list[Path]:
    """Write the model of a checkpoint. Returns the files written.

    Args:
        file_format: "safetensors" (with `config.json` for a Llama or a model of transformers, so that transformers
            opens it, and the tokenizer's files if the model came with some) or "pt".
        step: of the checkpoint; None for the newest that is whole and whose replicas are not known to have differed.
        out: folder; None for `<run directory>/export`.

    Raises:
        BadInput: there is no such checkpoint.
        JobFailed: the checkpoint asked for is damaged.
    """
    folder = _choose(run, config, step)
    target = Path(out) if out is not None else run.export
    target.mkdir(parents=True, exist_ok=True)
    for left in target.glob(".model*.tmp"):  # by an export that was killed, maybe for its memory
        left.unlink(missing_ok=True)
    try:
        entries = SafeReader(folder).read_metadata().state_dict_metadata
    except FileNotFoundError as e:
        raise _unreadable(folder, e) from e
    saved = {n: e for n, e in entries.items() if n.startswith("model.") and isinstance(e, TensorStorageMetadata)}
    if file_format == "pt":
        file = target / "model.pt"
        _write_whole(file, partial(torch.save, _load(folder, saved)))
        return [file]
    groups, index_file = list(_by_file(saved)), target / "model.safetensors.index.json"
    index_file.unlink(missing_ok=True)  # of an earlier export: nothing may open its files and new ones together
    is_split = len(groups) > 1
    if is_split:
        (target / "model.safetensors").unlink(missing_ok=True)  # it would be opened first
    written: list[Path] = []
    file_of: dict[str, str] = {}
    for i, names in enumerate(groups, 1):
        tensors = _load(folder, {n: saved[n] for n in names})
        if isinstance(config.model, LlamaConfig):
            tensors = {hf_name(n): tensor for n, tensor in tensors.items()}
        file = target / ("model" + (f"-{i:05d}-of-{len(groups):05d}" if is_split else "") + ".safetensors")
        _write_whole(file, partial(save_file, tensors, metadata={"format": "pt"}))
        file_of |= dict.fromkeys(tensors, file.name)
        written.append(file)
    dtype = str(next(iter(saved.values())).properties.dtype).removeprefix("torch.")
    if is_split:
        written.append(index_file)
        total = {"total_size": sum(map(_bytes, saved.values()))}
        write_json(index_file, {"metadata": total, "weight_map": file_of})
    if isinstance(config.model, LlamaConfig):
        written.append(target / "config.json")
        write_json(written[-1], hf_config(config.model, config.data.seq_len, dtype))
    elif isinstance(config.model, HfConfig):
        written += _beside_weights(config.model, target, dtype)
    return written


def _write_whole(file: Path, write: Callable[[Path], object]) -> None:
    """Write to a temporary file, then rename it.

    Raises:
        JobFailed: it cannot be written; an older file stays.
    """
    try:
        with replacing(file) as part:
            part.touch()  # with this user's default permissions, which safetensors does not set
            mode = part.stat().st_mode
            write(part)
            part.chmod(mode)
    except (OSError, RuntimeError, SafetensorError) as e:  # each library's own error for a full disk
        raise JobFailed(f"{file} could not be written: {e}. Make room, or give another folder by --out.") from e


def _beside_weights(model: HfConfig, target: Path, dtype: str) -> list[Path]:
    """Copy a model's files besides weights: configuration, generation settings, tokenizer."""
    described = transformers().AutoConfig.from_pretrained(model.name_or_path, dtype=dtype, trust_remote_code=False)
    described.save_pretrained(target)
    written = [target / "config.json"]
    for file in sorted(folder_of(model, weights=False).iterdir()):
        is_other = file.name == "config.json" or file.name.endswith(".index.json")
        if any(map(file.match, SMALL_FILES)) and not is_other:
            shutil.copyfile(file, target / file.name)
            written.append(target / file.name)
    return written


def _choose(run: RunDir, config: JobConfig, step: int | None) -> Path:
    home = checkpoints_of(config.checkpoint, run)
    committed = catalog.find_checkpoints(home)
    if not committed and not config.cluster.shares_files:
        cure = f"copy them to {home} with the pod of deploy/kubernetes/reader.yaml, then repeat the command"
        raise BadInput.at(run.name, "its checkpoints are on the claim, not on this machine", cure)
    if step is not None:
        by_step = {catalog.step_of(folder): folder for folder in reversed(committed)}  # the newest save of a step
        if step not in by_step:
            others = f"one of {', '.join(map(str, by_step)) or 'none'}"
            raise BadInput.at(f"--step {step}", f"{run.name} has no such checkpoint", others)
        folder = by_step[step]
        if faults := catalog.verify(folder):
            raise JobFailed(f"{folder.name} is damaged: {'; '.join(faults)}")
        _warn_if_wrong(folder)
        return folder
    for folder in committed:
        if catalog.verify(folder) or _warn_if_wrong(folder):
            continue
        on_nodes = map(catalog.step_of, catalog.find_on_nodes(home, committed))
        if newer := [other for other in on_nodes if other > catalog.step_of(folder)]:
            what = f"step {newer[0]} is only on the nodes' own disks: resume {run.name} to have it copied"
            print(f"WARNING {what}", file=sys.stderr)
        return folder
    cure = "let it train longer, or save more often"
    if config.is_program:
        cure = "a script that does not use fsdp_jobs.job keeps its own checkpoints, where it saves them"
    raise BadInput.at(run.name, "has no whole checkpoint", cure)


def _warn_if_wrong(folder: Path) -> bool:
    """Return whether the replicas of a checkpoint are known to have differed, and then print it."""
    is_wrong = catalog.Manifest.read(folder).agreed is False
    if is_wrong:
        print(f"WARNING {folder.name}: one of the replicas that it was saved from was wrong", file=sys.stderr)
    return is_wrong


def _bytes(entry: TensorStorageMetadata) -> int:
    return int(entry.size.numel()) * entry.properties.dtype.itemsize


def _by_file(saved: dict[str, TensorStorageMetadata]) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, entry in saved.items():
        if names and size + _bytes(entry) > _FILE_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += _bytes(entry)
    yield names


def _load(folder: Path, entries: dict[str, TensorStorageMetadata]) -> dict[str, Tensor]:
    state = {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in entries.items()}
    try:
        load_alone(folder, state)
    except CheckpointException as e:
        ((error, _),) = e.failures.values()
        raise _unreadable(folder, error) from e
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


def _unreadable(folder: Path, error: BaseException) -> JobFailed:
    cure = "If its job has removed it, raise checkpoint.keep, or export once the job has ended"
    return JobFailed(f"{folder} cannot be read: {error}. {cure}.")
