"""Which checkpoints there are, which are whole, and which may go. No torch.

A checkpoint is the folder `step-<8 digits>` with a `manifest.json`. It is written as
`step-<N>.<life>.tmp` and renamed when every file is on disk: a name without a suffix is the only
mark of completeness. A checkpoint found damaged is renamed to `step-<N>.damaged`, for whoever wants to look.
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
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. `files`: name -> {"bytes": size, "crc32": checksum}, manifest itself left out."""

    step: int  # optimizer steps done
    samples: int  # samples seen since the start of the run
    world_size: int
    mesh: dict[str, int]  # dimension name -> size
    config_digest: str  # of the training keys
    torch_version: str
    time: float  # seconds since 1970
    files: dict[str, dict[str, int]]

    def write(self, folder: Path) -> None:
        with (folder / MANIFEST).open("w") as f:
            json.dump(asdict(self), f, indent=1)
            f.flush()
            os.fsync(f.fileno())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises: OSError, ValueError (not JSON) or TypeError (other fields) for a manifest that is none."""
        content: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        return cls(**content)


def folder_of(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def find_checkpoints(checkpoints: Path) -> list[Path]:
    """Folders with a committed checkpoint's name, newest step first."""
    found = [f for f in checkpoints.glob("step-*") if _NAME.fullmatch(f.name) and f.is_dir()]
    return sorted(found, key=lambda f: int(f.name.removeprefix("step-")), reverse=True)


def missing_or_short(folder: Path) -> list[str]:
    """What is wrong with a checkpoint as far as names and sizes tell; empty when it looks whole."""
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

    A file that is not there is waited for up to `patience_s`: on NFS a folder may show up late on other nodes.
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
    """Everything that is wrong with a checkpoint, by reading all of it; empty when it is sound."""
    faults = missing_or_short(folder)
    if faults:
        return faults
    manifest = Manifest.read(folder)
    return damaged_files(folder, manifest, manifest.files)


def checksum(file: Path) -> int:
    """CRC-32 of a file's content."""
    value = 0
    with file.open("rb") as f:
        while block := f.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def commit(temporary: Path, checkpoints: Path, manifest: Manifest) -> Path:
    """Make a written checkpoint the newest one: manifest, fsync of folders, rename. Returns its folder."""
    manifest.write(temporary)
    fsync_folder(temporary)
    final = folder_of(checkpoints, manifest.step)
    temporary.rename(final)
    fsync_folder(checkpoints)
    return final


def fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint so that nothing finds it again. Returns its new place."""
    aside = folder.with_name(f"{folder.name}.damaged")
    if aside.exists():
        shutil.rmtree(aside)
    return folder.rename(aside)


def prune(checkpoints: Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep` whole checkpoints (0 keeps all). Returns what was removed."""
    whole = [f for f in find_checkpoints(checkpoints) if not missing_or_short(f)]
    removed = whole[keep:] if keep else []
    for folder in removed:
        gone = folder.with_name(f"{folder.name}.tmp")  # never a half-deleted folder under a committed name
        folder.rename(gone)
        shutil.rmtree(gone)
    return removed


def remove_unfinished(checkpoints: Path) -> None:
    """Remove what earlier lives of the run left half-written."""
    for folder in checkpoints.glob("step-*.tmp"):
        shutil.rmtree(folder, ignore_errors=True)
