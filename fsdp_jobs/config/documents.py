"""What ranks read besides the run directory, and what must hold of it before a job starts. No torch."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

from fsdp_jobs.config.errors import Problem
from fsdp_jobs.config.schema import DataConfig, HfConfig, JobConfig

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


def documents_problems(config: JobConfig, files: bool) -> Iterator[Problem]:
    """What is wrong with `data=text` and `data=hf_dataset`; without `files`, the data itself is not looked at."""
    data = config.data
    for library, wanted in (
        ("datasets", data.kind == "hf_dataset"),
        ("transformers", data.tokenize is None and data.tokenizer != "bytes"),
    ):
        if wanted and importlib.util.find_spec(library) is None:
            yield Problem(f"data={data.kind}", f"{library} is not installed", "pip install 'fsdp_jobs[hf]'")
    if data.streaming and data.kind != "hf_dataset":
        yield Problem("data.streaming=true", f"data={data.kind} is no stream", "data=hf_dataset")
    if files and data.path is None:
        yield Problem("data.path", f"data={data.kind} has to be told what to read", "data.path=PATH")
    elif files and config.cluster.shares_files and data.path is not None:
        there = text_files(data.path) if data.kind == "text" else Path(data.path).exists()
        on_hub = data.kind == "hf_dataset" and _HUB_NAME.fullmatch(data.path)
        if not there and not on_hub:
            instead = "a file, a folder or a glob" if data.kind == "text" else "a folder, a file or a name on the hub"
            yield Problem(f"data.path={data.path}", "there is no such file", instead)
    yield from _tokenizer(data)


def inputs_of(config: JobConfig) -> Iterator[Path]:
    """Files and folders of this machine that ranks read: data, tokenizer, weights. Not what is on the hub."""
    data = config.data
    named = [data.path if data.kind in ("tokens", "text", "hf_dataset") else None, config.init_from]
    if data.kind in ("text", "hf_dataset") and data.tokenizer != "bytes":
        named.append(data.tokenizer)
    if isinstance(config.model, HfConfig):
        named.append(config.model.name_or_path)
    for path in map(Path, filter(None, named)):
        glob = next((i for i, part in enumerate(path.parts) if set(part) & set("*?[")), None)
        whole = Path(*path.parts[:glob])
        if whole.exists() and whole != Path():
            yield whole


def text_files(path: str) -> list[Path]:
    """The files that a path names, in path order: itself, all of a folder's, or those that match it as a glob."""
    named = Path(path)
    if named.is_file():
        return [named]
    found = named.rglob("*") if named.is_dir() else Path(named.anchor).glob(str(named.relative_to(named.anchor)))
    return sorted(f for f in found if f.is_file())


def _tokenizer(data: DataConfig) -> Iterator[Problem]:
    if data.tokenize is not None:
        package = data.tokenize.partition(".")[0]
        if "." not in data.tokenize or (package not in ("", ".") and importlib.util.find_spec(package) is None):
            yield Problem(f"data.tokenize={data.tokenize}", "cannot be imported", "my_package.my_module.function")
        return
    where, ids = f"data.tokenizer={data.tokenizer}", 256
    if data.tokenizer != "bytes":
        folder = Path(data.tokenizer)
        if not folder.is_dir():
            if not _HUB_NAME.fullmatch(data.tokenizer):
                yield Problem(where, "there is no such folder", "bytes, a folder, or a name on the hub")
            return
        if not any(folder.glob("*token*")) and not any(folder.glob("*.model")):
            yield Problem(where, "the folder holds no tokenizer", "a folder with tokenizer.json")
            return
        if not (folder / "tokenizer.json").is_file():
            return
        ids = _ids((folder / "tokenizer.json").read_text())
    if ids > data.vocab_size:
        yield Problem(f"data.vocab_size={data.vocab_size}", f"{where} has {ids} ids", f"data.vocab_size={ids}")


def _ids(tokenizer: str) -> int:
    """One more than the highest id of a tokenizer.json."""
    content = json.loads(tokenizer)
    vocabulary = content.get("model", {}).get("vocab", {})
    own: int = len(vocabulary) if isinstance(vocabulary, list) else max(vocabulary.values(), default=-1) + 1
    return max([own, *(int(t["id"]) + 1 for t in content.get("added_tokens", []))])
