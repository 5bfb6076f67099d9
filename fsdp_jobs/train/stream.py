"""A data set that is read as it comes: its own order, samples packed over documents, resumed by skipping.

Every rank reads and tokenizes the whole stream and keeps its positions, so samples are the same over any world.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from fsdp_jobs.config.schema import DataConfig
from fsdp_jobs.train.data import IGNORE, microbatches
from fsdp_jobs.train.sources import open_dataset, tokenized
from fsdp_jobs.train.tokenize import check_ids, tokenizer_of


class Stream:
    """The samples of a stream by position, in order: `seq_len` + 1 tokens each, over and over."""

    def __init__(self, data: DataConfig):
        self.data = data
        self.tokenize = tokenizer_of(data)

    def samples(self) -> Iterator[np.ndarray[tuple[int], np.dtype[np.int64]]]:
        """Epoch after epoch; what is left of an epoch's end is left out, as it is of a file's.

        Raises:
            BadInput: an id that is not below `data.vocab_size`, or less than a sample in a whole epoch.
        """
        length = self.data.seq_len
        while True:
            rest, seen = np.empty(0, dtype=np.int64), 0
            for document in tokenized(open_dataset(self.data), self.data, self.tokenize):
                ids = np.array(document, dtype=np.int64)
                check_ids(ids, self.data)
                rest = np.concatenate((rest, ids))
                while len(rest) > length:
                    yield rest[: length + 1]
                    rest, seen = rest[length:], seen + 1
            if not seen:
                raise ValueError(f"{self.data.path}: {len(rest)} tokens, one sample needs {length + 1}")

    def fingerprint(self) -> int:
        """A number that differs where the first sample does."""
        first = next(self.samples())
        return int.from_bytes(hashlib.blake2b(first.tobytes(), digest_size=7).digest(), "big")


class StreamBatches(IterableDataset[tuple[Tensor, Tensor]]):
    """This rank's microbatches of a stream from a position on.

    Each is (tokens, labels), both int64 [<= micro_batch, seq_len].
    """

    def __init__(self, stream: Stream, rank: int, world: int, first: int, steps: int):
        self.stream, self.rank, self.world, self.first, self.steps = stream, rank, world, first, steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        data = self.stream.data
        nothing = np.full(data.seq_len + 1, IGNORE)
        samples, position = self.stream.samples(), 0
        for step in range(self.steps):
            first = self.first + step * data.global_batch
            for wanted in microbatches(first, data, self.rank, self.world):
                rows = []
                for place in wanted:
                    while place >= 0 and position < place:
                        next(samples)
                        position += 1
                    rows.append(next(samples) if place >= 0 else nothing)
                    position += place >= 0
                both = torch.from_numpy(np.stack(rows))
                yield both[:, :-1].clamp(min=0), both[:, 1:].contiguous()
