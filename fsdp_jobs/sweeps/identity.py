"""Decide which overrides describe the same job, and name sweeps after their overrides. No torch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from functools import cache

from hydra.errors import HydraException

from fsdp_jobs.config.hydra import key_of, parsed

_OF_THE_COMMAND = ("name", "runs_dir", "attach", "dry_run")  # and sweep.*: they do not change the training
_MAX_LETTERS = 40  # in the readable part of a name


def is_of_the_command(override: str) -> bool:
    """Whether an override defines how a sweep is submitted, not what its jobs are."""
    key = key_of(override)
    return key in _OF_THE_COMMAND or key.startswith("sweep.")


@cache
def canonical(override: str) -> str:
    """Return an override in its canonical spelling, equal for `lr=1e-4`, `lr=0.0001` and `+lr=0.00010`."""
    try:
        read = parsed(override)
    except HydraException:
        return override  # composing the job reports the problem
    value = read.value()
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return f"{read.key_or_group}={value!r}"


def identity(overrides: Iterable[str]) -> tuple[str, ...]:
    """Return a key that is equal for overrides of the same job, whatever their order and spelling."""
    return tuple(sorted(map(canonical, overrides)))


def name_for(swept: Sequence[str], fixed: Iterable[str]) -> str:
    """Name a sweep: a repeated command gets the same name, also with more values of the same keys.

    Args:
        swept: keys that have several values.
        fixed: overrides that all jobs share.
    """
    words = [re.sub(r"[^A-Za-z0-9]+", "-", key.rpartition(".")[2]).strip("-") for key in swept]
    readable = "-".join(word for word in words if word)[:_MAX_LETTERS].strip("-") or "sweep"
    content = "\n".join([*identity(fixed), "", *sorted(swept)])
    return f"{readable}-{hashlib.sha256(content.encode()).hexdigest()[:6]}"
