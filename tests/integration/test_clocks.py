"""A node whose clock is an hour off: what is told of the job's time is told by its coordinator's."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from fsdp_jobs.run.status import RunStatus
from fsdp_jobs.run.tail import read_json_lines
from tests.netns import Fabric, NetnsJob, needs_netns

pytestmark = [pytest.mark.integration, needs_netns, pytest.mark.timeout(240)]


@pytest.mark.parametrize("off_s", [3600, -3600])
def test_where_the_time_went_is_right_though_a_nodes_clock_is_wrong(tmp_path: Path, off_s: float) -> None:
    began = time.time()
    with Fabric(["node1"]) as fabric:
        job = NetnsJob(fabric, tmp_path, "clocks", "steps=1000000", "checkpoint.every_steps=10")
        job.clocks["node1"] = off_s
        job.start()
        try:
            job.until_step(30)
            (rank,) = fabric.ranks("node1")
            rank.send_signal(signal.SIGKILL)
            job.until(lambda: job.events("resumed") and job.step() > 60, "steps after the failure")
        finally:
            job.kill()
    took = time.time() - began
    status = RunStatus(job.run)
    status.update()
    told = [record["time"] for file in (job.run.events, job.run.metrics) for record in read_json_lines(file)]
    assert began - 1 < min(told) and max(told) < began + took + 1, job.story()
    spent = status.goodput
    assert 0 < spent.wall_s <= took and spent.useful_s + spent.stall_s + spent.lost_s + spent.recover_s <= spent.wall_s
    assert 0 < spent.recover_s <= took and spent.lost_s <= took
    (failure,) = status.breaks
    assert failure.recovered_s is not None and 0 < failure.recovered_s < took
    assert status.checkpoint_age_s is not None and 0 <= status.checkpoint_age_s <= took + 1
