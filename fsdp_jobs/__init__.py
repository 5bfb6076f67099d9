"""fsdp_jobs: plan, launch and keep alive multi-node FSDP training.

`from fsdp_jobs import job` is the library of training programs, `from fsdp_jobs import Job` a job in a notebook.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_jobs.notebook import Job as Job

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `Job` when it is asked for: a rank needs none of what it needs."""
    if name != "Job":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fsdp_jobs.notebook import Job

    return Job
