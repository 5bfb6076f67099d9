"""The guards of a running job: each is a folder of `guards/`, with a module for each process that it has a part in."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

GUARDS = ("slow", "stall", "silence", "replicas")  # in the order that the coordinator asks them


def guards_in(process: str) -> list[Any]:
    """Return each guard's class for a process: the `Guard` of its module `control`, `node` or `rank`, if it has one."""
    names = [f"fsdp_jobs.guards.{guard}.{process}" for guard in GUARDS]
    return [import_module(name).Guard for name in names if find_spec(name) is not None]
