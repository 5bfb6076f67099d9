"""List the leaves of a running job: folders of `guards/` and `tiers/`, with one module per kind of process."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

# Guards in the order in which the coordinator calls them; tiers besides shared storage and the nodes' disks, the
# slowest first.
LEAVES = ("guards.slow", "guards.stall", "guards.silence", "guards.replicas", "tiers.memory")


def guards_in(process: str) -> list[Any]:
    """Return each guard's class for a process: `Guard` in its module `control`, `node` or `rank`, if there is one."""
    return [import_module(name).Guard for name in modules_in(process, "guards")]


def tiers_in(process: str) -> list[Any]:
    """Return each tier's class for a process: `Tier` in its module `node` or `rank`."""
    return [import_module(name).Tier for name in modules_in(process, "tiers")]


def modules_in(process: str, kind: str = "") -> list[str]:
    """Return the names of leaves' modules for a process; those of ranks are imported before it is forked."""
    names = (f"fsdp_jobs.{leaf}.{process}" for leaf in LEAVES if leaf.startswith(kind))
    return [name for name in names if find_spec(name) is not None]
