"""What tells a sweep's jobs, and sweeps, apart: overrides in one spelling, and names made from them. No torch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from functools import cache

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

_OF_THE_COMMAND = ("name", "runs_dir", "attach", "dry_run")  # and sweep.*: none of them says what is trained
_LONGEST = 40  # letters of a name that is made here


def key_of(override: str) -> str:
    """`optim.lr` of `+optim.lr=1e-3`."""
    return override.partition("=")[0].lstrip("+~")


def is_of_the_command(override: str) -> bool:
    """Whether an override says how a sweep is submitted, not what its jobs are."""
    key = key_of(override)
    return key in _OF_THE_COMMAND or key.startswith("sweep.")


@cache
def canonical(override: str) -> str:
    """An override in one spelling: `lr=1e-4`, `lr=0.0001` and `+lr=0.00010` are the same."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return override  # whoever composes with it will say what is wrong
    value = parsed.value()
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return f"{parsed.key_or_group}={value!r}"


def identity(overrides: Iterable[str]) -> tuple[str, ...]:
    """What overrides are the same job, whatever their order and spelling."""
    return tuple(sorted(map(canonical, overrides)))


def name_for(swept: Sequence[str], fixed: Iterable[str]) -> str:
    """A name that the same command has again, and the same command with more values of the same keys.

    Args:
        swept: keys that have several values.
        fixed: overrides that all jobs share.
    """
    words = [re.sub(r"[^A-Za-z0-9]+", "-", key.rpartition(".")[2]).strip("-") for key in swept]
    readable = "-".join(word for word in words if word)[:_LONGEST].strip("-") or "sweep"
    told = "\n".join([*identity(fixed), "", *sorted(swept)])
    return f"{readable}-{hashlib.sha256(told.encode()).hexdigest()[:6]}"
