"""Find, verify, commit and prune checkpoints. No torch.

On a file system a checkpoint is the folder `step-<8 digits>` with a `manifest.json`. It is written as
`step-<N>.<restart>.tmp` and renamed when every file is on disk: a name without a suffix is the only
mark of completeness. One found damaged is renamed to `step-<N>.damaged`, for whoever wants to look.

In an object store, where folders cannot be renamed, it is written as `step-<N>.<restart>` and its manifest,
put there last, is the mark. In one found damaged the manifest is renamed to `manifest.json.damaged`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
SHARDS = "shards.json"  # the manifest of a step whose shards are on the nodes' own disks
_DAMAGED = f"{MANIFEST}.damaged"
_NAME = re.compile(r"step-(\d{8,})")
_NAME_IN_STORE = re.compile(r"step-(\d{8,})\.[\w-]+")


def is_object_store(folder: Path) -> bool:
    return not isinstance(folder, Path)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds."""

    step: int  # optimizer steps done
    samples: int  # samples seen since the start of the run
    world_size: int
    mesh: dict[str, int]  # dimension name -> size
    torch_version: str
    time: float  # when the save began, seconds since 1970
    files: dict[str, dict[str, int]]  # name -> {"bytes": size, "crc32": checksum}, without the manifest itself

    def write(self, folder: Path, name: str = MANIFEST) -> None:
        with (folder / name).open("w") as f:
            json.dump(asdict(self), f, indent=1)
            if not is_object_store(folder):
                f.flush()
                os.fsync(f.fileno())

    @classmethod
    def read(cls, folder: Path, name: str = MANIFEST) -> Manifest:
        """Raises: OSError, ValueError (not JSON) or TypeError (other fields) for what is not a manifest."""
        content: dict[str, Any] = json.loads((folder / name).read_text())
        return cls(**content)


def folder_of(checkpoints: Path, step: int, restart: str) -> Path:
    """Return the folder of a committed checkpoint, which in an object store names the restart too."""
    return checkpoints / (f"step-{step:08d}" + (f".{restart}" if is_object_store(checkpoints) else ""))


def step_of(folder: Path) -> int:
    """Return the optimizer step in a checkpoint's name."""
    return int(folder.name.removeprefix("step-").partition(".")[0])


def find_checkpoints(checkpoints: Path) -> list[Path]:
    """Return the committed checkpoints, newest step first."""
    if is_object_store(checkpoints):
        folders = [f.parent for f in checkpoints.glob(f"step-*/{MANIFEST}") if _NAME_IN_STORE.fullmatch(f.parent.name)]
    else:
        folders = [f for f in checkpoints.glob("step-*") if _NAME.fullmatch(f.name) and f.is_dir()]
    return _newest_first(folders)


def find_on_nodes(checkpoints: Path) -> list[Path]:
    """Return the steps that are on the nodes' own disks and not yet here, newest first."""
    folders = [f.parent for f in checkpoints.glob(f"step-*/{SHARDS}") if not (f.parent / MANIFEST).exists()]
    return _newest_first(folders)


def _newest_first(folders: list[Path]) -> list[Path]:
    return sorted(folders, key=lambda f: (step_of(f), f.name), reverse=True)


def missing_or_short(folder: Path) -> list[str]:
    """List the faults of a checkpoint that names and sizes show; empty when it looks whole."""
    try:
        manifest = Manifest.read(folder)
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except (OSError, ValueError, TypeError) as e:
        return [f"{MANIFEST} cannot be read: {e}"]
    faults = []
    for name, expected in manifest.files.items():
        file = folder / name
        if not file.is_file():
            faults.append(f"{name} is missing")
        elif file.stat().st_size != expected["bytes"]:
            faults.append(f"{name} has {file.stat().st_size} bytes instead of {expected['bytes']}")
    return faults


def damaged_files(folder: Path, manifest: Manifest, names: Iterable[str], patience_s: float = 0.0) -> list[str]:
    """Read these files whole and say which differ from their checksums.

    A file that is not there is waited for up to `patience_s`: on NFS a folder may appear late on other nodes.
    """
    faults = []
    deadline = time.monotonic() + patience_s
    for name in names:
        while not (folder / name).exists() and time.monotonic() < deadline:
            list(folder.parent.iterdir())  # makes an NFS client look again
            time.sleep(0.5)
        try:
            if checksum(folder / name) != manifest.files[name]["crc32"]:
                faults.append(f"{name} differs from its checksum")
        except OSError as e:
            faults.append(f"{name} cannot be read: {e.strerror}")
    return faults


def verify(folder: Path) -> list[str]:
    """List the faults of a checkpoint by reading all of it; empty when it is whole."""
    faults = missing_or_short(folder)
    if faults:
        return faults
    manifest = Manifest.read(folder)
    return damaged_files(folder, manifest, manifest.files)


def checksum(file: Path) -> int:
    """Return the CRC-32 of a file's content."""
    value = 0
    with file.open("rb") as f:
        while block := f.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def commit(temporary: Path, final: Path, manifest: Manifest) -> None:
    """Commit a written checkpoint: manifest, fsync of folders, rename."""
    manifest.write(temporary)
    (temporary / SHARDS).unlink(missing_ok=True)
    if temporary != final:
        fsync_folder(temporary)
        temporary.rename(final)
        fsync_folder(final.parent)


def fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_aside(folder: Path) -> None:
    """Rename a damaged checkpoint so that nothing finds it again."""
    if is_object_store(folder):
        (folder / MANIFEST).rename(folder / _DAMAGED)
        return
    aside = folder.with_name(f"{folder.name}.damaged")
    if aside.exists():
        shutil.rmtree(aside)
    folder.rename(aside)


def prune(checkpoints: Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep` whole checkpoints (0 keeps all). Returns what was removed.

    Steps that never left the nodes' disks go when a newer one is whole.
    """
    whole = [f for f in find_checkpoints(checkpoints) if not missing_or_short(f)]
    for folder in find_on_nodes(checkpoints):
        if whole and step_of(folder) < step_of(whole[0]):
            remove(folder)
    removed = whole[keep:] if keep else []
    for folder in removed:  # never half a checkpoint that looks whole
        if is_object_store(folder):
            (folder / MANIFEST).unlink()
            remove(folder)
        else:
            remove(folder.rename(folder.with_name(f"{folder.name}.tmp")))
    return removed


def remove(folder: Path) -> None:
    """Remove a folder with all that is in it."""
    if is_object_store(folder):
        folder.fs.rm(folder.path, recursive=True)  # type: ignore[attr-defined]
    else:
        shutil.rmtree(folder, ignore_errors=True)


def remove_unfinished(checkpoints: Path, since: int = 0) -> None:
    """Remove what earlier restarts left half-written, except steps after `since` on the nodes' disks."""
    in_store = is_object_store(checkpoints)
    for folder in checkpoints.glob("step-*" if in_store else "step-*.tmp"):
        finished = in_store and ((folder / MANIFEST).exists() or (folder / _DAMAGED).exists())
        on_nodes = (folder / SHARDS).exists() and step_of(folder) > since
        if not finished and not on_nodes:
            remove(folder)
