"""Checkpoints on the nodes' own disks: written there first, read there, and copied to shared storage.

On each node `<local_dir>/<run>-<mark>/step-<N>.<save>/` holds the shards that its ranks wrote. Metadata and the list
of all shards (`shards.json`, in the format of a manifest) are on shared storage, in the folder that becomes the
checkpoint once every shard has been copied. A step can be loaded if the nodes together hold every shard: each
node fetches the shards it lacks from its peers.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.utils import _DistWrapper

from fsdp_jobs.checkpoints.blocks import FileSums, open_verified
from fsdp_jobs.checkpoints.catalog import (
    SHARDS,
    CannotReadHere,
    Manifest,
    faults_in,
    find_all,
    is_object_store,
    step_of,
)
from fsdp_jobs.checkpoints.exchange import CannotLoad, fetch_files
from fsdp_jobs.checkpoints.ranks import Ranks
from fsdp_jobs.checkpoints.storage import SaveRequest
from fsdp_jobs.checkpoints.tiers import Restored, SharedStorage, Tier
from fsdp_jobs.run.threads import begin_in

_BLOCK = 1 << 24  # bytes copied at once
_KEPT = 2  # newest steps that stay on a node's disk
_SLOWEST_COPY = timedelta(hours=1)  # from the end of the first rank's copy to that of the last


class LocalDisks:
    """One rank's access to its node's disk. Methods marked "All ranks" are called by all, in the same order."""

    def __init__(self, folder: Path, ranks: Ranks):
        self.folder, self.ranks = folder, ranks
        copying = dist.new_group(backend="gloo", timeout=_SLOWEST_COPY)  # for the uploading threads
        self._copying = _DistWrapper(copying, use_dist=True, coordinator_rank=0)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._upload: tuple[SaveRequest, Future[None]] | None = None

    def may_upload(self, must: bool) -> bool:
        """All ranks: return whether the save that begins now may be copied to shared storage.

        It may not while the previous copy runs; with `must`, this waits for that copy.
        """
        if must and self._upload is not None:
            self._upload[1].exception()
        return not any(self.ranks.gather(self._upload is not None and not self._upload[1].done()))

    def upload(self, request: SaveRequest) -> None:
        """Begin to copy this rank's shards of a save that is whole on the nodes' disks."""
        self._upload = request, begin_in(self._thread, self._copy, request)

    def uploaded(self, wait: bool) -> tuple[SaveRequest, BaseException | None] | None:
        """Return the copy that has ended since the last call, with its error."""
        if self._upload is None or not (wait or self._upload[1].done()):
            return None
        (request, future), self._upload = self._upload, None
        return request, future.exception()

    def _copy(self, request: SaveRequest) -> None:
        """In a thread of every rank: copy this rank's shards; commit when all ranks have.

        Raises:
            CheckpointException: on all ranks, with the errors of those that failed.
        """

        def copy() -> None:
            request.term.check()
            shards = Manifest.read(request.temporary, SHARDS)
            for source in sorted(request.shards.glob(f"__{self.ranks.rank}_*.distcp")):
                _copy_checked(source, request.temporary / source.name, shards.files[source.name])

        def commit(_: object) -> None:
            request.commit(Manifest.read(request.temporary, SHARDS))

        self._copying.all_reduce("upload", copy, commit)

    def tidy(self, newest: Path) -> None:
        """Remove old steps from this node's disk; `newest`, whatever the clock says, and the one being copied stay."""
        if not self.ranks.leads:
            return
        uploading = self._upload[0].shards if self._upload is not None else None
        with suppress(OSError):  # the next save tries again
            by_age = sorted(self.folder.glob("step-*"), key=lambda f: (f == newest, f.stat().st_mtime), reverse=True)
            for old in by_age[_KEPT:]:
                if old != uploading:
                    shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        self._thread.shutdown()


class LocalTier(Tier):
    """The steps that the nodes' disks hold together."""

    def __init__(self, disks: LocalDisks, storage: SharedStorage):
        self.folder, self.ranks, self.storage = disks.folder, disks.ranks, storage
        self._offered: tuple[str, str] | None = None  # a checkpoint, and the file that lists its shards
        self._lacking: set[str] = set()  # checkpoints with shards missing on these disks

    def offer(self, at_least: int) -> int | None:
        """Return the newest step whose shards these disks may all hold, if it is at least `at_least`.

        A committed step that is also on these disks is read from them, not from shared storage.
        """
        self._offered = self.ranks.from_rank_0(self._newest)
        step = -1 if self._offered is None else step_of(self.storage.home / self._offered[0])
        return step if step >= at_least else None

    def _newest(self) -> tuple[str, str] | None:
        """Return the newest checkpoint that may be here, and the file that lists its shards: MANIFEST if committed."""
        by_step: dict[int, tuple[str, str]] = {}
        for folder, listed_in in find_all(self.storage.home):
            if folder.name not in self.storage.skipped:
                by_step.setdefault(step_of(folder), (folder.name, listed_in))  # a committed one comes first
        steps = [step for step, (name, _) in by_step.items() if name not in self._lacking]
        return by_step[max(steps)] if steps else None

    def load(self) -> Restored | None:
        """Load the offered step, if the nodes together hold it."""
        assert self._offered is not None
        name, listed_in = self._offered
        manifest = self.storage.examine(name, listed_in, shards=False)
        if manifest is None:
            return None
        try:
            shards = self._holding(manifest, self.storage.is_certain(name))
            return self.storage.read(name, manifest, shards, partial(self._fetch, shards))
        except CannotLoad as e:
            self._lacking.add(name)
            if listed_in == SHARDS:
                self.storage.skip(name, [str(e)])
            return None

    def _holding(self, manifest: Manifest, contents: bool) -> Path:
        """Return this node's folder of a step.

        Args:
            contents: compare checksums of shards as well as sizes.

        Raises:
            CannotLoad: the nodes together do not hold every shard intact.
        """
        shards = {name: file for name, file in manifest.files.items() if name.endswith(".distcp")}
        by_rank = self.ranks.gather(self._best(manifest.step, shards, contents) if self.ranks.leads else None)
        self._held: dict[int, set[str]] = {rank: best[1] for rank, best in enumerate(by_rank) if best is not None}
        if set().union(*self._held.values()) != shards.keys():
            raise CannotLoad("these nodes' disks do not hold all of its shards")
        folder: Path = by_rank[self.ranks.leader][0]
        return folder

    def _best(self, step: int, shards: dict[str, FileSums], contents: bool) -> tuple[Path, set[str]]:
        """Return the folder on this disk with most shards of a step, and their names; a new folder if there is none."""
        best = self.folder / f"step-{step:08d}.fetched", set[str]()
        with suppress(CannotReadHere, OSError):  # treat this disk as lost: peers or shared storage have its shards
            for folder in self.folder.glob(f"step-{step:08d}.*"):
                here = shards.keys() - faults_in(folder, shards, contents).keys()
                if len(here) > len(best[1]):
                    best = folder, here
        return best

    def _fetch(self, folder: Path, state: dict[str, Any], metadata: Metadata) -> None:
        """After `_holding`, fetch from peers the shards that this node needs and lacks."""
        planner = DefaultLoadPlanner()
        planner.set_up_planner(state, metadata, is_coordinator=False)
        stored = metadata.storage_data
        assert stored is not None
        wanted = {stored[item.storage_index].relative_path for item in planner.create_local_plan().items}
        fetch_files(self.ranks, self._held, wanted, folder, folder)


def _copy_checked(source: Path, target: Path, expected: FileSums) -> None:
    """Copy a shard. A failed copy is removed: those of many failed steps would keep a disk full.

    Raises:
        OSError: the bytes read differ from those that were written, or cannot be written.
    """
    try:
        with open_verified(source, expected) as f, target.open("wb") as to:
            shutil.copyfileobj(f, to, _BLOCK)
            to.flush()
            if not is_object_store(target):
                os.fsync(to.fileno())
    except Exception:  # clients of object stores raise any exception
        with suppress(Exception):
            target.unlink()
        raise
