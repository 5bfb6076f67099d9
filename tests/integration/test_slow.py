"""A node that is slower than the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import cli, job
from tests.world import TINY_TASK

pytestmark = pytest.mark.integration

WARM_UP, FIVE_WINDOWS = 50, 100  # steps
SLEEPY = ("model=custom", "model._target_=tests.models.sleepy", "model.wrap_classes=[Sleepy]", "fsdp=full_shard")
TASK = (*TINY_TASK, "data.global_batch=6", "data.micro_batch=2", "elastic.heartbeat_interval_s=0.25")


def test_a_node_at_nine_tenths_of_the_speed_is_named(tmp_path: Path) -> None:
    overrides = (*SLEEPY, *TASK, "steps=1000", "log_every_steps=10")
    with job(tmp_path, "slow", *overrides, nodes="3", nproc=1, tiny=False, SLOW_RANK="2") as slow:
        slow.until(lambda: bool(slow.events("slow_node")), "it is named")
        (event,) = slow.events("slow_node")
        assert (event["node"], event["cause"], event["others"]) == (2, "compute", 2), event
        assert 1.07 < event["own_s"] / event["others_s"] < 1.2, event
        told = cli(tmp_path, "status", "slow").stdout
        assert "node 2" in told and "is slow: its forward pass takes" in told and "GPU hours a day" in told, told
