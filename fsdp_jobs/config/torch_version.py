"""Compatibility shims for the supported versions of torch. Imports torch in ranks only.

docs/guides/torchrun.md lists the tested versions.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def set_timeout(timeout: timedelta, group: ProcessGroup | None) -> None:
    """Set the timeout of a group's collectives; None: of the default group's."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    getattr(dist, "set_timeout", distributed_c10d._set_pg_timeout)(timeout, group)  # public since 2.14
