"""The versions of torch that jobs run on; `make test-torch` runs this on any of them."""

from __future__ import annotations

import warnings
from datetime import timedelta

import pytest

from fsdp_jobs.config import torch_version
from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.submit.validate import validate
from tests.programs import EXAMPLES
from tests.world import run_world


@pytest.mark.parametrize("name", ["2.9.1+cu128", "2.12.0a0+git1"])
def test_the_trainer_needs_a_newer_torch_than_programs_do(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch_version, "_installed", lambda: name)
    with pytest.raises(BadInput) as refused:
        validate(compose_job(["cluster=local"]))
    assert f"torch {name}" in str(refused.value) and "pip install 'torch>=2.13'" in str(refused.value)
    validate(compose_job(["cluster=local", f"script={EXAMPLES}/plain_torchrun.py"]))
    validate(compose_job(["cluster=kubernetes", "cluster.image=x", "cluster.claim=y"]))  # whose image has another torch


def _set_timeout() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        torch_version.set_timeout(timedelta(seconds=100), None)


def test_nothing_that_torch_has_given_up_is_called() -> None:
    run_world(1, _set_timeout)
