"""Declare a configuration key in one line: its default, its meaning and its allowed values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import field, fields, is_dataclass
from typing import Any

from fsdp_jobs.config.errors import Problem, nearest

AUTO = "auto"


def key(
    default: Any,
    meaning: str,
    *,
    choices: Sequence[str | bool] = (),
    at_least: Any = ...,
    below: float | None = None,
) -> Any:
    """Return a dataclass field with the key's meaning and bounds as its metadata.

    Args:
        default: `"???"` for a required key.
        meaning: one line of docs/reference/configuration.md, with the unit unless the name has it.
        choices: the allowed values; for a list, those of each item.
        at_least: the smallest allowed number; by default 0 for a key whose default is a number. None: any.
        below: allowed numbers are below this one.
    """
    if at_least is ...:
        at_least = 0 if type(default) in (int, float) else None
    about = {"meaning": meaning, "choices": choices, "at_least": at_least, "below": below}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy(default), metadata=about)
    return field(default=default, metadata=about)


def metadata(schema: type, name: str) -> Mapping[str, Any]:
    """Return the metadata of a key; if a subclass only changes the default, that of its base class."""
    declared = (vars(base).get("__dataclass_fields__", {}).get(name) for base in schema.__mro__)
    return next((f.metadata for f in declared if f is not None and f.metadata), {})


def dotted(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all dotted keys of nested mappings with their values, groups included: `optim`, `optim.lr`, ..."""
    for name, value in tree.items():
        yield f"{prefix}{name}", value
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{name}.")


def value_problems(config: Any, prefix: str = "", unread: tuple[str, ...] = ()) -> Iterator[Problem]:
    """Check each value of a configuration, or of one of its groups, against the bounds of its key.

    Args:
        config: an instance of a dataclass whose fields were declared with `key`.
        prefix: of the group, with a dot at its end.
        unread: keys and groups (with a dot at their end) that nothing reads, so that any value is allowed.
    """
    for declared in fields(config):
        name, value = prefix + declared.name, getattr(config, declared.name)
        if is_dataclass(value):
            yield from value_problems(value, f"{name}.", unread)
            continue
        if value is None or name.startswith(unread):
            continue
        bounds = metadata(type(config), declared.name)
        choices, least, below = bounds["choices"], bounds["at_least"], bounds["below"]
        for item in value if isinstance(value, list) else [value]:
            if choices and item not in choices:
                shown = f"[{item}]" if isinstance(value, list) else item
                hint = nearest(str(item), map(str, choices))
                yield Problem(f"{name}={shown}", f"allowed: {', '.join(map(str, choices))}", hint)
        if least is not None and value != AUTO and not isinstance(value, int | float):
            yield Problem(f"{name}={value}", "must be a number", f"{name}={least:g}, or above")
        elif isinstance(value, float) and not math.isfinite(value):
            yield Problem(f"{name}={value}", "must be a finite number", bounds["meaning"])
        elif least is not None and value != AUTO and value < least:
            yield Problem(f"{name}={value}", f"must be at least {least:g}", f"{name}={least:g}: {bounds['meaning']}")
        elif below is not None and value >= below:
            yield Problem(f"{name}={value}", f"must be below {below:g}", bounds["meaning"])
