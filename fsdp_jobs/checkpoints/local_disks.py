"""Checkpoints on the nodes' own disks: written there first, copied to shared storage, read from there.

On each node `<local_dir>/<run>/step-<N>.<restart>/` holds the shards that its ranks wrote. Metadata and the list
of all shards (`shards.json`, in a manifest's form) are on shared storage, in the folder that becomes the
checkpoint once every shard has been copied. A step of which the nodes hold every shard between them can be
loaded: a node gets what it lacks from its peers.
"""

from __future__ import annotations

import os
import shutil
import time
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from fsdp_jobs.checkpoints.catalog import SHARDS, Manifest, commit, damaged_files, prune
from fsdp_jobs.checkpoints.storage import SaveRequest

_BLOCK = 1 << 24  # bytes copied or sent at once
_COPIED = ".copied"  # suffix of the file by which a rank says that its shards are on shared storage
_KEPT = 2  # newest steps that stay on a node's disk


class LocalDisks:
    """One rank's access to its node's disk. Methods marked "All ranks" are called by all, in the same order."""

    def __init__(self, folder: Path, group: dist.ProcessGroup):
        self.folder, self.group = folder, group
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.node, self.leads = int(os.environ["GROUP_RANK"]), os.environ["LOCAL_RANK"] == "0"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._upload: tuple[SaveRequest, Future[None]] | None = None

    def may_upload(self, must: bool) -> bool:
        """All ranks: whether the save that begins now may be copied to shared storage.

        Not while the last copy runs; with `must`, waits for it.
        """
        if must and self._upload is not None:
            self._upload[1].exception()
        busy = torch.tensor([int(self._upload is not None and not self._upload[1].done())])
        dist.all_reduce(busy, dist.ReduceOp.MAX, group=self.group)
        return not busy.item()

    def upload(self, request: SaveRequest) -> None:
        """Begin to copy this rank's shards of a save that is whole on the nodes' disks."""
        self._upload = request, self._thread.submit(self._copy, request)

    def uploaded(self, wait: bool) -> tuple[SaveRequest, BaseException | None] | None:
        """Return a copy that has ended since the last call, with its error."""
        if self._upload is None or not (wait or self._upload[1].done()):
            return None
        (request, future), self._upload = self._upload, None
        return request, future.exception()

    def _copy(self, request: SaveRequest) -> None:
        shards = Manifest.read(request.temporary, SHARDS)
        error = ""
        try:
            for source in sorted(request.shards.glob(f"__{self.rank}_*.distcp")):
                _copy_checked(source, request.temporary / source.name, shards.files[source.name]["crc32"])
        except OSError as e:
            error = f"rank {self.rank}: {type(e).__name__}: {e}"
        (request.temporary / f"{self.rank}{_COPIED}").write_text(error)
        if self.rank == 0:
            self._commit(request, shards)
        elif error:
            raise OSError(error)

    def _commit(self, request: SaveRequest, shards: Manifest) -> None:
        reports = [request.temporary / f"{rank}{_COPIED}" for rank in range(self.world)]
        while not all(r.exists() for r in reports):
            time.sleep(0.05)  # a rank that died ends the round, and this thread with it
        errors = [e for e in (r.read_text() for r in reports) if e]
        if errors:
            raise OSError("; ".join(errors))
        for report in reports:
            report.unlink()
        commit(request.temporary, request.final, shards)
        prune(request.checkpoints, request.keep)

    def tidy(self) -> None:
        """Remove old steps from this node's disk: all but the newest, and the one that is being copied."""
        if not self.leads:
            return
        uploading = self._upload[0].shards if self._upload is not None else None
        for old in sorted(self.folder.glob("step-*"), reverse=True)[_KEPT:]:
            if old != uploading:
                shutil.rmtree(old, ignore_errors=True)

    def holding(self, manifest: Manifest) -> Path | None:
        """All ranks: this node's folder of a step if the nodes have every shard of it, undamaged; else None."""
        shards = {name for name in manifest.files if name.endswith(".distcp")}
        folder, held = self._best(manifest, shards) if self.leads else (None, set())
        by_rank: list[Any] = [None] * self.world
        dist.all_gather_object(by_rank, (self.node, folder, held), group=self.group)
        self._held = {rank: held for rank, (_, _, held) in enumerate(by_rank) if held}
        self._leaders = {node: rank for rank, (node, folder, _) in enumerate(by_rank) if folder is not None}
        if set().union(*self._held.values()) != shards:
            return None
        return Path(by_rank[self._leaders[self.node]][1])

    def _best(self, manifest: Manifest, shards: set[str]) -> tuple[str, set[str]]:
        """Return the folder here with most of a step's shards, and which it has; a new one if there is none."""
        best: tuple[str, set[str]] = (str(self.folder / f"step-{manifest.step:08d}.fetched"), set())
        for folder in self.folder.glob(f"step-{manifest.step:08d}.*"):
            here = {name for name in shards if (folder / name).exists()}
            damaged = {fault.partition(" ")[0] for fault in damaged_files(folder, manifest, here)}
            if len(here - damaged) > len(best[1]):
                best = str(folder), here - damaged
        return best

    def fetch(self, folder: Path, manifest: Manifest, state: dict[str, Any], metadata: Metadata) -> None:
        """All ranks, after `holding`: get from peers the shards that this node needs and lacks."""
        planner = DefaultLoadPlanner()
        planner.set_up_planner(state, metadata, is_coordinator=False)
        stored = metadata.storage_data
        assert stored is not None
        wanted = {stored[item.storage_index].relative_path for item in planner.create_local_plan().items}
        by_rank: list[Any] = [None] * self.world
        dist.all_gather_object(by_rank, (self.node, wanted), group=self.group)
        for name in sorted(set().union(*(names for _, names in by_rank))):
            source = min(rank for rank, held in self._held.items() if name in held)
            for node in sorted({node for node, names in by_rank if name in names}):
                target = self._leaders[node]
                if name in self._held.get(target, ()):
                    continue
                if self.rank == source:
                    _send(folder / name, target, self.group)
                elif self.rank == target:
                    folder.mkdir(parents=True, exist_ok=True)
                    _receive(folder / name, manifest.files[name]["bytes"], source, self.group)
        dist.barrier(group=self.group)

    def close(self) -> None:
        self._thread.shutdown()


def _copy_checked(source: Path, target: Path, crc32: int) -> None:
    """Raises: OSError when the copied bytes differ from those that were written."""
    value = 0
    with source.open("rb") as f, target.open("wb") as to:
        while block := f.read(_BLOCK):
            value = zlib.crc32(block, value)
            to.write(block)
        if isinstance(target, Path):
            to.flush()
            os.fsync(to.fileno())
    if value != crc32:
        raise OSError(f"{source} differs from its checksum")


def _send(file: Path, to: int, group: dist.ProcessGroup) -> None:
    with file.open("rb") as f:
        while block := f.read(_BLOCK):
            dist.send(torch.frombuffer(bytearray(block), dtype=torch.uint8), to, group=group)


def _receive(file: Path, size: int, source: int, group: dist.ProcessGroup) -> None:
    with file.open("wb") as f:
        for begin in range(0, size, _BLOCK):
            block = torch.empty(min(_BLOCK, size - begin), dtype=torch.uint8)
            dist.recv(block, source, group=group)
            f.write(block.numpy().data)
