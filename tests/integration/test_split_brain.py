"""A node is cut off while it trains, and healed: what it does alone never meets what its replacement does.

The node is the whole job, so nothing but the coordinator's silence tells it to stop; it goes on reaching the run
directory. Where it is cut off and for how long follows from the seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from fsdp_jobs.checkpoints import catalog
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.tail import read_json_lines
from tests.netns import Fabric, NetnsJob, needs_netns, netns_job
from tests.world import PACED

pytestmark = [pytest.mark.integration, needs_netns, pytest.mark.timeout(240)]

SILENCE_S, LEASE_S = 3, 6
OVERRIDES = (
    *PACED,
    "data.micro_batch=8",
    "steps=1000000",
    "checkpoint.every_steps=20",
    f"elastic.heartbeat_timeout_s={SILENCE_S}",
    f"elastic.lease_s={LEASE_S}",
    "elastic.join_window_s=0",
)


@pytest.fixture(scope="module")
def fabric() -> Iterator[Fabric]:
    with Fabric(["node1", "node2"]) as two:
        yield two


def job_on_node1(fabric: Fabric, folder: Path, *overrides: str) -> AbstractContextManager[NetnsJob]:
    return netns_job(fabric, folder, "cut", *OVERRIDES, *overrides, on=["node1"])


def written_in_turn(job: NetnsJob) -> None:
    """Check that lines and checkpoints of a life come without those of another between them."""
    began = 0
    for event in read_json_lines(job.run.events):
        if event["event"] == "round_started":
            began += 1
    lives: list[list[int]] = [[]]
    for line in job.metrics():
        if lives[-1] and line["step"] != lives[-1][-1] + 1:
            lives.append([])
        lives[-1].append(line["step"])
    assert len(lives) <= began, f"{[(life[0], life[-1]) for life in lives]}\n{job.story()}"
    resumed = [0, *(e["step"] for e in job.events("resumed"))]
    assert all(life[0] - 1 in resumed for life in lives), "a life begins at a checkpoint"


def ends(job: NetnsJob) -> None:
    """Stop the job, and look at what it leaves."""
    step = job.step()
    job.until_step(step + 5)
    write_atomic(job.run.stop_request, "enough")
    verdict = job.wait()
    assert verdict.verdict == "preempted", job.story()
    written_in_turn(job)
    saved = {e["step"] for e in job.events("checkpoint")}
    saved |= {e["step"] for e in job.events("resumed")}  # a rank may be killed between a commit and its event
    found = catalog.find_checkpoints(job.run.checkpoints)
    assert found and {catalog.step_of(f) for f in found} <= saved, job.story()
    assert all(catalog.verify(f) == [] for f in found)
    assert not list(job.run.checkpoints.glob("*.tmp"))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 20))])
def test_the_only_node_is_cut_off_and_replaced(fabric: Fabric, tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    with job_on_node1(fabric, tmp_path, "nodes=1") as job:
        job.until_step(dice.randint(25, 60))
        fabric.cut("node1")
        job.until(lambda: job.events("node_lost"), "silence is noticed", SILENCE_S + 20)
        job.start_process("node2", number=0)
        heals_early = dice.random() < 0.3
        if heals_early:
            fabric.heal("node1")  # its lease still runs, and it is told
        job.until(lambda: len(job.events("round_started")) == 2, "the next round", LEASE_S + 40)
        assert heals_early or not fabric.ranks("node1"), "it trains on beside its replacement"
        begun, lost = job.events("round_started")[1], job.events("node_lost")[0]
        if not heals_early:
            assert begun["time"] - lost["time"] > LEASE_S - SILENCE_S - 1
        job.until(lambda: job.events("resumed"), "the replacement goes on")
        fabric.heal("node1")
        job.until_step(job.step() + dice.randint(10, 40))
        assert len(job.events("round_started")) == 2, "what comes back too late disturbs nobody"
        (other,) = {"node1", "node2"} - set(begun["hosts"])
        assert not fabric.ranks(other)
        job.crash(other)
        ends(job)


def test_the_only_node_of_one_or_two_is_cut_off_and_comes_back_without_a_replacement_and_with_one(
    fabric: Fabric, tmp_path: Path
) -> None:
    with job_on_node1(fabric, tmp_path, "nodes=1:2", "fsdp=no_shard") as job:
        for nodes in (1, 2):
            saved, begun = len(job.events("checkpoint")), len(job.events("round_started"))
            job.until(lambda n=saved: len(job.events("checkpoint")) > n, "a checkpoint")  # type: ignore[misc]
            fabric.cut("node1")
            job.until(lambda n=nodes: len(job.events("node_lost")) == n, "silence is noticed", SILENCE_S + 20)  # type: ignore[misc]
            if nodes == 2:
                job.start_process("node2")
                job.until(lambda n=begun: len(job.events("round_started")) > n, "the next round", LEASE_S + 40)  # type: ignore[misc]
                assert not fabric.ranks("node1")
            else:
                job.until(lambda: not fabric.ranks("node1"), "its ranks are stopped", LEASE_S + 20)
            fabric.heal("node1")
            job.until(
                lambda n=begun, of=nodes: [len(e["nodes"]) for e in job.events("round_started")[n:]][-1:] == [of],  # type: ignore[misc]
                "it is taken in",
            )
            at = job.events("round_started")[-1]["time"]
            job.until(lambda at=at: any(e["time"] > at for e in job.events("resumed")), "it goes on")  # type: ignore[misc]
        ends(job)
