"""Record a run's owner in its run directory and in every other place that must belong to this run only. No torch."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.schema import JobConfig, training_values
from fsdp_jobs.run.directory import RunDir, user_name
from fsdp_jobs.run.files import as_written, write_atomic
from fsdp_jobs.run.record import Record


@dataclass(frozen=True)
class Identity(Record):
    """The identity of a run, the same for all its submissions."""

    id: str
    user: str
    uid: int
    host: str
    directory: str  # on that host
    training: str  # digest of the training configuration that the run began with

    @property
    def owner(self) -> str:
        return f"{self.user} on {self.host} ({self.directory})"

    @property
    def is_there(self) -> bool:
        """Whether this machine sees the run's directory."""
        with suppress(OSError, BadInput):
            there = Identity.from_file(RunDir(self.directory).identity)
            return there is not None and there.id == self.id
        return False

    def may_be_copy(self, run: RunDir) -> bool:
        """Whether `run`, which has this identity, may be a copy of another directory, here or on another machine."""
        if self.is_there:
            return not run.path.samefile(self.directory)
        return self.host != socket.gethostname()

    def check(self, file: Path) -> None:
        """Check that the folder of `file` belongs to this run, or to no run yet.

        A user who has removed a run directory may continue in a new one of the same name and training configuration,
        but not while the old one exists.

        Raises:
            BadInput: it belongs to another run; names its owner.
        """
        other = Identity.from_file(file)
        if other is None or other.id == self.id:
            return
        is_mine = (other.user, other.host, other.training) == (self.user, self.host, self.training)
        if not is_mine or other.is_there:
            cure = f"another name=...; or, to continue that run from here, copy {file} into the run directory"
            raise BadInput.at(str(file.parent), f"belongs to a run of {other.owner}", cure)


def identity_of(run: RunDir, config: JobConfig) -> Identity:
    """Return a run's identity, or the one that it would get if this user submitted it here now."""
    return Identity.from_file(run.identity) or Identity(
        id=secrets.token_hex(8),
        user=user_name(),
        uid=os.getuid(),
        host=socket.gethostname(),
        directory=str(as_written(run.path)),
        training=hashlib.sha256(json.dumps(training_values(config), sort_keys=True, default=str).encode()).hexdigest(),
    )


def owner_of(run: RunDir) -> str | None:
    """Return the owner of a run, as shown to users; None if it is this user, or if there is none yet."""
    try:
        identity = Identity.from_file(run.identity)
    except PermissionError:
        return f"user {run.identity.stat().st_uid}"
    return None if identity is None or identity.uid == os.getuid() else identity.owner


def check_may_act(run: RunDir) -> None:
    """Check that this user may stop a run or submit it again: its owner may, and root.

    Raises:
        BadInput: it belongs to another user; names the owner.
    """
    if os.getuid() and (owner := owner_of(run)) is not None:
        raise BadInput.at(f"run {run.name}", f"belongs to {owner}", "only its owner may stop or resume it")


def claim(file: Path, identity: Identity) -> None:
    """Write a run's identity to a file."""
    if Identity.from_file(file) != identity:
        text = identity.to_json(indent=2)
        write_atomic(file, text) if isinstance(file, Path) else file.write_text(text)
