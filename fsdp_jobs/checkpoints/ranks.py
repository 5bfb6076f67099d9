"""Collectives over all ranks: exchange objects, and agree whether a checkpoint is damaged.

A file counts as damaged only if two readings find the same fault; another node, if there is one, does the second.
A fault that only one node sees is that node's failure.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from fsdp_jobs.checkpoints.blocks import FileSums
from fsdp_jobs.checkpoints.catalog import CannotReadHere, faults_in
from fsdp_jobs.checkpoints.storage import SafeReader, load
from fsdp_jobs.run.threads import wait_until

_MOST_THREADS = 4  # each may hold a tensor that it has read
_PATIENCE_S = 30.0  # until another machine's file must be visible here


class Ranks:
    """The ranks of a group, by default all. All of them call each method, in the same order."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.node = os.environ.get("GROUP_RANK", socket.gethostname())
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.local_world = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.leader = self.rank - self.local_rank  # the first rank of this node
        self.leads = self.local_rank == 0
        self.threads = min(_MOST_THREADS, max(1, len(os.sched_getaffinity(0)) // self.local_world))  # to restore with

    def gather(self, own: Any) -> list[Any]:
        """Return every rank's `own`, by rank."""
        by_rank: list[Any] = [None] * self.world
        dist.all_gather_object(by_rank, own, group=self.group)
        return by_rank

    def from_rank_0(self, answer: Callable[[], Any]) -> Any:
        """Return rank 0's answer. If it raises, only rank 0 fails, and the others notice that it has gone."""
        answers = [answer() if self.rank == 0 else None]
        dist.broadcast_object_list(answers, src=0, group=self.group)
        return answers[0]

    @contextmanager
    def reading(self, folder: Path) -> Iterator[None]:
        """Blame a failure to read an intact checkpoint on the rank where it happens; the others wait for its exit.

        Raises:
            CannotReadHere: it happened on this rank.
        """
        try:
            yield
        except OSError as e:
            raise CannotReadHere(folder, e) from e
        except CheckpointException as e:
            own = e.failures.get(self.rank, (None, None))[0]
            if isinstance(own, OSError):
                raise CannotReadHere(folder, own) from e
            if any(isinstance(cause, OSError) for cause, _ in e.failures.values()):
                self.gather(None)
            raise

    def load(self, state: dict[str, Tensor], reader: SafeReader) -> None:
        """Read the tensors of `state`, each rank with its own plan; DCP would gather and scatter all plans.

        Raises:
            CheckpointException: on all ranks, with the errors of those that failed.
        """
        own = {}
        try:
            load(state, reader)
        except CheckpointException as e:
            own = e.failures
        failures = {rank: failure for rank, of_rank in enumerate(self.gather(own)) for failure in of_rank.values()}
        if failures:
            raise CheckpointException("load", failures)

    def confirmed(self, folder: Path, files: Mapping[str, FileSums | None], contents: bool = False) -> list[str]:
        """Return the faults that two readings agree on, the second on another node or from the disk.

        Each rank reads its part of the files.

        `files` and `contents` are those of `faults_in`.

        Raises:
            CannotReadHere: the second reading differs, and keeps differing.
        """

        def read(names: Iterable[str], from_disk: bool = True) -> dict[str, str]:
            return faults_in(folder, {name: files[name] for name in names}, contents, from_disk)

        seen = read(sorted(files)[self.rank :: self.world], from_disk=not contents)  # metadata: small, and all need it
        first = self.gather((self.node, seen))
        if not any(faults for _, faults in first):
            return []
        readers = [next((r for r, (n, _) in enumerate(first) if n != node), i) for i, (node, _) in enumerate(first)]
        suspect = [name for i, (_, faults) in enumerate(first) if readers[i] == self.rank for name in faults]
        again = self.gather(read(suspect))
        second = {name: fault for faults in again for name, fault in faults.items()}

        def agrees(name: str) -> bool:
            if read([name]).get(name) == second.get(name):
                return True
            list(folder.parent.iterdir())  # makes an NFS client look again
            return False

        for name in seen:
            if not wait_until(partial(agrees, name), _PATIENCE_S, 0.5):
                other = second.get(name, "it is whole")
                raise CannotReadHere(folder / name, f"here {seen[name]}, in another reading {other}")
        self.gather(None)  # rank 0 may rename the folder from now on
        return sorted(second.values())
