"""Token stores, and the order in which samples are seen: a function of (seed, epoch, index) alone.

A position counts samples since the start of the run, over epochs and over all ranks. Which sample is at a
position, and which positions make up a step, does not depend on the world: a resume with any number of ranks
goes on exactly where the checkpoint left off.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fsdp_jobs.config import DataConfig
from fsdp_jobs.processes import die_with_parent

IGNORE = -100  # label of a token that does not count, as in cross_entropy's ignore_index

Tokens = npt.NDArray[np.unsignedinteger]


def open_tokens(data: DataConfig) -> Tokens:
    """The token stream of a configuration, 1-D; a memory map where it is a file.

    Raises:
        OSError: a file that is not there or cannot be read.
        ValueError: fewer tokens than one sample needs, or a size that is no multiple of the token's.
    """
    if data.kind == "python_stdlib":
        tokens: Tokens = np.frombuffer(_stdlib_sources(), dtype=np.uint8)
    elif data.kind == "tokens":
        dtype = np.dtype(data.token_dtype)
        size = Path(data.path or "").stat().st_size
        if size % dtype.itemsize:
            raise ValueError(f"{data.path}: {size} bytes are no whole number of {data.token_dtype} tokens")
        if size == 0:
            raise ValueError(f"{data.path}: the file is empty")
        tokens = np.memmap(cast(str, data.path), dtype=dtype, mode="r")
    else:
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, data.vocab_size, size=data.tokens, dtype=np.uint32)
    if len(tokens) <= data.seq_len:
        raise ValueError(f"{data.path or data.kind}: {len(tokens)} tokens, one sample needs {data.seq_len + 1}")
    return tokens


def _stdlib_sources() -> bytes:
    """All .py files of the standard library, in path order, without its tests and what others installed there."""
    skip = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3"}
    files = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = [f for f in folders if f not in skip]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return b"\n".join(f.read_bytes() for f in sorted(files))


def fingerprint(tokens: Tokens) -> int:
    """A number that differs where the data differs: from the length and 64 spread-out stretches."""
    digest = hashlib.blake2b(str(len(tokens)).encode(), digest_size=7)
    for start in np.linspace(0, max(0, len(tokens) - 1024), 64, dtype=np.int64):
        digest.update(np.ascontiguousarray(tokens[start : start + 1024]).tobytes())
    return int.from_bytes(digest.digest(), "big")


def sample_at(position: int, samples: int, seed: int) -> int:
    """The sample at a position: a permutation of range(samples) in each epoch, in O(1) memory and time.

    A four-round Feistel network over the smallest even number of bits that holds `samples`, walked until it
    lands inside (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
    """
    epoch, index = divmod(position, samples)
    half = max(1, ((samples - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for round_ in range(4):
            left, right = right, left ^ (_mix(right, round_, epoch, seed) & mask)
        index = (left << half) | right
        if index < samples:
            return index


def _mix(value: int, round_: int, epoch: int, seed: int) -> int:
    """A 64-bit hash of four integers (the finaliser of splitmix64, Steele et al. 2014)."""
    z = value
    for salt in (round_, epoch, seed):
        z = (z + (salt + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        z ^= z >> 31
    return z


def microbatches(first: int, data: DataConfig, rank: int, world: int) -> list[list[int]]:
    """The positions of one step that are this rank's, cut into microbatches: the same number on every rank.

    `first` is the step's first position. A rank with fewer samples than another gets lists padded by -1,
    which stands for a sample that does not count.
    """
    low, high = rank * data.global_batch // world, (rank + 1) * data.global_batch // world
    most = -(-data.global_batch // world)  # of any rank
    mine = list(range(first + low, first + high))
    mine += [-1] * (most - len(mine))
    return [mine[i : i + data.micro_batch] for i in range(0, most, data.micro_batch)]


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Positions to (tokens, labels), each int64 [seq_len]; labels are the tokens that follow."""

    def __init__(self, tokens: Tokens, seq_len: int, seed: int):
        self.tokens, self.seq_len, self.seed = tokens, seq_len, seed
        self.samples = (len(tokens) - 1) // seq_len

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        if position < 0:
            nothing = torch.zeros(self.seq_len, dtype=torch.int64)
            return nothing, torch.full_like(nothing, IGNORE)
        start = sample_at(position, self.samples, self.seed) * self.seq_len
        stretch = torch.from_numpy(self.tokens[start : start + self.seq_len + 1].astype(np.int64))
        return stretch[:-1], stretch[1:]


class _Order:
    """A batch sampler: the microbatches of this rank from a position on, until a step."""

    def __init__(self, data: DataConfig, rank: int, world: int, first: int, steps: int):
        self.data, self.rank, self.world, self.first, self.steps = data, rank, world, first, steps

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.steps):
            first = self.first + step * self.data.global_batch
            yield from microbatches(first, self.data, self.rank, self.world)


def batches(
    samples: Samples, data: DataConfig, rank: int, world: int, first: int, steps: int, pin: bool
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """For each of `steps` optimizer steps from position `first`: this rank's microbatches, read ahead.

    A microbatch is (tokens, labels), each int64 [<= micro_batch, seq_len].
    """
    order = _Order(data, rank, world, first, steps)
    loader = DataLoader(
        samples,
        batch_sampler=cast("torch.utils.data.Sampler[list[int]]", order),
        num_workers=data.workers,
        prefetch_factor=data.prefetch if data.workers else None,
        pin_memory=pin,
        # Forked from the rank and tied to its life. (A rank's own default would be to start a second fork server,
        # which imports torch once more.)
        multiprocessing_context="fork" if data.workers else None,
        worker_init_fn=die_with_parent,
    )
    a_step = len(microbatches(0, data, rank, world))
    stream = iter(loader)
    for _ in range(steps):
        yield [next(stream) for _ in range(a_step)]
