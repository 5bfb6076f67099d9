"""A node that is slower than the others."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.jobs import cli, job
from tests.netns import Fabric, NetnsJob, needs_netns, netns_job
from tests.world import TINY_LLAMA, TINY_TASK

pytestmark = pytest.mark.integration

WARM_UP, WINDOW = 50, 20  # steps
SLEEPY = ("model=custom", "model._target_=tests.models.sleepy", "model.wrap_classes=[Sleepy]", "fsdp=full_shard")
TASK = (*TINY_TASK, "data.micro_batch=4", "steps=100000", "log_every_steps=5", "elastic.heartbeat_interval_s=0.25")


def test_a_node_at_nine_tenths_of_the_speed_is_named(tmp_path: Path) -> None:
    slow_rank = tmp_path / "slow"
    slow_rank.write_text("2")
    with job(tmp_path, "slow", *SLEEPY, *TASK, nodes="3", nproc=1, tiny=False, SLOW_FILE=str(slow_rank)) as slow:
        slow.until(lambda: bool(slow.events("slow_node")), "it is named")
        (event,) = slow.events("slow_node")
        assert (event["node"], event["cause"], event["others"]) == (2, "compute", 2), event
        assert 1.07 < event["own_s"] / event["others_s"] < 1.2, event
        told = cli(tmp_path, "status", "slow").stdout
        assert "node 2" in told and "is slow: its forward pass takes" in told and "GPU hours a day" in told, told


def ten_are_named(
    fabric: Fabric, folder: Path, overrides: Sequence[str], slow: Callable[[NetnsJob, int | None], None], **env: str
) -> None:
    """Have ten ranks become slow one after the other; `slow` makes the one that it is given so, and no other."""
    named = 0
    for number in range(3):
        with netns_job(fabric, folder / str(number), "ten", *overrides, *TASK, **env) as ten:
            ten.until_step(1)
            slow(ten, None)
            ten.until(lambda job=ten: job.step() >= WARM_UP + 2 * WINDOW, "some windows")
            for rank in random.Random(number).sample(range(4), min(4, 10 - named)):
                assert len(ten.events("slow_node")) == named - 4 * number, "one was named that is not slow"
                slow(ten, rank)
                since, named = ten.step(), named + 1
                told = named - 4 * number
                ten.until(lambda n=told, job=ten: len(job.events("slow_node")) >= n, "named")
                found, steps = ten.events("slow_node")[-1], ten.step() - since
                print(f"{found['own_s'] / found['others_s']:.3f} of the others, {steps} steps later", flush=True)
                assert found["node"] == ten.events("round_started")[0]["nodes"][rank], found
                assert steps <= 7 * WINDOW, "five windows of a few steps over 20, after the one it begins in"
    assert named == 10


@pytest.mark.soak
@needs_netns
@pytest.mark.timeout(900)
def test_ten_of_ten_nodes_that_become_slow_are_named_within_five_windows(tmp_path: Path) -> None:
    slow_rank = tmp_path / "slow"
    slow_rank.write_text("")

    def slow(_: NetnsJob, rank: int | None) -> None:
        slow_rank.write_text("" if rank is None else str(rank))

    with Fabric([f"node{i}" for i in range(4)]) as fabric:
        ten_are_named(fabric, tmp_path, SLEEPY, slow, SLOW_FILE=str(slow_rank))


@contextmanager
def part_of_a_core(number: int) -> Iterator[Callable[[float, list[int]], None]]:
    """Yield what lets processes have so much of a core from now on, by a cgroup of their own (version 1 or 2)."""
    controller = Path("/sys/fs/cgroup/cpu")
    group = (controller if controller.exists() else controller.parent) / f"fsdp-jobs-test-{os.getpid()}-{number}"
    group.mkdir()

    def limit(part: float, pids: list[int]) -> None:
        period = 4_000  # us; longer ones make the time of a block uneven
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"{int(part * period)} {period}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(period))
            (group / "cpu.cfs_quota_us").write_text(str(int(part * period)))
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))

    try:
        yield limit
    finally:
        while (group / "cgroup.procs").read_text():  # they were killed
            time.sleep(0.1)
        group.rmdir()


@pytest.mark.soak
@needs_netns
@pytest.mark.timeout(900)
def test_ten_of_ten_nodes_that_get_a_tenth_less_of_a_core_are_named(tmp_path: Path) -> None:
    """Each node has three tenths of a core; needs two cores with little else to do."""
    model = ("model=custom", "model._target_=tests.models.busy", "model.wrap_classes=[Busy]", "fsdp=full_shard")
    with ExitStack() as stack:
        fabric = stack.enter_context(Fabric([f"node{i}" for i in range(4)]))
        limits = [stack.enter_context(part_of_a_core(i)) for i in range(4)]

        def slow(job: NetnsJob, rank: int | None) -> None:
            chosen = None if rank is None else job.events("round_started")[0]["nodes"][rank]
            for node, limit in enumerate(limits):
                limit(0.27 if node == chosen else 0.3, [process.pid for process in fabric.ranks(f"node{node}")])

        ten_are_named(fabric, tmp_path, model, slow)


@pytest.mark.soak
@needs_netns
@pytest.mark.timeout(900)
def test_no_node_is_named_on_busy_cores(tmp_path: Path) -> None:
    overrides = (*TINY_LLAMA, "fsdp=full_shard", *TASK)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        with Fabric([f"node{i}" for i in range(4)]) as fabric, netns_job(fabric, tmp_path, "busy", *overrides) as four:
            four.until_step(WARM_UP)
            time.sleep(180)
            print(f"{four.step()} steps of {four.metrics()[-1]['step_s']:.3f} s: {four.events('slow_steps')}")
            assert four.step() > WARM_UP + 10 * WINDOW and not four.events("slow_node"), four.events("slow_node")
    finally:
        for process in busy:
            process.kill()
