"""Who a run belongs to: kept in its run directory, and wherever else its name must be nobody else's. No torch."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.schema import JobConfig, training_values
from fsdp_jobs.run.directory import RunDir, as_written, user_name, write_atomic
from fsdp_jobs.run.record import Record


@dataclass(frozen=True)
class Identity(Record):
    """A run's, the same through all its submissions."""

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
        with suppress(OSError, ValueError, BadInput):
            there = Identity.read(RunDir(self.directory).identity)
            return there is not None and there.id == self.id
        return False

    @classmethod
    def read(cls, file: Path) -> Identity | None:
        """Read what `claim` wrote; None where there is nothing."""
        try:
            return cls.from_json(file.read_bytes())
        except FileNotFoundError:
            return None

    def check(self, file: Path) -> None:
        """Check that whatever lies with `file` belongs to this run, or to nobody yet.

        A user who has removed a run directory goes on in a new one of the same name and training configuration; not
        while the other is there.

        Raises:
            BadInput: it is another run's; names its owner.
        """
        other = Identity.read(file)
        if other is None or other.id == self.id:
            return
        is_mine = (other.user, other.host, other.training) == (self.user, self.host, self.training)
        if not is_mine or other.is_there:
            cure = f"another name=...; or, to continue that run from here, copy {file} into the run directory"
            raise BadInput([Problem(str(file.parent), f"belongs to a run of {other.owner}", cure)])


def identity_of(run: RunDir, config: JobConfig) -> Identity:
    """Return a run's identity, or the one that it gets when this user submits it here now."""
    return Identity.read(run.identity) or Identity(
        id=secrets.token_hex(8),
        user=user_name(),
        uid=os.getuid(),
        host=socket.gethostname(),
        directory=str(as_written(run.path)),
        training=hashlib.sha256(json.dumps(training_values(config), sort_keys=True, default=str).encode()).hexdigest(),
    )


def owner_of(run: RunDir) -> str | None:
    """Return whose run it is, for the user; None when it is this user's own, or nobody's yet."""
    try:
        identity = Identity.read(run.identity)
    except PermissionError:
        return f"user {run.identity.stat().st_uid}"
    return None if identity is None or identity.uid == os.getuid() else identity.owner


def check_may_act(run: RunDir) -> None:
    """Check that a run is this user's, who may then stop it or submit it again; root may act on every run.

    Raises:
        BadInput: it is another user's; names the owner.
    """
    if os.getuid() and (owner := owner_of(run)) is not None:
        raise BadInput([Problem(f"run {run.name}", f"belongs to {owner}", "only its owner may stop or resume it")])


def claim(file: Path, identity: Identity) -> None:
    """Write whose run it is."""
    if Identity.read(file) != identity:
        text = identity.to_json(indent=2)
        write_atomic(file, text) if isinstance(file, Path) else file.write_text(text)
