"""Read this rank's microbatches ahead, as a configuration says."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from fsdp_jobs.config.errors import JobFailed
from fsdp_jobs.config.schema import DataConfig
from fsdp_jobs.run.processes import die_with_parent
from fsdp_jobs.train.data import Samples, microbatches, microbatches_of_steps
from fsdp_jobs.train.sources import Stream, StreamBatches, open_tokens


def _begin_worker(_worker: int) -> None:
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # to all processes of a node: the ranks are still saving


def open_samples(data: DataConfig, seed: int) -> Samples | Stream:
    """Open the samples of a configuration.

    Raises:
        OSError, ValueError, BadInput: as `open_tokens` does.
    """
    if data.kind == "hf_dataset" and data.streaming:
        return Stream(data)
    return Samples(open_tokens(data), data.seq_len, seed)


def check_same_data(samples: Samples | Stream, data: DataConfig) -> None:
    """Compare the data of all ranks.

    Raises:
        JobFailed: a rank reads other data than rank 0.
    """
    fingerprints: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(fingerprints, samples.fingerprint())
    others = [rank for rank, other in enumerate(fingerprints) if other != fingerprints[0]]
    if others:
        raise JobFailed(f"ranks {others} read other data than rank 0: is {data.kind} the same on all nodes?")


def batches(
    samples: Samples | Stream, data: DataConfig, rank: int, world: int, first: int, steps: int, pin: bool
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield this rank's microbatches, read ahead, for each of `steps` optimizer steps from position `first`.

    A microbatch is (tokens, labels), each int64 [<= micro_batch, seq_len]. A stream has one reading process at most.
    """
    chosen: dict[str, Any]
    if isinstance(samples, Stream):
        workers = min(1, data.workers)
        chosen = {"dataset": StreamBatches(samples, rank, world, first, steps), "batch_size": None}
    else:
        workers = data.workers
        chosen = {"dataset": samples, "batch_sampler": microbatches_of_steps(data, rank, world, first, steps)}
    loader = DataLoader(
        **chosen,
        num_workers=workers,
        prefetch_factor=data.prefetch if workers else None,
        pin_memory=pin,
        # Forked from the rank, and killed with it. (A rank's own default would be to start a second fork server,
        # which imports torch once more.)
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=_begin_worker,
    )
    per_step = len(microbatches(0, data, rank, world))
    stream = cast(Iterator[tuple[Tensor, Tensor]], iter(loader))
    for _ in range(steps):
        yield [next(stream) for _ in range(per_step)]
