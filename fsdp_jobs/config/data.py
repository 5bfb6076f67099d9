"""Validate the group `data`: the files, data sets and tokenizers that ranks read. No torch."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from fsdp_jobs.config.errors import Problem
from fsdp_jobs.config.schema import DataConfig, HfConfig, JobConfig

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_TOKEN_BYTES = {"uint16": 2, "uint32": 4}
_TOKENIZED = ("text", "hf_dataset")
READ_FROM_PATH = ("tokens", *_TOKENIZED)


def data_problems(config: JobConfig, files: bool, shares_files: bool) -> Iterator[Problem]:
    """Check the keys of `data` against each other and against the model; with `files`, the data itself."""
    data, vocab = config.data, getattr(config.model, "vocab_size", 0)
    if data.kind in READ_FROM_PATH and files:
        if data.path is None:
            yield Problem("data.path", f"data={data.kind} needs to know what to read", "data.path=PATH")
        elif shares_files:
            yield from (_token_file if data.kind == "tokens" else _documents)(data, data.path)
    if data.kind == "synthetic" and data.tokens <= data.seq_len:
        yield Problem(f"data.tokens={data.tokens}", f"one sample needs {data.seq_len + 1}")
    if data.kind in _TOKENIZED:
        yield from _libraries(data)
        yield from _tokenizer(data)
    if vocab and data.vocab_size > vocab:
        what = f"token ids go up to {data.vocab_size - 1}, the model has a vocabulary of {vocab}"
        yield Problem(f"data.vocab_size={data.vocab_size}", what, "a larger model.vocab_size, or other data")


def input_paths(config: JobConfig) -> Iterator[Path]:
    """Yield the files and folders of this machine that ranks read: data, tokenizer, weights; not names on the hub."""
    data = config.data
    named = [data.path if data.kind in READ_FROM_PATH else None, config.init_from]
    if data.kind in _TOKENIZED and data.tokenizer != "bytes":
        named.append(data.tokenizer)
    if isinstance(config.model, HfConfig):
        named.append(config.model.name_or_path)
    for path in map(Path, filter(None, named)):
        glob = next((i for i, part in enumerate(path.parts) if set(part) & set("*?[")), None)
        whole = Path(*path.parts[:glob])
        if whole.exists() and whole != Path():
            yield whole


def text_files(path: str) -> list[Path]:
    """Return the files of a path, sorted: the path itself, all files in it, or those that match it as a glob.

    Raises:
        OSError: a folder cannot be listed; `rglob` would pass over it, since Python 3.12.
    """
    named = Path(path)
    if named.is_file():
        return [named]
    if named.is_dir():
        walked = os.walk(named, onerror=_unless_closed)
        matches = (Path(folder, name) for folder, _, names in walked for name in names)
    else:
        matches = Path(named.anchor).glob(str(named.relative_to(named.anchor)))
    return sorted(f for f in matches if f.is_file() and _dots(f) == _dots(named))


def _dots(path: Path) -> int:
    """Count the hidden names of a path: what is hidden in a folder is no text, but of systems and editors."""
    return sum(name.startswith(".") for name in path.parts)


def _unless_closed(error: OSError) -> None:
    """Pass over a folder that is closed to this user, such as a disk's lost+found."""
    if not isinstance(error, PermissionError):
        raise error


def _token_file(data: DataConfig, name: str) -> Iterator[Problem]:
    where, path = f"data.path={name}", Path(name)
    if not path.is_file():
        yield Problem(where, "there is no such file", "data.path=FILE of token ids")
        return
    if data.token_dtype not in _TOKEN_BYTES:
        return  # reported at the key
    width = _TOKEN_BYTES[data.token_dtype]
    tokens, rest = divmod(path.stat().st_size, width)
    if tokens <= data.seq_len:
        what = f"holds {tokens} tokens of {data.token_dtype}; one sample needs {data.seq_len + 1}"
        yield Problem(where, what, "a longer file, or a smaller data.seq_len")
    elif rest:
        what = f"its size is not a whole number of {data.token_dtype} tokens"
        yield Problem(where, what, "data.token_dtype=uint16 or uint32, as it was written")
    elif (highest := _highest_token(path, data.token_dtype)) is None:
        yield Problem(where, "is not readable by your user", "chmod u+r, or another file")
    elif highest >= data.vocab_size:
        what = f"{path} holds token id {highest}"
        yield Problem(f"data.vocab_size={data.vocab_size}", what, "the tokenizer's size, or another token_dtype")


def _highest_token(path: Path, dtype: str) -> int | None:
    """Return the highest id in 64 stretches spread over a token file; None without permission to read it."""
    import numpy as np

    try:
        tokens = np.memmap(path, dtype=np.dtype(dtype), mode="r")
    except OSError:
        return None
    starts = np.linspace(0, max(0, len(tokens) - 4096), 64, dtype=np.int64)
    return max(int(tokens[s : s + 4096].max()) for s in starts)


def _documents(data: DataConfig, path: str) -> Iterator[Problem]:
    if data.kind == "text" and not text_files(path):
        yield Problem(f"data.path={path}", "there is no such file", "a file, a folder or a glob")
    elif data.kind == "hf_dataset" and not Path(path).exists() and not HUB_NAME.fullmatch(path):
        yield Problem(f"data.path={path}", "there is no such file", "a folder, a file or a name on the hub")


def _libraries(data: DataConfig) -> Iterator[Problem]:
    needed = {
        "datasets": data.kind == "hf_dataset",
        "transformers": data.tokenize is None and data.tokenizer != "bytes",
    }
    for library, is_needed in needed.items():
        if is_needed and importlib.util.find_spec(library) is None:
            yield Problem(f"data={data.kind}", f"{library} is not installed", "pip install 'fsdp_jobs[hf]'")
    if data.streaming and data.kind != "hf_dataset":
        yield Problem("data.streaming=true", f"data={data.kind} cannot be streamed", "data=hf_dataset")


def _tokenizer(data: DataConfig) -> Iterator[Problem]:
    where, folder, ids = f"data.tokenizer={data.tokenizer}", Path(data.tokenizer), 0
    if data.tokenize is not None:
        package = data.tokenize.partition(".")[0]
        if "." not in data.tokenize or (package not in ("", ".") and importlib.util.find_spec(package) is None):
            yield Problem(f"data.tokenize={data.tokenize}", "cannot be imported", "my_package.my_module.function")
    elif data.tokenizer == "bytes":
        ids = 256
    elif not folder.is_dir():
        if not HUB_NAME.fullmatch(data.tokenizer):
            yield Problem(where, "there is no such folder", "bytes, a folder, or a name on the hub")
    elif (folder / "tokenizer.json").is_file():
        ids = _number_of_ids((folder / "tokenizer.json").read_text())
    elif not any(folder.glob("*token*")) and not any(folder.glob("*.model")):
        yield Problem(where, "the folder holds no tokenizer", "a folder with tokenizer.json")
    if ids > data.vocab_size:
        yield Problem(f"data.vocab_size={data.vocab_size}", f"{where} has {ids} ids", f"data.vocab_size={ids}")


def _number_of_ids(tokenizer: str) -> int:
    """Return one more than the highest id of a tokenizer.json."""
    content = json.loads(tokenizer)
    vocabulary = content.get("model", {}).get("vocab", {})
    own: int = len(vocabulary) if isinstance(vocabulary, list) else max(vocabulary.values(), default=-1) + 1
    return max([own, *(int(t["id"]) + 1 for t in content.get("added_tokens", []))])
