"""List the leaves of a running job: folders of `guards/` and `tiers/`, with one module per kind of process."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

GUARDS = ("slow", "stall", "silence", "replicas")  # in the order in which the coordinator calls them
TIERS = ("memory",)  # besides shared storage and the nodes' disks; faster tiers come later


def guards_in(process: str) -> list[Any]:
    """Return each guard's class for a process: `Guard` in its module `control`, `node` or `rank`, if there is one."""
    return [import_module(name).Guard for name in _names("guards", GUARDS, process)]


def tiers_in(process: str) -> list[Any]:
    """Return each tier's class for a process: `Tier` in its module `node` or `rank`."""
    return [import_module(name).Tier for name in _names("tiers", TIERS, process)]


def modules_in(process: str) -> list[str]:
    """Return the names of all leaves' modules for a process, which are imported before it is forked."""
    return [*_names("guards", GUARDS, process), *_names("tiers", TIERS, process)]


def _names(kind: str, leaves: tuple[str, ...], process: str) -> list[str]:
    names = [f"fsdp_jobs.{kind}.{leaf}.{process}" for leaf in leaves]
    return [name for name in names if find_spec(name) is not None]
