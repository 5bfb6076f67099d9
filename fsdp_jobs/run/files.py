"""Write files whole, lock them, and find them on shared storage. No torch."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO

import psutil

from fsdp_jobs.config.errors import Damaged
from fsdp_jobs.run.record import JsonObject


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file that replaces `path` at the end; on an error it is removed."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield part
        part.replace(path)
    except BaseException as e:
        part.unlink(missing_ok=True)
        if isinstance(e, OSError) and e.filename in (None, str(part)):  # with a full disk the error names no file
            e.filename = str(path)
        raise


def write_whole(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file to an existing folder: readers see the old content or the new, also after a crash."""
    with replacing(path) as part, open(part, "w", opener=partial(os.open, mode=mode)) as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())


def write_atomic(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file as `write_whole` does, and make its folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text, mode)


def write_json(path: Path, values: JsonObject) -> None:
    """Write an object as `write_atomic` does."""
    write_atomic(path, json.dumps(values, indent=2))


def read_json(path: Path) -> JsonObject:
    """Read what `write_json` wrote; empty if there is no such file.

    Raises:
        Damaged: it is not what `write_json` wrote.
    """
    try:
        return dict(json.loads(path.read_text()))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, TypeError) as e:
        raise Damaged(path, e) from e


def digest_of(file: Path | str | None) -> str | None:
    """Return the SHA-256 of a file's content in hexadecimal; None if it cannot be read here."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file is not None else None
    except OSError:
        return None


def as_written(path: Path | str) -> Path:
    """Make a path absolute and keep its symbolic links: an automounter's may lead elsewhere on another machine.

    A relative path begins at the shell's PWD, because the kernel knows only the resolved working directory. A path with
    `..` is resolved: the folder before `..` may be a link.
    """
    here = Path(os.environ.get("PWD", ""))
    with suppress(OSError):
        if here.is_absolute() and here.samefile("."):
            path = here / path
    return (Path.cwd() / path).resolve() if ".." in Path(path).parts else Path.cwd() / path


def exists(path: Path) -> bool:
    """Whether a file exists. Raises errors of its storage, for which `Path.exists` says no since Python 3.14."""
    with suppress(FileNotFoundError, NotADirectoryError):
        path.stat()
        return True
    return False


def listing(folder: Path) -> list[Path]:
    """Return what is in a folder; nothing if there is none.

    Raises:
        OSError: it cannot be listed: `glob` would find nothing there, since Python 3.12.
    """
    with suppress(FileNotFoundError):
        if isinstance(folder, Path):
            return [*folder.iterdir()]
        return [folder / Path(path).name for path in folder.fs.ls(folder.path, detail=False)]
    return []


def is_there(path: Path) -> bool:
    """Whether a file exists; False if its storage does not answer."""
    with suppress(OSError):
        return exists(path)
    return False


def file_system(path: Path) -> str:
    """Return the type of the file system that holds a path, or will hold it, such as `tmpfs` or `fuse.s3fs`."""
    types = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}  # the last at one place
    real = path.resolve()
    return next((types[place] for place in map(str, [real, *real.parents]) if place in types), "")


def look_again(file: Path) -> None:
    """Make an NFS client ask its server about a missing file again: it caches that the file is missing for a minute.

    A client asks when a folder is opened (close-to-open consistency). Missing folders are opened from the top down.
    """
    absent = [*itertools.takewhile(lambda folder: not _opens(folder), file.parents)]
    for folder in reversed(absent):
        _opens(folder)


def _opens(folder: Path) -> bool:
    try:
        os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
    except OSError:
        return False
    return True


def lock(file: IO[str] | int) -> None:
    """Lock an open file as `try_lock` does, but wait until it is free."""
    with suppress(OSError):  # the file system has no locks
        fcntl.flock(file, fcntl.LOCK_EX)


def unlock_and_close(descriptor: int) -> None:
    """End the use of a locked file. Closing it is not enough: a process that was forked meanwhile also has it open."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def try_lock(file: IO[str]) -> bool:
    """Lock an open file until it is closed here and in processes that inherit it; False if another holds the lock.

    The kernel releases the lock when its holder dies. It works between machines on NFS 4, GPFS, and Lustre mounted with
    flock; on a file system without locks every caller gets it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:  # others, ENOLCK, ENOSYS, EOPNOTSUPP: the file system has no locks
        return not isinstance(e, BlockingIOError)
    return True
