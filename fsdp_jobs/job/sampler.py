"""Samples in an order that is a function of (seed, epoch, index), whatever the number of ranks."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator, Sized

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from fsdp_jobs.run.processes import die_with_parent


def sample_at(position: int, samples: int, seed: int) -> int:
    """Return the sample at a position: a permutation of range(samples) per epoch, in O(1) memory and time.

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


def own_positions(first: int, batch: int, rank: int, world: int) -> range:
    """Return the positions that a rank gets of the `batch` positions of a step, which begin at `first`."""
    return range(first + rank * batch // world, first + (rank + 1) * batch // world)


def _mix(z: int, round_: int, epoch: int, seed: int) -> int:
    """Return a 64-bit hash of four integers (the finaliser of splitmix64, Steele et al. 2014)."""
    for salt in (round_, epoch, seed):
        z = (z + (salt + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        z ^= z >> 31
    return z


def begin_worker(_worker: int = 0) -> None:
    """Let a process of a DataLoader live as long as its rank (`worker_init_fn=job.begin_worker`).

    A signal that asks a job to save reaches all processes of a node on some clusters, and torch's workers end by it.
    """
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class ElasticSampler(Sampler[list[int]]):
    """A batch sampler for a DataLoader: each sample once per epoch, in an order set only by the seed.

    Each step takes the next `batch` samples of that order over all ranks, and each rank gets its part of them. So a
    job that continues with more or fewer ranks continues with the same samples. It never ends: epochs follow each
    other.

        order = ElasticSampler(data, batch=16).after(step)
        DataLoader(data, batch_sampler=order, generator=order.generator)

    Without `generator` the loader draws its seed from torch's global generator, so that dropout on a CPU differs after
    a restore.
    """

    def __init__(self, data: Sized, batch: int, seed: int = 0):
        """Order `data` in steps of `batch` samples over all ranks.

        Raises:
            ValueError: some rank would get no sample.
        """
        self.samples, self.batch, self.seed = len(data), batch, seed
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.steps_done, self._has_begun = 0, False
        if batch < self.world:
            raise ValueError(f"batch={batch} leaves some of {self.world} ranks without a sample")
        if not self.samples:
            raise ValueError("there are no samples")

    def after(self, step: int) -> ElasticSampler:
        """Continue the order after `step` steps."""
        self.steps_done, self._has_begun = step, False
        return self

    @property
    def generator(self) -> torch.Generator:
        """A generator that seeds the loader's workers; it differs between ranks and steps."""
        return torch.Generator().manual_seed(_mix(self.rank, self.steps_done, self.seed, 1))

    def __iter__(self) -> Iterator[list[int]]:
        if self._has_begun:
            what = f"ElasticSampler begins again at step {self.steps_done}: call after(step) before"
            warnings.warn(what, stacklevel=2)
        self._has_begun = True
        first = self.steps_done * self.batch
        while True:
            positions = own_positions(first, self.batch, self.rank, self.world)
            yield [sample_at(p, self.samples, self.seed) for p in positions]
            first += self.batch
