"""What TorchX's own runner does with the launchers."""

from __future__ import annotations

import pytest
from torchx.runner import get_runner
from torchx.specs import AppDef, Resource, Role

from fsdp_jobs.config.errors import BadInput


@pytest.mark.parametrize("scheduler", ["local_fsdp", "slurm_fsdp"])
def test_a_job_that_torchx_would_submit_is_refused_with_the_command_that_submits_it(scheduler: str) -> None:
    """It ended with a KeyError."""
    role = Role("trainer", image="", resource=Resource(cpu=1, gpu=0, memMB=1))
    with get_runner() as runner, pytest.raises(BadInput, match="fsdp-jobs submits") as raised:
        runner.dryrun(AppDef("a", roles=[role]), scheduler, {})
    assert "torchx run" in str(raised.value)
