"""Machines with their own memory, of which some are lost: the rest has every step."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest

from fsdp_jobs.tiers.memory.slots import slots_in
from tests.jobs import signal_all
from tests.netns import Fabric, NetnsJob, needs_netns, netns_job
from tests.world import run_world, train_here

pytestmark = [pytest.mark.integration, needs_netns, pytest.mark.timeout(900)]

EACH_STEP = ("checkpoint.memory.every_steps=1", "checkpoint.every_steps=0", "elastic.join_window_s=0")
FULL = "fsdp.strategy=full_shard"
JOBS = {
    "full": ("steps=80", FULL),
    "hybrid": ("steps=48", "fsdp.strategy=hybrid_shard", "fsdp.shard_group=2"),
}


@pytest.fixture(scope="module")
def fabric() -> Iterator[Fabric]:
    with Fabric([f"node{i}" for i in range(1, 5)], ["leaf1", "leaf1", "leaf2", "leaf2"]) as four:
        yield four


def job_on(fabric: Fabric, folder: Path, *overrides: str, on: Sequence[str] = ()) -> AbstractContextManager[NetnsJob]:
    return netns_job(fabric, folder, "kept", "nodes=4", "nproc_per_node=1", *EACH_STEP, *overrides, on=on)


def memories_of(fabric: Fabric, node: str) -> list[Path]:
    """The folders of a machine's snapshots, seen from outside; a job that a test gave up may have left another."""
    folders = Path(f"/proc/{fabric.machines[node].pid}/root/dev/shm").glob("fsdp_jobs-*-memory-*")
    return sorted(folders, key=lambda folder: folder.stat().st_mtime)


def kept(fabric: Fabric, nodes: Sequence[str] = ()) -> int:
    """The newest step of which these machines, or all, have snapshots, with copies elsewhere; -1 for none.

    That may be some steps ago: a rank whose last snapshot is not yet copied vetoes the next one.
    """
    newest = []
    for node in nodes or fabric.nodes:
        found = [(slot.snapshot(), slot) for folder in memories_of(fabric, node)[-1:] for slot in slots_in(folder)]
        copied = [(s.term, s.step) for s, slot in found if s is not None and slot.copied.exists()]
        newest.append(max(copied, default=(-1, -1)))
    return min(newest)[1] if len({term for term, _ in newest}) == 1 else -1


def _calm(folder: str) -> dict[str, dict[int, float]]:
    names = ("full", "hybrid")
    return {n: dict(enumerate(train_here(f"{folder}/{n}", JOBS[n], nodes=4), start=1)) for n in names}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, float]]:
    """Losses of jobs that nothing happens to, by strategy."""
    losses: dict[str, dict[int, float]] = run_world(4, _calm, str(tmp_path_factory.mktemp("calm")))[0]
    return losses


def lose_two_machines(fabric: Fabric, job: NetnsJob) -> None:
    """One after the other: of a step that all machines had nothing is lost."""
    for lost in ("node3", "node1"):
        begun = job.step()
        job.until(lambda at=begun: kept(fabric) >= at + 4, "snapshots")  # type: ignore[misc]
        all_had, rounds = kept(fabric), len(job.events("resumed"))
        job.crash(lost)
        job.until(lambda n=rounds: len(job.events("round_broken")) > n, "the loss is noticed")  # type: ignore[misc]
        job.replace(lost)
        job.until(lambda n=rounds: len(job.events("resumed")) > n, "resumed")  # type: ignore[misc]
        resumed = job.events("resumed")[-1]
        assert resumed["place"] == "memory" and resumed["step"] >= all_had, (all_had, job.story())
        assert resumed["sent"] > 0, "the new machine had nothing"


def test_a_lost_machine_costs_no_step_that_all_had(
    fabric: Fabric, tmp_path: Path, calm: dict[str, dict[int, float]]
) -> None:
    with job_on(fabric, tmp_path, *JOBS["hybrid"]) as job:
        lose_two_machines(fabric, job)
        assert job.wait().verdict == "done", job.story()
        assert job.losses() == calm["hybrid"]


def empty(folder: Path) -> None:
    """Remove a folder that ranks and an agent write to meanwhile."""
    while folder.exists():
        with suppress(OSError):  # a file has come, or gone, since it was listed
            shutil.rmtree(folder)


def test_memory_is_damaged_emptied_and_lost(fabric: Fabric, tmp_path: Path, calm: dict[str, dict[int, float]]) -> None:
    with job_on(fabric, tmp_path, *JOBS["full"], "checkpoint.every_steps=5") as job:

        def resumed(times: int) -> dict[str, Any]:
            job.until(lambda: len(job.events("resumed")) == times, "resumed")
            return job.events("resumed")[-1]

        job.until_step(8)
        ranks = [r for node in fabric.nodes for r in fabric.ranks(node)]
        for rank in ranks:
            rank.suspend()
        time.sleep(1)  # agents seal and copy what is there; a longer time would do no harm
        all_had = kept(fabric)
        for data in memories_of(fabric, "node2")[-1].glob("*.data"):  # node4 has copies
            content = bytearray(data.read_bytes())
            content[random.Random(1).randrange(64)] ^= 4
            data.write_bytes(content)
        signal_all(ranks)
        restart = resumed(1)
        assert restart["place"] == "memory" and restart["step"] >= all_had > 0 and restart["sent"] > 0, job.story()

        emptied = memories_of(fabric, "node2")[-1]
        empty(emptied)
        for times, killed in ((2, "node2"), (3, "node4")):  # the second of these rounds has snapshots again
            fabric.ranks(killed)[0].kill()
            restart = resumed(times)
            job.until_step(restart["step"] + 6)
        assert restart["place"] == "memory" and list(emptied.glob("*.data")), job.story()

        lose_two_machines(fabric, job)
        restart = job.events("resumed")[-1]
        job.until(  # else nothing is lost that storage has not
            lambda: restart["step"] < job.events("checkpoint")[-1]["step"] < kept(fabric),
            "a save in this round, and newer snapshots",
        )
        done, pair = job.step(), ("node1", "node3")  # in network order, half of all nodes apart
        for node in pair:
            job.crash(node)
        for node in pair:
            job.replace(node)
        restart = resumed(6)
        assert restart["place"] == "storage" and restart["step"] >= done - 6, job.story()
        shards = job.events("checkpoint_failed")[-1]["error"].partition("shards ")[2].partition(" of 4")[0]
        assert {"0", "2"} <= {*shards.split(", ")}, job.story()  # and of the newest step others that had not got to it
        assert job.wait().verdict == "done", job.story()
        assert job.losses() == calm["full"]


def test_fewer_ranks_restart_from_the_snapshots_of_more(fabric: Fabric, tmp_path: Path) -> None:
    three = fabric.nodes[:3]
    with job_on(fabric, tmp_path, "steps=30", FULL, "nodes=2:3", "elastic.join_window_s=5", on=three) as job:
        job.until(lambda: kept(fabric, three) >= 10, "snapshots")
        all_had = kept(fabric, three)
        job.crash("node3")
        job.until(lambda: job.events("resumed"), "resumed")
        resumed = job.events("resumed")[-1]
        assert (resumed["place"], resumed["world_size"]) == ("memory", 2) and resumed["step"] >= all_had, job.story()
        assert job.wait().verdict == "done", job.story()
