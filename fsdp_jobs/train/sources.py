"""Open the tokens that a configuration names, as one array of ids, memory-mapped if it is long.

A streamed data set is read in its own order, with samples packed across documents, and continued from its saved state.
Every rank reads and tokenizes the whole stream and keeps its positions, so samples are the same in any world.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from fsdp_jobs.config.data import text_files
from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.schema import DataConfig
from fsdp_jobs.hub.tokenize import Tokenize, cached, cached_dtype, check_ids, tokenizer_of
from fsdp_jobs.run.checksum import checksum
from fsdp_jobs.train.data import Samples, Tokens

_BLOCK = 1 << 20  # characters of a text file tokenized at once, up to the next end of a line
_FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


def open_samples(data: DataConfig, seed: int) -> Samples:
    """Open the samples of a configuration.

    Raises:
        OSError, ValueError, BadInput: as `open_tokens` does.
    """
    return Stream(data) if data.streaming else Samples(open_tokens(data), data.seq_len, seed)


def open_tokens(data: DataConfig) -> Tokens:
    """Open the tokens of a configuration, 1-D; a memory map if they are in a file.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: there are fewer tokens than one sample needs, or a file ends within a token.
        BadInput: a tokenizer or library is missing, or ids are beyond `data.vocab_size`.
    """
    if data.kind == "python_stdlib":
        tokens: Tokens = np.frombuffer(_stdlib_sources(), dtype=np.uint8)
    elif data.kind == "tokens":
        tokens = _map(Path(data.path or ""), data.token_dtype)
    elif data.kind == "synthetic":
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, data.vocab_size, size=data.tokens, dtype=np.uint32)
    else:
        tokenize = tokenizer_of(data)
        if data.kind == "text":
            files = text_files(data.path or "")
            identity: list[Any] = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
            documents: Iterator[list[int]] = map(tokenize, _texts(files))
        else:
            rows = open_dataset(data)
            identity = [data.path, data.subset, data.split, data.text_column, rows._fingerprint]
            documents = tokenized(rows, data, tokenize)
        tokens = _map(cached(data, [identity, tokenize.identity], documents), cached_dtype(data))
    if len(tokens) <= data.seq_len:
        raise ValueError(f"{data.path or data.kind}: {len(tokens)} tokens, one sample needs {data.seq_len + 1}")
    return tokens


def _map(file: Path, dtype_name: str) -> Tokens:
    dtype = np.dtype(dtype_name)
    size = file.stat().st_size
    if size % dtype.itemsize:
        raise ValueError(f"{file}: {size} bytes are not a whole number of {dtype_name} tokens")
    if size == 0:
        raise ValueError(f"{file}: the file is empty")
    return cast(Tokens, np.memmap(file, dtype=dtype, mode="r"))


def _stdlib_sources() -> bytes:
    """Read all .py files of the standard library in path order, without its tests and installed packages."""
    skip = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3"}
    files = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = [f for f in folders if f not in skip]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return b"\n".join(f.read_bytes() for f in sorted(files))


def _texts(files: list[Path]) -> Iterator[str]:
    """Yield the files' texts, a long file in blocks that end with a line."""
    for file in files:
        with file.open(encoding="utf-8", errors="surrogateescape", newline="") as f:
            while text := f.read(_BLOCK):
                yield text + (f.readline() if len(text) == _BLOCK else "")


def open_dataset(data: DataConfig) -> Any:
    """Open the data set of `data=hf_dataset`: a folder of save_to_disk, a file, or a name on the hub.

    Raises:
        BadInput: the library is missing, or there is no such split.
    """
    try:
        import datasets
    except ImportError as e:
        raise BadInput.at("data=hf_dataset", str(e), "pip install 'fsdp_jobs[hf]', on the nodes") from e
    path = Path(data.path or "")
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        saved = datasets.load_from_disk(str(path))
        if isinstance(saved, dict):
            if data.split not in saved:
                raise BadInput.at(f"data.split={data.split}", "does not exist", f"one of {', '.join(saved)}")
            saved = saved[data.split]
        return saved.to_iterable_dataset() if data.streaming else saved
    named = {"path": str(data.path), "name": data.subset}
    if path.is_file():
        if path.suffix not in _FORMATS:
            raise BadInput.at(f"data.path={path}", "not a known file format", f"one of {', '.join(_FORMATS)}")
        named = {"path": _FORMATS[path.suffix], "data_files": str(path)}
    return datasets.load_dataset(**named, split=data.split, streaming=data.streaming)


def tokenized(documents: Any, data: DataConfig, tokenize: Tokenize) -> Iterator[list[int]]:
    """Yield the documents' tokens, in order. A user's function gets whole rows, a tokenizer their text."""
    for row in documents:
        if not tokenize.takes_rows and data.text_column not in row:
            what = "the data set has no such column"
            raise BadInput.at(f"data.text_column={data.text_column}", what, f"one of {', '.join(row)}")
        yield tokenize(row if tokenize.takes_rows else row[data.text_column])


class Stream(Samples):
    """The samples of a stream in its order, epoch after epoch, from a mark or from its beginning.

    A mark holds what is needed to continue before a sample: the state of the data set after some documents, and the
    tokens left of these. Every rank reads the whole stream, so one rank's mark is good for all, in any world.
    """

    def __init__(self, data: DataConfig):
        self.data, self.seq_len, self.tokenize = data, data.seq_len, tokenizer_of(data)
        kind = [data.path, data.subset, data.split, data.text_column, self.seq_len, self.tokenize.identity]
        self._beginning: dict[str, Any] = {"of": str(kind), "position": 0, "documents": None, "rest": ""}
        self.mark = self._start = self._beginning
        self._reading, self._position = self._read(self._start), 0  # of the next sample

    def fingerprint(self) -> str:
        """Return a checksum that differs if the first sample does."""
        return checksum(next(self._read(self._beginning))[0].tobytes())

    def read_on(self, mark: dict[str, Any] | None) -> None:
        """Begin at the mark of a checkpoint; ignore one of another data set or tokenizer."""
        if mark is not None and mark["of"] == self._beginning["of"]:
            self.mark = self._start = mark
            self._position = -1  # read anew at the next sample

    def tokens_at(self, position: int) -> npt.NDArray[np.int64]:
        if not 0 <= self._position <= position:
            start = self._start if self._start["position"] <= position else self._beginning
            self._reading, self._position = self._read(start), start["position"]
        tokens, self.mark = next(islice(self._reading, position - self._position, None))
        self._position = position + 1
        return tokens

    def _read(self, mark: dict[str, Any]) -> Iterator[tuple[npt.NDArray[np.int64], dict[str, Any]]]:
        """Yield samples from a mark on, epoch after epoch, each with the newest mark before it.

        Tokens at an epoch's end that do not fill a sample are dropped.

        Raises:
            BadInput: an id is not below `data.vocab_size`.
            ValueError: a whole epoch has less than one sample.
        """
        position = mark["position"]
        while True:
            documents, before = open_dataset(self.data), position
            if mark["documents"] is not None:
                documents.load_state_dict(mark["documents"])
                before = -1  # this epoch has had samples
            rest = np.frombuffer(bytes.fromhex(mark["rest"]), dtype=np.uint32).astype(np.int64)
            for document in tokenized(documents, self.data, self.tokenize):
                ids = np.array(document, dtype=np.int64)
                check_ids(ids, self.data)
                rest = np.concatenate((rest, ids))
                while len(rest) > self.seq_len:
                    yield rest[: self.seq_len + 1], mark
                    rest, position = rest[self.seq_len :], position + 1
                if position > mark["position"]:
                    left, state = rest.astype(np.uint32).tobytes().hex(), documents.state_dict()
                    mark = {**self._beginning, "position": position, "documents": state, "rest": left}
            if position == before:
                raise ValueError(f"{self.data.path}: {len(rest)} tokens, one sample needs {self.seq_len + 1}")
            mark = {**self._beginning, "position": position}
