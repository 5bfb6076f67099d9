"""The samples of this rank, read ahead, in an order that is a function of only (seed, epoch, index).

A position counts samples since the start of the run, over epochs and over all ranks. The sample at a position
and the positions of a step do not depend on the world: a resume with any number of ranks continues exactly
where the checkpoint left off.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from fsdp_jobs.checkpoints.ranks import Ranks
from fsdp_jobs.config.errors import JobFailed
from fsdp_jobs.config.schema import DataConfig
from fsdp_jobs.job.sampler import begin_worker, own_positions, sample_at
from fsdp_jobs.run.checksum import checksum

Tokens = npt.NDArray[np.unsignedinteger]

IGNORE = -100  # label of a token that does not count, as in cross_entropy's ignore_index


def microbatches(first: int, data: DataConfig, rank: int, world: int) -> list[list[int]]:
    """Return this rank's positions of one step, cut into microbatches: the same number on every rank.

    `first` is the step's first position. A rank with fewer samples than another gets lists padded by -1,
    which stands for a sample that does not count.
    """
    most = -(-data.global_batch // world)  # of any rank
    positions = list(own_positions(first, data.global_batch, rank, world))
    positions += [-1] * (most - len(positions))
    return [positions[i : i + data.micro_batch] for i in range(0, most, data.micro_batch)]


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Map positions to (tokens, labels), each int64 [seq_len]; labels are the tokens that follow.

    The sample at a negative position does not count.
    """

    mark: dict[str, Any] | None = None  # of a stream: where to continue after what `batches` has yielded

    def __init__(self, tokens: Tokens, seq_len: int, seed: int):
        self.tokens, self.seq_len, self.seed = tokens, seq_len, seed
        self.samples = (len(tokens) - 1) // seq_len

    def fingerprint(self) -> str:
        """Return a checksum that differs if the data does, of the length and 64 spread-out stretches."""
        count = len(self.tokens)
        starts = np.linspace(0, max(0, count - 1024), 64, dtype=np.int64)
        stretches = (self.tokens[start : start + 1024].tobytes() for start in starts)
        return checksum(b"".join([str(count).encode(), *stretches]))

    def tokens_at(self, position: int) -> npt.NDArray[np.int64]:
        """Return a sample's tokens and the one that follows."""
        start = sample_at(position, self.samples, self.seed) * self.seq_len
        return self.tokens[start : start + self.seq_len + 1].astype(np.int64)

    def read_on(self, mark: dict[str, Any] | None) -> None:
        """Begin where a checkpoint's stream was; only streams need this."""

    def collate(self, rows: list[tuple[Tensor, Tensor]]) -> tuple[Any, ...]:
        """Return a microbatch, in the reading process: tokens, labels, and the mark after it."""
        return (*default_collate(rows), self.mark)

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        tokens = np.full(self.seq_len + 1, IGNORE) if position < 0 else self.tokens_at(position)
        both = torch.from_numpy(tokens)
        return both[:-1].clamp(min=0), both[1:]


def check_same_data(samples: Samples, data: DataConfig) -> None:
    """Compare the data of all ranks.

    Raises:
        JobFailed: a rank reads other data than rank 0.
    """
    fingerprints = Ranks().gather(samples.fingerprint())
    others = [rank for rank, other in enumerate(fingerprints) if other != fingerprints[0]]
    if others:
        raise JobFailed(f"ranks {others} read other data than rank 0: is {data.kind} the same on all nodes?")


def batches(
    samples: Samples, data: DataConfig, rank: int, world: int, first: int, steps: int, pin: bool
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield this rank's microbatches, read ahead, for each of `steps` optimizer steps from position `first`.

    A microbatch is (tokens, labels), each int64 [<= micro_batch, seq_len]. A stream has one reading process at most.
    """
    workers = min(1, data.workers) if data.streaming else data.workers
    positions = (microbatches(first + step * data.global_batch, data, rank, world) for step in range(steps))
    loader = DataLoader(
        samples,
        batch_sampler=chain.from_iterable(positions),
        collate_fn=samples.collate,
        num_workers=workers,
        prefetch_factor=data.prefetch if workers else None,
        pin_memory=pin,
        generator=torch.Generator(),  # else the loader draws its seed from the generator that a restore has set
        # Forked from the rank, and killed with it. (A rank's own default would be to start a second fork server,
        # which imports torch once more.)
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=begin_worker,
    )
    per_step = len(microbatches(0, data, rank, world))
    stream = iter(loader)
    for _ in range(steps):
        read = [next(stream) for _ in range(per_step)]
        samples.mark = read[-1][2]
        yield [(tokens, labels) for tokens, labels, _ in read]
