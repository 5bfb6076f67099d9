"""The order of samples for a program's own data loader: the same whatever the world is."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch.distributed as dist
from torch.utils.data import Sampler

from fsdp_jobs.train.data import sample_at


class ElasticSampler(Sampler[list[int]]):
    """A batch sampler for a DataLoader: each sample once an epoch, in an order that depends on the seed alone.

    A step takes the next `batch` samples of that order over all ranks, and each rank gets its part of them. So a job
    that goes on with more or fewer ranks, `DataLoader(data, batch_sampler=sampler.after(step))`, goes on with the same
    samples. It never ends: epochs follow each other.
    """

    def __init__(self, data: Sized, batch: int, seed: int = 0):
        """`batch`: samples a step over all ranks. Raises: ValueError when there are too few for each to get one."""
        self.samples, self.batch, self.seed = len(data), batch, seed
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.steps_done = 0
        if batch < self.world:
            raise ValueError(f"batch={batch} leaves some of {self.world} ranks without a sample")
        if not self.samples:
            raise ValueError("there are no samples")

    def after(self, step: int) -> ElasticSampler:
        """The same order from where so many steps have left it."""
        self.steps_done = step
        return self

    def __iter__(self) -> Iterator[list[int]]:
        low, high = self.rank * self.batch // self.world, (self.rank + 1) * self.batch // self.world
        first = self.steps_done * self.batch
        while True:
            yield [sample_at(p, self.samples, self.seed) for p in range(first + low, first + high)]
            first += self.batch
