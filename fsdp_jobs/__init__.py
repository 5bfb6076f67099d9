"""fsdp_jobs: plan, launch and keep alive multi-node FSDP training.

`from fsdp_jobs import job` is the library of training programs, `from fsdp_jobs import Job` a job in a notebook.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_jobs.notebook import Job as Job


def __getattr__(name: str) -> Any:
    """Look up what is seldom asked for: `Job`, which no rank needs, and `__version__`, as it was installed."""
    if name == "Job":
        from fsdp_jobs.notebook import Job

        return Job
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("fsdp_jobs")
    except PackageNotFoundError:
        return "unknown"  # a copy of the code, which is not installed
