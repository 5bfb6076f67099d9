"""One real SLURM cluster for all tests of this folder."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launchers.slurm.lab import Lab, why_not


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    if why_not():
        pytest.skip(why_not())
    made = Lab(Path(f"/tmp/fsdp_jobs-slurm-{os.getpid()}"))  # the path of a socket must be short
    made.do("up")
    yield made
    made.do("down")
    assert not made.folder.exists()
