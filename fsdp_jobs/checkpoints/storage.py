"""Write and read DCP's files: with checksums, committed by rename, unpickled from a closed list of classes."""

from __future__ import annotations

import io
import json
import pickle
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from enum import Enum, EnumType
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config as serialization

from fsdp_jobs.checkpoints import catalog
from fsdp_jobs.checkpoints.blocks import IN_TORCH, SMALL, FileSums, SummedFile, difference, open_verified, reading_back
from fsdp_jobs.checkpoints.catalog import (
    MANIFEST,
    METADATA,
    NOT_FINITE,
    SHARDS,
    Manifest,
    is_object_store,
)
from fsdp_jobs.checkpoints.tensors import is_finite
from fsdp_jobs.config.schema import CheckpointConfig
from fsdp_jobs.run.agreement import known_here
from fsdp_jobs.run.processes import watch_parent
from fsdp_jobs.run.term import Term

_OF_A_THREAD = 1 << 26  # bytes to read per further thread
_REPORT = MetadataIndex("what a rank has written")


class Torn(Exception):
    """Something other than the optimizer changed tensors before they were copied."""


class NotFinite(Exception):
    """A saved state holds NaN or infinity: a restart must not use it."""


class _SummedFileSystem(FileSystem):
    """Verifies the files that it reads against checksums by name; records the checksums of those that it writes.

    Its paths are Paths, or UPaths over fsspec. With `read_back` it reads what it wrote, and compares.
    """

    def __init__(self, sums: Mapping[str, FileSums] = MappingProxyType({}), read_back: bool = False) -> None:
        self.sums, self.read_back = dict(sums), read_back

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if "r" in mode:
            with open_verified(path, self.sums.get(path.name)) as verified:
                yield verified
            return
        with path.open("wb") as raw, reading_back(path) if self.read_back else nullcontext() as beside:
            stream = SummedFile(raw, beside)
            try:
                yield stream
                stream.close()
            except IN_TORCH as e:
                raise stream.error or e from e
            self.sums[path.name] = stream.sums()
            if self.read_back:
                fault = difference(path, stream.sums(), from_disk=True) if beside is None else beside.fault()
                if fault:
                    raise OSError(f"{path}: what is on disk {fault}")

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    def mkdir(self, path: Any) -> None:
        """Do nothing: DCP's coordinator has made it, and a folder removed while others write must not come back."""

    def exists(self, path: Any) -> bool:
        """Return False: a save's folder is new. An NFS client that asks too early would miss it for up to a minute."""
        return False

    def rename(self, path: Any, new_path: Any) -> None:
        path.rename(new_path)


@dataclass(frozen=True)
class SaveRequest:
    """One checkpoint to write, the same on every rank."""

    checkpoints: Path
    save: str  # unique per save of a run, so that no two write to the same folder
    term: Term
    manifest: Manifest  # its `files` are known once all are written
    config: CheckpointConfig
    local: Path | None  # this run's folder on each node's own disk, if shards go there first
    may_be_infinite: frozenset[str]  # names of tensors
    pid: int  # of the rank
    began: float  # by the rank's monotonic clock

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}.{self.save}"

    @property
    def final(self) -> Path:
        return catalog.folder_of(self.checkpoints, self.step, self.save)

    @property
    def temporary(self) -> Path:
        in_place = is_object_store(self.checkpoints)
        return self.final if in_place else self.checkpoints / f"{self.name}.tmp"

    @property
    def shards(self) -> Path:
        """The folder that ranks write their shards to."""
        return self.temporary if self.local is None else self.local / self.name

    def commit(self, manifest: Manifest) -> None:
        """Commit the files of `manifest` on shared storage, and remove checkpoints beyond `checkpoint.keep`.

        Raises:
            Fenced: the round is over.
            OSError: the files differ from those reported.
        """
        self.term.check()
        known = known_here()
        manifest = replace(manifest, agreed=known.about(self.step))
        catalog.commit(self.temporary, self.final, manifest, self.term.check)
        try:
            (self.final / SHARDS).unlink(missing_ok=True)
            self.term.check()
            if known.compared >= 0:
                catalog.mark_agreed(self.checkpoints, known.about)
            catalog.prune(self.checkpoints, self.config.keep)
        except Exception as e:  # a store's client raises its own types; it is committed
            print(f"WARNING older checkpoints stay: {type(e).__name__}: {e}", flush=True)


class CommittingWriter(FileSystemWriter):
    """A DCP writer whose `finish` commits; runs in the trainer, a thread of it, or DCP's save process."""

    def __init__(self, request: SaveRequest):
        sync = not is_object_store(request.temporary)
        super().__init__(str(request.temporary), sync_files=sync, overwrite=False)
        self.request = request
        self.fs: _SummedFileSystem = _SummedFileSystem(read_back=request.config.read_back)
        self.path = request.temporary
        self.changed = ""  # which tensors changed while they were copied

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the folder, once for all ranks, before any of them has a plan."""
        request = self.request
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        watch_parent(request.pid)
        if is_coordinator:
            request.term.check()
            catalog.make_folder(request.checkpoints)
            if not is_object_store(request.temporary):
                request.temporary.mkdir()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shard; report its checksums, and its tensors that are not finite.

        Raises:
            OSError: with `read_back`, what was read back differs from what was written.
            Torn: this rank's copy mixes steps.
        """
        if self.changed:
            raise Torn(f"{self.changed}; from now on steps wait for the copy")
        if self.request.local is not None:
            self.request.shards.mkdir(parents=True, exist_ok=True)
        self.path = self.request.shards
        # Small ones first: all ranks read them.
        items = sorted(plan.items, key=lambda item: (item.tensor_storage_size() or 0) >= SMALL)
        plan = replace(plan, items=items)
        with cast(Any, serialization).patch("save.compute_crc32", False):  # torch's own sums, which nothing reads
            try:
                written: Future[list[WriteResult]] = super().write_data(plan, planner)
            except OSError as e:
                e.filename = e.filename or str(self.path)  # a full disk's error names no file
                raise
        self.path = self.request.temporary
        tensors = ((i.index.fqn, cast(Tensor, planner.resolve_data(i))) for i in plan.items)
        wrong = [name for name, tensor in tensors if not is_finite(tensor, name in self.request.may_be_infinite)]
        written.value().append(WriteResult(_REPORT, 0, (self.fs.sums, wrong)))
        return written

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state itself: it has been copied."""
        return state_dict

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=str(self.path), save_id=self.save_id)  # no path object: it is unpickled

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, on DCP's coordinator once every rank has written: metadata, manifest, fsync, rename, prune.

        Raises:
            NotFinite: it is committed, but a restart must not use it.
            OSError: the ranks have not reported all that the metadata needs.
        """
        files: dict[str, FileSums] = {}
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
            self.request.term.check()
            manifest.write(self.request.temporary, SHARDS)
        if wrong:
            names = ", ".join(sorted(set(wrong))[:3])
            is_of_buffers = self.request.may_be_infinite.issuperset(wrong)
            cure = ". A buffer that may hold NaN: register_buffer(..., persistent=False)" if is_of_buffers else ""
            raise NotFinite(f"{NOT_FINITE} ({names}); it is kept, but no restart uses it{cure}")


def lacking_in(files: dict[str, FileSums], metadata: Metadata) -> str:
    """Name the first file that the metadata needs but that is not listed, or too short; empty for none."""
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
    """Loads the classes that DCP's metadata consists of, and nothing else."""

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
        """Load, and undo what a crafted file has set on a class itself.

        Raises:
            pickle.UnpicklingError: the file contains another class, or sets an attribute of a class.
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
        module = "pathlib" if module == "pathlib._local" else module  # Python 3.13's name of it
        if not is_dtype and (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint's metadata")
        found = super().find_class(module, name)
        if isinstance(found, type):
            self._before.setdefault(found, dict(vars(found)))
        return found


class SafeReader(FileSystemReader):
    """A DCP reader that executes nothing it reads: tensors weights-only, metadata of known classes."""

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, FileSums] = MappingProxyType({}),
        shards: Path | None = None,
        threads: int = 1,
    ):
        """Verify reads against a manifest's `files`, if given; `shards`: the shards' folder, if not `folder`."""
        super().__init__(str(folder))
        self.threads = threads
        self.fs: _SummedFileSystem = _SummedFileSystem(files)
        self.path: Path = shards or folder
        self.folder = folder
        self._metadata: Metadata | None = None

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Read it once: DCP asks again, and it has an entry for each tensor of each rank."""
        if self._metadata is None:
            with self.fs.create_stream(self.folder / METADATA, "rb") as f:
                self._metadata = cast(Metadata, _MetadataUnpickler(io.BytesIO(f.read())).load())
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read in file order, each thread its part.

        Raises:
            Damaged: a block differs from what was written; DCP does not get it.
        """
        places = [self.storage_data[item.storage_index] for item in plan.items]
        in_order = sorted(range(len(places)), key=lambda i: (places[i].relative_path, places[i].offset))
        size, read = sum(place.length for place in places), 0
        threads = min(self.threads, 1 + size // _OF_A_THREAD)
        parts: list[list[ReadItem]] = [[] for _ in range(threads)]
        for i in in_order:
            parts[min(read * threads // max(1, size), threads - 1)].append(plan.items[i])
            read += places[i].length
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
        read_part = super().read_data
        with ThreadPoolExecutor(threads, initializer=lambda: torch.cuda.set_device(device)) as several:
            done = [*several.map(lambda items: read_part(replace(plan, items=items), planner), parts)]
        return done[0]


def _sums_in(folder: Path) -> dict[str, FileSums]:
    """Return the manifest's `files`; nothing if there is none, or that file is another tool's."""
    try:
        return Manifest.read(folder).files
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError):  # damaged, or not ours
        content = json.loads((folder / MANIFEST).read_text())
        if isinstance(content, dict) and len(content.keys() & {f.name for f in fields(Manifest)}) > 5:
            raise
        return {}


def load(state: dict[str, Tensor], reader: SafeReader) -> None:
    """Read the tensors of `state`; other ranks need not call it, and exchange no plans."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about the missing process group
        dcp.load(state, storage_reader=reader, no_dist=True)


def load_alone(folder: Path, state: dict[str, Tensor]) -> None:
    """Read the tensors of `state` from a checkpoint, in a single process."""
    load(state, SafeReader(folder, _sums_in(folder)))
