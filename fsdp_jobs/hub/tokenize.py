"""Tokenize text once, with a tokenizer or a user's function, into a file that later runs read."""

from __future__ import annotations

import errno
import hashlib
import inspect
import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import numpy as np
from hydra.utils import get_method

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.schema import DataConfig
from fsdp_jobs.hub.huggingface import transformers
from fsdp_jobs.run.directory import user_name
from fsdp_jobs.run.files import lock, replacing

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges*", "special_tokens*", "*.model")
_AT_ONCE = 1 << 20  # tokens that are written at once
_LEFT_S = 86400.0  # an unfinished file that has not grown for so long was left by a killed process


@dataclass(frozen=True)
class Tokenize:
    """Turns one document into ids."""

    function: Callable[[Any], Iterable[int]]
    identity: str  # differs between functions that may return different ids
    takes_rows: bool = False  # a data set's whole rows, not only their text

    def __call__(self, document: Any) -> list[int]:
        return list(self.function(document))


def tokenizer_of(data: DataConfig) -> Tokenize:
    """Load `data.tokenize` or `data.tokenizer`, which adds its end-of-text token to each document.

    Raises:
        BadInput: there is no such function or tokenizer.
    """
    if data.tokenize is not None:
        try:
            function = get_method(data.tokenize)
            source = inspect.getsource(function)
        except (ImportError, AttributeError, ValueError, OSError, TypeError) as e:
            raise BadInput.at(f"data.tokenize={data.tokenize}", str(e), "my_package.my_module.function") from e
        return Tokenize(function, f"{data.tokenize} {source}", takes_rows=data.kind == "hf_dataset")
    if data.tokenizer == "bytes":
        return Tokenize(lambda text: text.encode("utf-8", errors="surrogateescape"), "bytes")
    where = f"data.tokenizer={data.tokenizer}"
    library = transformers(where)
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(data.tokenizer, trust_remote_code=False)
    except (OSError, ValueError) as e:
        raise BadInput.at(where, str(e).splitlines()[0], "bytes, a folder, or a name on the hub") from e
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] + end  # type: ignore[no-any-return]

    return Tokenize(ids, _identity(data.tokenizer))


def _identity(tokenizer: str) -> str:
    """Return a name on the hub, or a digest of a folder's contents."""
    folder = Path(tokenizer)
    if not folder.is_dir():
        return tokenizer
    files = sorted({f for pattern in _TOKENIZER_FILES for f in folder.glob(pattern) if f.is_file()})
    return hashlib.blake2b(b"".join(f.name.encode() + f.read_bytes() for f in files), digest_size=16).hexdigest()


def cached(data: DataConfig, identity: list[Any], documents: Iterable[list[int]]) -> Path:
    """Return the file with the tokens of all documents; one process per machine writes it, others wait.

    Raises:
        BadInput: an id is not below `data.vocab_size`; or this user may not use the folder as it is.
    """
    folder = cache_dir(data)
    text = json.dumps([identity, data.vocab_size], default=str)
    file = folder / f"{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}.bin"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            with _lock_of(file) as turn:
                lock(turn)
                if not file.exists():
                    _remove_unfinished(folder)
                    print(f"tokenizing {data.path} into {file}, once", flush=True)
                    with replacing(file) as part:
                        _write(part, data, documents)
        file.open("rb").close()
    except OSError as e:
        named = Path(str(e.filename))
        is_of_cache = named.parent == folder or folder.is_relative_to(named)
        if not is_of_cache or e.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        what = f"{named} cannot be used by {user_name()}: {e.strerror}"
        cure = f"another folder, or one that its owner shares with your group: chmod -R g+rwX {folder}"
        raise BadInput.at(f"data.cache_dir={folder}", what, cure) from e
    return file


def _lock_of(file: Path) -> IO[str]:
    """Open the lock file of a file; one that another user's process left can only be opened for reading."""
    path = file.with_name(f"{file.name}.lock")
    try:
        return path.open("a")
    except PermissionError:
        if not path.exists():
            raise
        return path.open()


def _remove_unfinished(folder: Path) -> None:
    for part in folder.glob(".*.bin.*.tmp"):
        with suppress(OSError):  # another user's, or just removed
            if time.time() - part.stat().st_mtime > _LEFT_S:
                part.unlink()


def cache_dir(data: DataConfig) -> Path:
    """Return the folder where tokens are kept between runs."""
    if data.cache_dir is not None:
        return Path(data.cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "fsdp_jobs", "tokens")


def cached_dtype(data: DataConfig) -> str:
    """Return the dtype of the tokens in a file of `cached`."""
    return "uint16" if data.vocab_size <= 1 << 16 else "uint32"


def _write(file: Path, data: DataConfig, documents: Iterable[list[int]]) -> None:
    tokens = chain.from_iterable(documents)
    with file.open("wb") as f:
        while len(ids := np.fromiter(islice(tokens, _AT_ONCE), dtype=np.int64)):
            check_ids(ids, data)
            f.write(ids.astype(cached_dtype(data)).data)  # `tofile` does not say why it fails
        os.fsync(f.fileno())


def check_ids(ids: np.ndarray[Any, Any], data: DataConfig) -> None:
    """Raises: BadInput when an id is not below `data.vocab_size`."""
    if len(ids) and not 0 <= ids.min() <= ids.max() < data.vocab_size:
        what = f"the tokens of {data.path} go from {ids.min()} to {ids.max()}"
        raise BadInput.at(f"data.vocab_size={data.vocab_size}", what, "the tokenizer's size")
