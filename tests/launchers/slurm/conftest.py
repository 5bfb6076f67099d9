"""Real SLURM clusters for the tests of this folder, one of each profile, while they are needed."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launchers.slurm.lab import Lab, why_not


def _running(profile: str) -> Iterator[Lab]:
    if why_not():
        pytest.skip(why_not())
    made = Lab(Path(f"/tmp/fsdp_jobs-slurm-{profile}-{os.getpid()}"), profile)  # the path of a socket must be short
    made.up()
    yield made
    made.do("down")
    assert not made.folder.exists()


@pytest.fixture(scope="package")
def lab() -> Iterator[Lab]:
    yield from _running("default")


@pytest.fixture(scope="module")
def old() -> Iterator[Lab]:
    """Whole nodes, no accounting, no GPUs counted, no arrays, and no cgroups."""
    yield from _running("old")


@pytest.fixture(scope="module")
def gpu() -> Iterator[Lab]:
    """GPUs of a type, interleaved leaves, small arrays, private data, and a job_submit.lua that wants a project."""
    yield from _running("gpu")
