"""Manage the folders that agents keep in their machine's memory. No torch.

An agent locks its folders while it lives. Another agent of the same user may adopt or remove an unlocked folder, which
it identifies by its name: the kind of folder comes first.
"""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil
import xxhash

from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import try_lock
from fsdp_jobs.run.processes import kill_orphans_of
from fsdp_jobs.run.threads import wait_until

RANKS = "ranks"  # a kind of folder: rank states, sockets and semaphores
DYING_S = 10.0  # for the ranks of an agent that was killed to end
_LOCK = "lock"


def make(base: Path, name: str) -> tuple[Path, IO[str]]:
    """Make a folder whose name begins with `name`, and lock it before others can see it.

    Raises:
        OSError: no folder can be made in `base`.
    """
    folder = base / f"{prefix(name)}{secrets.token_hex(4)}"
    return folder, make_at(folder)


def make_at(folder: Path) -> IO[str]:
    """Make this folder and return its lock.

    Raises:
        OSError: it cannot be made, or exists.
    """
    hidden = folder.with_name(f".{folder.name}")
    hidden.mkdir(mode=0o700)
    try:
        lock = (hidden / _LOCK).open("w+")
        try_lock(lock)
        _sign(lock)
        hidden.rename(folder)
    except OSError as e:
        shutil.rmtree(hidden, ignore_errors=True)
        e.filename = e.filename or str(hidden)  # with a full disk the error names no file
        raise
    return lock


def owned(base: Path, name: str) -> list[Path]:
    """Return this user's folders whose names begin with `name`, locked or not."""
    found = []
    for folder in base.glob(f"{prefix(name)}*"):
        with suppress(OSError):  # it has just been removed
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
                found.append(folder)
    return found


def remove(base: Path, name: str) -> None:
    """Remove this user's folders whose names begin with `name`, except those whose agent lives.

    Kills processes that used such a folder and have lost their rank.
    """
    for folder in owned(base, name):
        if (lock := take(folder, DYING_S)) is not None:
            kill_orphans_of(folder)
            discard(folder, lock)


def discard(folder: Path, lock: IO[str]) -> None:
    """Remove a folder, and then release its lock."""
    shutil.rmtree(folder, ignore_errors=True)
    lock.close()


def take(folder: Path, patience_s: float = 0) -> IO[str] | None:
    """Lock a folder whose agent has died; None while the agent lives, or if the folder has just been removed.

    Ranks also hold their agent's lock and die shortly after it; `patience_s` allows for that.
    """
    with suppress(OSError):
        lock = (folder / _LOCK).open("r+")
        wait_until(lambda: try_lock(lock) or _agent_lives(lock), patience_s, 0.1)
        with suppress(OSError):
            if try_lock(lock) and os.path.samestat(os.fstat(lock.fileno()), (folder / _LOCK).stat()):
                _sign(lock)
                return lock
        lock.close()
    return None


def _sign(lock: IO[str]) -> None:
    lock.seek(0)
    lock.truncate()
    lock.write(str(os.getpid()))
    lock.flush()


def _agent_lives(lock: IO[str]) -> bool:
    lock.seek(0)
    signed = lock.read()
    return signed.isdecimal() and psutil.pid_exists(int(signed))


def mark_of(run: RunDir) -> str:
    """Return the mark in the names of a run's folders, for disks that other runs of the same name may also use."""
    return xxhash.xxh3_64_hexdigest(str(run.path.resolve()).encode())


def snapshots_of(run: RunDir) -> str:
    """Return the prefix of the names of folders with a run's snapshots."""
    return f"memory-{mark_of(run)}"


def prefix(name: str) -> str:
    """Return the prefix of the names of this user's folders of a kind."""
    return f"fsdp_jobs-{os.getuid()}-{name}-"
