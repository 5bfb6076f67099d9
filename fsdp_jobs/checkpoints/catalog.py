"""Find, verify, commit and prune checkpoints. No torch.

On a file system a checkpoint is the folder `step-<8 digits>` with a `manifest.json`. It is written as
`step-<N>.<save>.tmp` and renamed when every file is on disk: only a name without a suffix marks it as
complete. A damaged checkpoint is renamed to `step-<N>.damaged` and kept for inspection.

In an object store, where folders cannot be renamed, it is written as `step-<N>.<save>`, and the manifest,
written last, marks it as complete. If it is damaged, the manifest is renamed to `manifest.json.damaged`.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from fsdp_jobs.checkpoints.blocks import SUMS, FileSums, difference
from fsdp_jobs.config.errors import BadInput, JobFailed
from fsdp_jobs.plan.topology import natural_key
from fsdp_jobs.run.checksum import checksum
from fsdp_jobs.run.files import exists, listing, write_whole
from fsdp_jobs.run.processes import this_machine

MANIFEST = "manifest.json"
SHARDS = "shards.json"  # the manifest of a step whose shards are on the nodes' own disks
METADATA = ".metadata"  # where each tensor is, as torch's DCP writes it
NOT_FINITE = "its values were not finite when it was saved"
NOT_AGREED = "replicas did not hold the same bits when it was saved"
OTHER_VERSION = "is of another version of fsdp_jobs"
_DAMAGED = f"{MANIFEST}.damaged"
_AT_ONCE = 32  # requests to a store
_REPLACED = ".replaced"  # suffix of a step while another save of it takes its place
_NAME = re.compile(r"step-(\d{8,})")
_NAME_IN_STORE = re.compile(r"step-(\d{8,})\.[\w-]+")
_ANY_NAME = re.compile(r"step-\d{8,}(\..*)?")


def is_object_store(folder: Path) -> bool:
    return not isinstance(folder, Path)


class CannotReadHere(JobFailed):
    """Only this machine fails to read a checkpoint, or reads other bytes than the others: its own fault."""

    def __init__(self, path: Path, why: object):
        what = f"{this_machine()} cannot read {path}: {why}".removesuffix(".")
        super().__init__(f"{what}. Check its disk, mount or credentials; nothing was set aside.")


@contextmanager
def answering(checkpoints: Path) -> Iterator[None]:
    """Turn any exception of an object store's client into one error that names the store.

    Raises:
        BadInput: the store does not answer.
    """
    try:
        yield
    except Exception as e:
        if isinstance(e, BadInput | JobFailed) or not is_object_store(checkpoints):
            raise
        where, what = f"checkpoint.dir={checkpoints.parent}", f"cannot be read: {type(e).__name__}: {e}"
        raise BadInput.at(where, what, "the store's client needs a network and credentials here, too") from e


class OtherVersion(ValueError):
    """A manifest is whole, but this version does not understand it."""


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint."""

    step: int  # optimizer steps done
    samples: int  # samples seen since the start of the run
    world_size: int
    mesh: dict[str, int]  # dimension name -> size
    torch_version: str
    time: float  # when the save began, seconds since 1970
    files: dict[str, FileSums]  # by name
    stream: dict[str, Any] | None = None  # where a streamed data set continues
    finite: bool = True  # whether no value was NaN and no weight infinite
    agreed: bool | None = None  # whether replicas held the same bits; None: not known

    @property
    def bytes(self) -> int:
        return sum(f["bytes"] for f in self.files.values())

    def write(self, folder: Path, name: str = MANIFEST) -> None:
        """Write it atomically to an existing folder; in an object store, this is the commit."""
        content = asdict(self)
        text = json.dumps({**content, "sum": _sum(content)}, indent=1)
        if is_object_store(folder):
            (folder / name).write_text(text)
        else:
            write_whole(folder / name, text)

    @classmethod
    def read(cls, folder: Path, name: str = MANIFEST) -> Manifest:
        """Read a manifest, ignoring fields of other versions.

        Raises:
            OSError, ValueError, TypeError: it is missing, not JSON, or fails its checksum.
            OtherVersion: it is whole, and this version does not understand it.
        """
        content: dict[str, Any] = dict(json.loads((folder / name).read_text()))
        if content.pop("sum", expected := _sum(content)) != expected:  # earlier versions wrote none
            raise ValueError("it differs from its checksum")
        try:
            manifest = msgspec.convert(content, cls)
        except msgspec.ValidationError as e:
            raise OtherVersion(f"{OTHER_VERSION}: {e}") from e
        if unknown := [file for file, sums in manifest.files.items() if not {SUMS, "crc32"} & sums.keys()]:
            raise OtherVersion(f"{OTHER_VERSION}: it has sums of another kind for {unknown[0]}")
        return manifest


def _sum(content: dict[str, Any]) -> str:
    return checksum(json.dumps({k: v for k, v in content.items() if k != "sum"}).encode())


def folder_of(checkpoints: Path, step: int, save: str) -> Path:
    """Return the folder of a committed checkpoint; in an object store its name includes the save."""
    return checkpoints / (f"step-{step:08d}" + (f".{save}" if is_object_store(checkpoints) else ""))


def step_of(folder: Path) -> int:
    """Return the optimizer step in a checkpoint's name."""
    return int(folder.name.removeprefix("step-").partition(".")[0])


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is named like a checkpoint, complete or not."""
    return _ANY_NAME.fullmatch(folder.name) is not None


def find_checkpoints(checkpoints: Path) -> list[Path]:
    """Return the committed checkpoints, newest step first.

    Raises:
        OSError: the folder exists and cannot be listed.
    """
    in_store = is_object_store(checkpoints)
    named = _NAME_IN_STORE if in_store else _NAME
    steps = [f for f in listing(checkpoints) if named.fullmatch(f.name)]
    return _newest_first(_which(steps, lambda folder: exists(folder / MANIFEST)) if in_store else steps)


def find_on_nodes(checkpoints: Path, committed: Collection[Path]) -> list[Path]:
    """Return the steps that are on the nodes' own disks but not yet committed here, newest first.

    Raises:
        OSError: as `find_checkpoints`.
    """
    others = {*filter(is_checkpoint, listing(checkpoints))}.difference(committed)
    return _newest_first(_which([*others], lambda folder: exists(folder / SHARDS)))


def _which(folders: list[Path], is_so: Callable[[Path], bool]) -> list[Path]:
    """Return the folders for which `is_so` holds; it asks a store about many at once, where `glob` asks one by one."""
    if not any(map(is_object_store, folders)):
        return [*filter(is_so, folders)]
    with ThreadPoolExecutor(_AT_ONCE) as several:
        return [*itertools.compress(folders, several.map(is_so, folders))]


def find_all(checkpoints: Path) -> list[tuple[Path, str]]:
    """Return committed steps, then those on the nodes' disks, each with the name of its manifest."""
    committed = find_checkpoints(checkpoints)
    on_nodes = find_on_nodes(checkpoints, committed)
    return [(folder, MANIFEST) for folder in committed] + [(folder, SHARDS) for folder in on_nodes]


def _newest_first(folders: list[Path]) -> list[Path]:
    """Sort by the numbers in the names: of two saves of a step, `0-10-1` is newer than `0-9-1`."""
    return sorted(folders, key=lambda folder: natural_key(folder.name), reverse=True)


def faults_in(
    folder: Path, files: Mapping[str, FileSums | None], contents: bool = True, from_disk: bool = False
) -> dict[str, str]:
    """Return the faults of files, as this machine reads them, by name; intact files are left out.

    Args:
        files: name -> size and checksums, as a manifest lists them; None for a manifest itself.
        contents: compare all checksums, not only sizes and the metadata.
        from_disk: bypass the page cache.

    Raises:
        CannotReadHere: a file exists, but cannot be read.
    """
    faults = {}
    for name, expected in files.items():
        file = folder / name
        try:
            if expected is None:
                Manifest.read(folder, name)
                fault = ""
            elif (size := file.stat().st_size) != expected["bytes"]:
                fault = f"has {size} bytes instead of {expected['bytes']}"
            else:
                fault = difference(file, expected, from_disk) if contents or name == METADATA else ""
        except FileNotFoundError:
            fault = "is missing"
        except OtherVersion as e:
            fault = str(e)
        except (ValueError, TypeError) as e:
            fault = f"is damaged: {e}"
        except OSError as e:
            raise CannotReadHere(file, e.strerror or e) from e
        if fault:
            faults[name] = f"{name} {fault}"
    return faults


def verify(folder: Path, shards: bool = True) -> list[str]:
    """Return the faults of a checkpoint, including values that are not finite; empty if it is whole.

    Args:
        shards: read all of them; otherwise check only their sizes, and the metadata.

    Raises:
        CannotReadHere: a file exists, but cannot be read.
    """
    if faults := faults_in(folder, {MANIFEST: None}):
        return [*faults.values()]
    manifest = Manifest.read(folder)
    faults = faults_in(folder, manifest.files, contents=shards)
    return [*faults.values()] + ([] if manifest.finite else [NOT_FINITE])


def mark_agreed(checkpoints: Path, about: Callable[[int], bool | None]) -> None:
    """Record in undecided checkpoints whether replicas held the same bits; `about` returns that for a step, or None."""
    for folder, name in find_all(checkpoints):
        if (known := about(step_of(folder))) is None:
            continue
        with suppress(ValueError, TypeError, FileNotFoundError):  # damaged, or just removed
            if (manifest := Manifest.read(folder, name)).agreed is None:
                replace(manifest, agreed=known).write(folder, name)


def commit(temporary: Path, final: Path, manifest: Manifest, check: Callable[[], None] = lambda: None) -> None:
    """Commit a written checkpoint: manifest, fsync of folders, rename. An older save of the step is replaced.

    Args:
        check: called right before the operation that commits; raises if the round is over.

    Raises:
        OSError: a file is missing, or has another size than reported.
    """
    if faults := faults_in(temporary, manifest.files, contents=False):
        raise OSError(f"{temporary} is not whole: {'; '.join(faults.values())}")
    if temporary == final:
        check()
    manifest.write(temporary)
    if temporary != final:
        fsync_folder(temporary)
        check()
        replaced = temporary.with_suffix(_REPLACED)
        with suppress(FileNotFoundError):
            final.rename(replaced)
        temporary.rename(final)
        fsync_folder(final.parent)
        remove(replaced)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, durably: they survive a crash."""
    if is_object_store(folder) or folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    fsync_folder(folder.parent)


def fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as e:
        if e.errno != errno.EINVAL:  # a file system that cannot sync folders, such as 9p
            raise
    finally:
        os.close(descriptor)


def set_aside(folder: Path) -> None:
    """Rename a damaged checkpoint so that nothing finds it again; it is never removed automatically."""
    (folder / SHARDS).unlink(missing_ok=True)
    if is_object_store(folder):
        (folder / MANIFEST).rename(folder / _DAMAGED)
        return
    names = (f"{folder.name}.damaged" + (f"-{i}" if i else "") for i in itertools.count())
    folder.rename(next(aside for aside in map(folder.with_name, names) if not aside.exists()))


def prune(checkpoints: Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep` whole checkpoints (0 keeps all). Returns what was removed.

    Steps that are only on the nodes' disks are removed once a newer one is whole and sound. Checkpoints that are not
    finite do not count, and the newest of them stays. Checkpoints whose replicas differed are counted separately.

    Raises:
        CannotReadHere: this machine cannot verify one of them; nothing was removed.
    """
    committed = find_checkpoints(checkpoints)
    on_nodes = find_on_nodes(checkpoints, committed)
    if not keep and not on_nodes:
        return []  # without a look at every file of thousands of checkpoints
    faults = {folder: verify(folder, shards=False) for folder in committed}
    whole = [f for f, found in faults.items() if not found]
    not_finite = [f for f, found in faults.items() if found == [NOT_FINITE]]
    differed = [f for f in whole if Manifest.read(f).agreed is False]
    sound = [f for f in whole if f not in differed]
    for folder in on_nodes:
        if sound and step_of(folder) < step_of(sound[0]):
            remove(folder)
    removed = sound[keep:] + differed[keep:] + not_finite[1:] if keep else []
    for folder in removed:  # a half-removed checkpoint must not look whole
        if is_object_store(folder):
            (folder / MANIFEST).unlink()
            remove(folder)
        else:
            remove(folder.rename(folder.with_name(f"{folder.name}.tmp")))
    return removed


def remove(folder: Path) -> None:
    """Remove a folder and its contents, if it exists."""
    if is_object_store(folder):
        with suppress(FileNotFoundError):
            folder.fs.rm(folder.path, recursive=True)  # type: ignore[attr-defined]
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _may_exist(file: Path) -> bool:
    """Whether a file exists, or that is unknown."""
    try:
        return exists(file)
    except Exception:  # clients of object stores raise any exception
        return True


def remove_failed(temporary: Path) -> None:
    """Remove the files of a failed save, unless its manifest is in the store and only the reply was lost."""
    if not is_object_store(temporary) or not _may_exist(temporary / MANIFEST):
        remove(temporary)


def remove_unfinished(checkpoints: Path) -> None:
    """Remove half-written checkpoints, except steps on the nodes' disks, and undo half-done replacements.

    Raises:
        CannotReadHere: this machine cannot rename a replaced checkpoint back.
        OSError: as `find_checkpoints`.
    """
    in_store, steps = is_object_store(checkpoints), [*filter(is_checkpoint, listing(checkpoints))]
    for replaced in (folder for folder in steps if folder.suffix == _REPLACED):
        place = folder_of(checkpoints, step_of(replaced), "")
        try:
            if exists(place):  # the new one
                remove(replaced)
            else:
                replaced.rename(place)
        except OSError as e:
            raise CannotReadHere(replaced, e) from e
    finished = (MANIFEST, _DAMAGED, SHARDS) if in_store else (SHARDS,)
    unnamed = [folder for folder in steps if in_store or folder.suffix == ".tmp"]
    for folder in _which(unnamed, lambda folder: not any(_may_exist(folder / name) for name in finished)):
        remove(folder)
