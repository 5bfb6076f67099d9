"""Write and read DCP's files: checksummed, committed by rename, unpickled by a closed list of classes."""

from __future__ import annotations

import io
import os
import pickle
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum, EnumType
from pathlib import Path
from typing import IO, Any, ClassVar, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fsdp_jobs.checkpoints import catalog
from fsdp_jobs.checkpoints.catalog import METADATA, NOT_FINITE, SHARDS, CannotReadHere, Manifest, is_object_store
from fsdp_jobs.config.schema import CheckpointConfig
from fsdp_jobs.run.epoch import Epoch
from fsdp_jobs.run.integrity import known_here
from fsdp_jobs.run.processes import watch_parent

_REPORT = MetadataIndex("what a rank has written")


class NotFinite(Exception):
    """A state was saved, and is not one to go on from."""


class Checksummed:
    """A binary file, open for writing, that computes the CRC-32 of what is written through it."""

    def __init__(self, raw: IO[bytes]):
        self.raw, self.crc32, self.size = raw, 0, 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        self.size += memoryview(data).nbytes
        try:
            return self.raw.write(data)
        except OSError as e:
            self.error = e  # torch.save reports it as a wrong position in the file
            raise

    def fileno(self) -> int:
        self.raw.flush()  # before an fsync
        return self.raw.fileno()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


class _ChecksumFileSystem(FileSystem):
    """Records size and checksum of every file it writes, by name. Its paths are Paths, or UPaths over fsspec."""

    def __init__(self) -> None:
        self.sums: dict[str, dict[str, int]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with cast(Path, path).open(mode) as raw:
            if "r" in mode:
                yield cast(io.IOBase, raw)
            else:
                stream = Checksummed(cast(IO[bytes], raw))
                try:
                    yield cast(io.IOBase, stream)
                except RuntimeError as e:
                    raise stream.error or e from e
                self.sums[cast(Path, path).name] = {"bytes": stream.size, "crc32": stream.crc32}

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str | os.PathLike[str]:
        return cast(Path, path) / suffix

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Leave it to the coordinator: a folder that was removed while others still wrote must not come back."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return cast(Path, path).exists()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        cast(Path, path).rename(cast(Path, new_path))


@dataclass(frozen=True)
class SaveRequest:
    """One checkpoint to be written, the same on every rank."""

    checkpoints: Path
    save: str  # differs between saves of a run, so that no two write into the same folder
    epoch: Epoch
    manifest: Manifest  # its files are known when all are written
    config: CheckpointConfig
    local: Path | None  # this run's folder on each node's own disk, if shards go there first
    buffers: frozenset[str]  # tensors that may hold infinities, as masks do
    pid: int  # of the rank

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def final(self) -> Path:
        return catalog.folder_of(self.checkpoints, self.step, self.save)

    @property
    def temporary(self) -> Path:
        in_place = is_object_store(self.checkpoints)
        return self.final if in_place else self.checkpoints / f"step-{self.step:08d}.{self.save}.tmp"

    @property
    def shards(self) -> Path:
        """The folder that ranks write their shards to."""
        return self.temporary if self.local is None else self.local / f"step-{self.step:08d}.{self.save}"

    def commit(self, manifest: Manifest) -> None:
        """Commit on shared storage what `manifest` lists, and remove what is older than `checkpoint.keep` says.

        Raises:
            Fenced: the round is over.
            OSError: what was reported is not what is there.
        """
        self.epoch.check()
        known = known_here()
        catalog.commit(self.temporary, self.final, replace(manifest, agreed=known.about(self.step)))
        try:
            self.epoch.check()
            if known.compared >= 0:
                catalog.mark_agreed(self.checkpoints, known.about)
            catalog.prune(self.checkpoints, self.config.keep)
        except (OSError, CannotReadHere, RuntimeError) as e:  # it is committed nevertheless
            print(f"WARNING older checkpoints stay: {e}", flush=True)


class CommittingWriter(FileSystemWriter):
    """A DCP writer whose `finish` is the commit; in the trainer, a thread of it, or DCP's save process."""

    def __init__(self, request: SaveRequest):
        sync = not is_object_store(request.temporary)
        super().__init__(str(request.temporary), single_file_per_rank=True, sync_files=sync, overwrite=False)
        self.request = request
        self.fs: _ChecksumFileSystem = _ChecksumFileSystem()
        self.path = request.temporary

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the folder, once for all ranks, before any of them has a plan."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        watch_parent(self.request.pid)
        if is_coordinator:
            self.request.epoch.check()
            catalog.make_folder(self.request.checkpoints)
            if not is_object_store(self.request.temporary):
                self.request.temporary.mkdir()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shard, and report its checksums and what in it is not finite.

        Raises:
            OSError: with `read_back`, what was read back differs from what was written.
        """
        if self.request.local is not None:
            self.request.shards.mkdir(parents=True, exist_ok=True)
        self.path = self.request.shards
        written: Future[list[WriteResult]] = super().write_data(plan, planner)
        self.path = self.request.temporary
        if self.request.config.read_back:
            for name, expected in self.fs.sums.items():
                file = self.request.shards / name
                if catalog.checksum(file, from_disk=True) != expected["crc32"]:
                    raise OSError(f"{file}: what is on disk differs from what was written")
        wrong = [i.index.fqn for i in plan.items if not self._is_finite(i.index.fqn, planner.resolve_data(i))]
        written.value().append(WriteResult(_REPORT, 0, (self.fs.sums, wrong)))
        return written

    def _is_finite(self, name: str, tensor: Any) -> bool:
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or not tensor.numel():
            return True
        ends = torch.stack(tensor.aminmax())  # NaN if there is one
        return not bool((ends.isnan() if name in self.request.buffers else ~ends.isfinite()).any())

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=str(self.path), save_id=self.save_id)  # no path object: it is unpickled

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, on DCP's coordinator once every rank has written: metadata, manifest, fsync, rename, prune.

        Raises:
            NotFinite: it is committed, and not one to go on from.
            OSError: what the ranks have reported is not what the metadata needs.
        """
        files: dict[str, dict[str, int]] = {}
        wrong: list[str] = []
        for of_rank in results:
            sums, not_finite = of_rank.pop().storage_data
            files |= sums
            wrong += not_finite
        super().finish(metadata, results)
        files[METADATA] = self.fs.sums[f"{METADATA}.tmp"]
        if lacking := lacking_in(files, metadata):
            raise OSError(f"no rank has reported {lacking}")
        manifest = replace(self.request.manifest, files=files, finite=not wrong)
        if self.request.local is None:
            self.request.commit(manifest)
        else:
            self.request.epoch.check()
            manifest.write(self.request.temporary, SHARDS)
        if wrong:
            names = ", ".join(sorted(set(wrong))[:3])
            raise NotFinite(f"{NOT_FINITE} ({names}); it is kept, and no resume begins with it")


def lacking_in(files: dict[str, dict[str, int]], metadata: Metadata) -> str:
    """Name the first file that the metadata needs and that is not listed, or too short; empty for none."""
    for piece in (metadata.storage_data or {}).values():
        if piece.offset + piece.length > files.get(piece.relative_path, {"bytes": -1})["bytes"]:
            return f"{piece.relative_path}, of at least {piece.offset + piece.length} bytes"
    return ""


def _enum_member(enumeration: Any, name: str) -> Enum:
    """Return a member of an enumeration, which some Pythons pickle as `getattr(enumeration, name)`."""
    if not isinstance(enumeration, EnumType):
        raise pickle.UnpicklingError(f"{enumeration}.{name} is not allowed in a checkpoint's metadata")
    return cast(Enum, enumeration[name])


class _MetadataUnpickler(pickle.Unpickler):
    """Loads the classes DCP's metadata is made of, and nothing else."""

    _METADATA: ClassVar = {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    }
    _ALLOWED: ClassVar = {
        *((dcp_metadata.__name__, name) for name in _METADATA),
        ("torch", "Size"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
    }

    def load(self) -> Any:
        """Load, and take back what a crafted file has set on a class itself.

        Raises:
            pickle.UnpicklingError: something else than these classes, or an attribute of one of them, was in it.
        """
        self._before: dict[type, dict[str, Any]] = {}
        try:
            return super().load()
        finally:
            for kind, before in self._before.items():
                changed = [name for name, value in vars(kind).items() if before.get(name, self) is not value]
                for name in changed:
                    setattr(kind, name, before[name]) if name in before else delattr(kind, name)
                if changed:
                    raise pickle.UnpicklingError(f"{kind.__name__}.{changed[0]} is not allowed to be set by metadata")

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if not is_dtype and (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint's metadata")
        found = super().find_class(module, name)
        if isinstance(found, type):
            self._before.setdefault(found, dict(vars(found)))
        return found


class SafeReader(FileSystemReader):
    """A DCP reader that executes nothing it reads: tensors weights-only, metadata of known classes."""

    def __init__(self, folder: Path, shards: Path | None = None):
        """`shards`: where they are, if not beside the metadata."""
        super().__init__(str(folder))
        self.fs: _ChecksumFileSystem = _ChecksumFileSystem()
        self.path: Path = shards or folder
        self.folder = folder

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        with (self.folder / METADATA).open("rb") as f:
            metadata = cast(Metadata, _MetadataUnpickler(f).load())
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def load_alone(folder: Path, state: dict[str, Tensor]) -> None:
    """Read the tensors of `state` from a checkpoint, in this process alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about the missing process group
        dcp.load(state, storage_reader=SafeReader(folder), no_dist=True)
