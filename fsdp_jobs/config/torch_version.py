"""What differs between the versions of torch that jobs run on: the one place that knows. Imports torch in ranks only.

Programs run on 2.9 and later; the trainer, and `no_shard` of the library, need what 2.13 has.
docs/guides/torchrun.md has the versions that were tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from fsdp_jobs.config.errors import JobFailed, Problem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_FSDP = (2, 13)  # the first whose FSDP2 is the trainer's: `replicate` takes a mesh


def trainer_problems() -> Iterator[Problem]:
    """Yield why the trainer cannot run with this machine's torch; nothing where there is none."""
    try:
        found = _installed()
    except PackageNotFoundError:
        return
    if _is_older(found):
        what = f"the trainer needs torch {_FSDP[0]}.{_FSDP[1]} or newer; programs (script=, module=) run on this one"
        yield Problem(f"torch {found}", what, f"pip install 'torch>={_FSDP[0]}.{_FSDP[1]}'")


def require_new_fsdp(what: str) -> None:
    """Check the torch of a rank, which may be another than that of the submitting machine.

    Raises:
        JobFailed: it is too old for `what`.
    """
    import torch

    if _is_older(torch.__version__):
        raise JobFailed(f"{what} needs torch {_FSDP[0]}.{_FSDP[1]} or newer, this rank has {torch.__version__}")


def set_timeout(timeout: timedelta, group: ProcessGroup | None) -> None:
    """Set after how long collectives of a group fail; without one, of the default group."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    getattr(dist, "set_timeout", distributed_c10d._set_pg_timeout)(timeout, group)  # public since 2.14


def _is_older(found: str) -> bool:
    return tuple(int(number) for number in found.split(".")[:2]) < _FSDP


@cache
def _installed() -> str:
    return version("torch")
