"""List the paths that a job in containers reads and writes outside its image."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fsdp_jobs.config.data import input_paths
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import as_written


class Mount(NamedTuple):
    """A path of this machine, and where a container has it."""

    source: str
    target: str
    is_read_only: bool = False

    def __str__(self) -> str:
        return f"{self.source}:{self.target}{':ro' * self.is_read_only}"


def mounts_of(config: JobConfig, run: RunDir) -> Iterator[Mount]:
    """Yield the paths of a job, each mounted at the same path; `checkpoint.dir` may not exist yet."""
    yield Mount(str(run.path), str(run.path))
    if config.checkpoint.dir is not None and "://" not in config.checkpoint.dir:
        yield Mount(config.checkpoint.dir, config.checkpoint.dir)
    for path in map(as_written, input_paths(config)):
        yield Mount(str(path), str(path), is_read_only=True)
