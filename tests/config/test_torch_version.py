"""The versions of torch that jobs run on; `make test-torch` runs this on any of them."""

from __future__ import annotations

import warnings
from datetime import timedelta

from fsdp_jobs.config import torch_version
from tests.world import run_world


def _set_timeout() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        torch_version.set_timeout(timedelta(seconds=100), None)


def test_nothing_that_torch_has_given_up_is_called() -> None:
    run_world(1, _set_timeout)
