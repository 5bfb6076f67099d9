"""Remove the directories of runs that ended long ago. No torch."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fsdp_jobs.checkpoints.catalog import is_checkpoint
from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.schema import load_config
from fsdp_jobs.run.directory import RunDir, checkpoints_of, runs_in
from fsdp_jobs.run.files import exists
from fsdp_jobs.run.identity import Identity
from fsdp_jobs.run.status import ENDED
from fsdp_jobs.run.table import listed
from fsdp_jobs.run.term import TERMS
from fsdp_jobs.submit.overview import Overview

_GOING = ".pruned-"  # prefix of a directory that is being removed: no run has such a name


@dataclass(frozen=True)
class Old:
    """A run that may be removed."""

    run: RunDir
    state: str
    submission: str
    ended_at: float  # seconds since 1970, by its newest file
    bytes: int  # in its directory


def old_runs(runs_dir: str, older_than_s: float, keep: Sequence[str]) -> Iterator[Old]:
    """Yield this user's runs that have ended, by their records and launchers, and have not changed for a time.

    Args:
        runs_dir: the folder of the runs.
        older_than_s: seconds since the newest change of any of a run's files.
        keep: names of runs to keep.
    """
    runs = [run for run in runs_in(runs_dir) if run.name not in keep]
    for run, row in Overview().look(runs).items():
        if row.owner is not None or row.state not in ENDED:
            continue
        place = run.path.resolve()  # the run may be a symbolic link
        with suppress(FileNotFoundError):  # it changes just now
            stats = [file.lstat() for file in (place, *place.rglob("*"))]
            changed_at = max(stat.st_mtime for stat in stats)
            if time.time() - changed_at > older_than_s:
                yield Old(run, row.state, run.submission, changed_at, sum(stat.st_size for stat in stats))


def remove(old: Old) -> list[str]:
    """Remove a run's checkpoints elsewhere, then its directory; return what stays, and why.

    If this is interrupted, a hidden folder remains that no verb lists as a run: see `unfinished`.
    """
    place = old.run.path.resolve()
    try:
        inside = (entry for entry in place.rglob("*") if entry.is_dir() and not entry.is_symlink())
        folders = [old.run.path.parent, place.parent, place, *inside]
        if closed := [folder for folder in folders if not os.access(folder, os.W_OK | os.X_OK)]:
            raise PermissionError(errno.EACCES, "you may not write there", str(closed[0]))
        with old.run.locked(wait_s=0):
            if old.run.submission != old.submission:
                return [f"{old.run.path}: has been submitted again"]
            return _remove(old.run)
    except BadInput as e:
        return [f"{old.run.path}: {e.problems[0].what}"]
    except OSError as e:
        if not place.exists():  # another command has removed it
            return []
        return [f"{e.filename or old.run.path}: {e.strerror}"]


def _remove(run: RunDir) -> list[str]:
    problems = []
    home = None
    with suppress(Exception):  # a config of another version: keep the checkpoints elsewhere
        home = checkpoints_of(load_config(run.config).checkpoint, run)
    if home is not None and home != run.checkpoints:
        try:
            claimed, own = Identity.from_file(home / run.identity.name), Identity.from_file(run.identity)
            if claimed is not None and (own is None or own.id != claimed.id):
                problems.append(f"{home}: belongs to a run of {claimed.owner}")
            elif own is not None and own.may_be_copy(run):
                problems.append(f"{home}: may be in use by the run that this one is a copy of, {own.owner}")
            elif left := _remove_checkpoints(home, run.identity.name):
                problems.append(f"{home}: {listed(left)} stays: no save of this run wrote it")
        except Exception as e:  # clients of object stores raise any exception
            return [f"{home}: {type(e).__name__}: {e}"]  # the run directory stays, so that the next try finds them
    # Renamed in place, because a full disk may have no room for a new folder to move it into.
    return problems + erase(run.path.rename(run.path.with_name(f"{_GOING}{run.name}-{secrets.token_hex(4)}")))


def unfinished(runs_dir: str) -> list[Path]:
    """Return this user's directories that an interrupted command has begun to remove."""
    return [folder for folder in sorted(Path(runs_dir).glob(f"{_GOING}*")) if folder.lstat().st_uid == os.getuid()]


def erase(folder: Path) -> list[str]:
    """Remove a directory, or a link and the one behind it; return what could not be.

    Another command may be removing it at the same time.
    """
    try:
        while (place := folder.resolve()).exists():
            with suppress(FileNotFoundError):
                shutil.rmtree(place)
        if folder.is_symlink():
            folder.unlink(missing_ok=True)
    except OSError as e:  # on NFS a file that is still open stays
        return [f"{folder}: {e.filename}: {e.strerror}"]
    return []


def _remove_checkpoints(home: Path, identity: str) -> list[str]:
    """Remove what a run has written into its folder of checkpoints; return the names of all other entries."""
    if not exists(home):
        return []
    others = []
    for entry in sorted(home.iterdir(), key=lambda entry: entry.name == identity):  # last: it names the owner
        if not (entry.name in (TERMS, identity) or is_checkpoint(entry)):
            others.append(entry.name)
        elif not isinstance(entry, Path):
            entry.fs.rm(entry.path, recursive=True)
        elif entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    if not others and isinstance(home, Path):
        home.rmdir()
    return others
