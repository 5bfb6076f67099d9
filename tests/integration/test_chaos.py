"""Faults of every kind, on network namespaces as nodes; each run ends as if nothing had happened.

Three nodes of one rank each, fully sharded, so that no rank can go on without the others. The moment and the
victim of each fault follow from its seed. At the same world size the losses are the undisturbed run's to the bit;
at another, to 1e-5.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsdp_jobs.checkpoints import catalog
from fsdp_jobs.run.tail import read_json_lines
from tests.netns import CONTROL, Fabric, NetnsJob, needs_netns, netns_job
from tests.world import undisturbed_losses

pytestmark = [pytest.mark.integration, needs_netns, pytest.mark.timeout(900)]

STEPS, EVERY, BATCH = 100, 8, 8
SILENCE_S = 4  # after this long a silent node counts as lost
OVERRIDES = (
    f"steps={STEPS}",
    f"checkpoint.every_steps={EVERY}",
    f"data.global_batch={BATCH}",
    f"elastic.heartbeat_timeout_s={SILENCE_S}",
    "fsdp=full_shard",
    "elastic.exclude_after=0",  # all these failures are of three machines
    "elastic.max_failures_without_progress=10",
)


def seeds(always: Sequence[int], soak: Sequence[int]) -> pytest.MarkDecorator:
    """Where the moment and the victim, and for some tests what happens, come from."""
    return pytest.mark.parametrize("seed", [*always, *(pytest.param(seed, marks=pytest.mark.soak) for seed in soak)])


at_random_moments = seeds([0], [2, 3, 4])


@pytest.fixture(scope="module")
def fabric() -> Iterator[Fabric]:
    with Fabric(["node1", "node2", "node3"]) as three:
        yield three


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses by step of three ranks that nobody touched."""
    task = (f"steps={STEPS}", f"data.global_batch={BATCH}", "fsdp=full_shard")
    return undisturbed_losses(tmp_path_factory.mktemp("calm"), 3, 3, *task)


@pytest.fixture
def job(fabric: Fabric, tmp_path: Path, undisturbed: dict[int, float]) -> Iterator[NetnsJob]:
    with netns_job(fabric, tmp_path, "chaos", *OVERRIDES) as made:
        yield made


def dice_at(job: NetnsJob, seed: int, first: int = 2, last: int = 30) -> tuple[random.Random, str, int]:
    """Wait until a moment; returns the dice, and a victim with its number."""
    dice = random.Random(seed)
    moment, victim = dice.randint(first, last), dice.randrange(len(job.fabric.nodes))
    job.until_step(moment)
    return dice, job.fabric.nodes[victim], victim


def ends_well(job: NetnsJob, undisturbed: dict[int, float]) -> None:
    """Done, with every step's sample counted once, and the losses of a run that nobody touched."""
    assert job.wait().verdict == "done", job.story()
    assert accounts_for_every_step(job) == undisturbed, job.story()


def accounts_for_every_step(job: NetnsJob) -> dict[int, float]:
    """Check that the run's records fit together; returns the newest loss of each step."""
    (done,) = job.events("done")
    assert (done["step"], done["samples"]) == (STEPS, STEPS * BATCH)
    lives = _by_life(job)
    for resumed, steps in lives:
        start = resumed["step"] if resumed else 0
        assert steps == list(range(start + 1, start + 1 + len(steps))), "within a life each step is done once, in order"
        if resumed:
            assert resumed["samples"] == resumed["step"] * BATCH
    done_before = 0
    for resumed, steps in lives:
        lost = done_before - (resumed["step"] if resumed else 0)
        assert lost < 2 * EVERY, "at most the interval, and what was done while the newest save was being written"
        done_before = max([done_before, *steps])
    losses = job.losses()
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert not list(job.run.checkpoints.glob("*.tmp")), "an unfinished checkpoint is left"
    return {step: losses[step] for step in sorted(losses)}


def _by_life(job: NetnsJob) -> list[tuple[dict[str, Any] | None, list[int]]]:
    """What each life began from (None: nothing), and the steps it recorded."""
    marks = [(e["time"], e) for e in read_json_lines(job.run.events) if e["event"] == "resumed"]
    lives: list[tuple[dict[str, Any] | None, list[int]]] = [(None, [])]
    records = sorted([*marks, *((m["time"], m) for m in job.metrics())], key=lambda r: r[0])
    for _, record in records:
        if "event" in record:
            lives.append((record, []))
        elif lives[-1][0] is None and lives[-1][1] and record["step"] == 1:
            lives.append((None, [1]))  # it began again before the first checkpoint
        else:
            lives[-1][1].append(record["step"])
    return lives


def told(job: NetnsJob, event: str, **what: Any) -> dict[str, Any]:
    """The one event of this kind, with these details."""
    events = job.events(event)
    assert len(events) == 1, job.story()
    for key, value in what.items():
        assert events[0][key] == value, (key, events[0])
    return events[0]


def rounds(job: NetnsJob) -> list[list[int]]:
    return [e["nodes"] for e in job.events("round_started")]


@pytest.mark.soak  # on nodes that are processes: test_main_job.py
@at_random_moments
def test_sigkill_of_a_rank(job: NetnsJob, undisturbed: dict[int, float], seed: int) -> None:
    _, _, victim = dice_at(job, seed)
    job.ranks(victim)[0].kill()
    ends_well(job, undisturbed)
    assert told(job, "round_broken")["why"] == f"rank {victim} on node {victim} was killed by SIGKILL"
    assert not job.events("node_lost")
    assert rounds(job) == [[0, 1, 2]] * 2


@contextmanager
def noticed(job: NetnsJob, within: float = SILENCE_S + 10) -> Iterator[None]:
    """Wait until what is done meanwhile is noticed as the loss of a node."""
    before = len(job.events("node_lost"))
    yield
    job.until(lambda: len(job.events("node_lost")) == before + 1, "the loss is noticed", within)


def an_agent_is_killed(job: NetnsJob, victim: int, dice: random.Random) -> str:
    orphans = job.ranks(victim)
    job.keep = {job.fabric.nodes[victim]}
    with noticed(job):
        job.agent(victim).kill()
        _, alive = psutil.wait_procs(orphans, timeout=5)
        assert not alive, "ranks outlive their agent"
    return "its agent is gone"


def a_node_dies_and_is_replaced(job: NetnsJob, victim: int, dice: random.Random) -> str:
    with noticed(job, SILENCE_S - 1):  # connections were closed
        job.crash(job.fabric.nodes[victim])
    job.replace(job.fabric.nodes[victim])
    return ""


def a_node_hangs_and_wakes_up(job: NetnsJob, victim: int, dice: random.Random) -> str:
    with noticed(job):
        job.hang(job.fabric.nodes[victim])
    job.wake(job.fabric.nodes[victim])
    return "was silent for"


def a_node_is_cut_off_and_comes_back(job: NetnsJob, victim: int, dice: random.Random) -> str:
    with noticed(job):
        job.fabric.cut(job.fabric.nodes[victim])
    job.fabric.heal(job.fabric.nodes[victim])
    return "cannot be reached for"


def the_node_with_rank_0_vanishes(job: NetnsJob, victim: int, dice: random.Random) -> str:
    assert job.events("round_started")[-1]["hosts"][0] == job.fabric.nodes[victim]
    with noticed(job):  # nobody is told
        job.crash(job.fabric.nodes[victim], silently=True)
    job.replace(job.fabric.nodes[victim])
    return "cannot be reached for"


def a_node_dies_while_the_ranks_start_again(job: NetnsJob, victim: int, dice: random.Random) -> str:
    before = len(rounds(job))
    failed = dice.choice([n for n in range(3) if n != victim])
    job.ranks(failed)[0].kill()
    job.until(lambda: len(rounds(job)) > before, "the next round")
    job.until(lambda: job.ranks(victim), "its ranks start")
    broken = job.events("round_broken")[-1]
    assert broken["why"] == f"rank {failed} on node {failed} was killed by SIGKILL"
    assert not [e for e in job.events("resumed") if e["time"] > broken["time"]]
    with noticed(job):
        job.crash(job.fabric.nodes[victim])
    job.replace(job.fabric.nodes[victim])
    job.until(lambda: len(rounds(job)) == before + 2, "the round after that")
    assert f"node {victim} " in job.events("round_broken")[-1]["why"]
    return ""


FAULTS = (
    an_agent_is_killed,
    a_node_dies_and_is_replaced,
    a_node_hangs_and_wakes_up,
    a_node_is_cut_off_and_comes_back,
    the_node_with_rank_0_vanishes,
    a_node_dies_while_the_ranks_start_again,
)


@seeds([0], [1, 2, 3, 4])
def test_nodes_are_lost_in_every_way_one_after_another(job: NetnsJob, undisturbed: dict[int, float], seed: int) -> None:
    """The order of the faults, their moments and victims follow from the seed."""
    dice = random.Random(seed)
    for number, fault in enumerate(dice.sample(FAULTS, len(FAULTS)), start=1):
        before = len(rounds(job))
        job.until_step(job.step() + dice.randint(2, 8))
        victim = 0 if fault is the_node_with_rank_0_vanishes else dice.randrange(3)
        why = fault(job, victim, dice)
        job.until(lambda n=before: len(rounds(job)) > n, "the next round")  # type: ignore[misc]
        job.until(lambda: job.metrics()[-1]["time"] > job.events("round_started")[-1]["time"], "it trains again")
        lost = job.events("node_lost")
        assert len(lost) == number and (lost[-1]["node"], lost[-1]["host"]) == (victim, job.fabric.nodes[victim]), lost
        assert why in lost[-1]["why"], lost[-1]
    ends_well(job, undisturbed)
    assert rounds(job) == [[0, 1, 2]] * (len(FAULTS) + 2)


@pytest.mark.soak  # on nodes that are processes: test_main_job.py
@at_random_moments
def test_sigkill_of_the_coordinator(job: NetnsJob, undisturbed: dict[int, float], seed: int) -> None:
    dice_at(job, seed, last=20)
    job.coordinator().kill()
    killed_at = job.step()
    job.until_step(killed_at + 3)  # nobody needs it to train
    job.start_process(CONTROL)
    job.until(lambda: job.events("adopted"), "the new coordinator takes over")
    ends_well(job, undisturbed)
    assert told(job, "adopted")["nodes"] == 3
    assert rounds(job) == [[0, 1, 2]] and not job.events("round_broken")
    assert len(job.metrics()) == STEPS  # nothing was done twice


@pytest.mark.soak  # on nodes that are processes: test_scripts.py
@at_random_moments
def test_sigterm_to_one_node_stops_all_and_the_next_attempt_goes_on(
    job: NetnsJob, undisturbed: dict[int, float], seed: int
) -> None:
    _, _, victim = dice_at(job, seed)
    job.agent(victim).send_signal(signal.SIGTERM)
    verdict = job.wait()
    assert (verdict.verdict, verdict.decision) == ("preempted", "requeue"), job.story()
    assert {process.returncode for process in job.started.values()} == {75}
    assert told(job, "stop_requested")["why"] == f"node {victim} received SIGTERM"
    stopped_at = job.step()
    job.start()
    ends_well(job, undisturbed)
    told(job, "resumed", step=stopped_at)
    assert len(job.metrics()) == STEPS  # no step was lost, none done twice


@pytest.mark.soak  # of a whole job: test_damage.py; of each point of a save: tests/checkpoints
@at_random_moments
def test_a_rank_is_killed_while_it_saves(job: NetnsJob, undisturbed: dict[int, float], seed: int) -> None:
    _, _, victim = dice_at(job, seed)
    rank = job.ranks(victim)[0]

    def unfinished() -> list[str]:
        return [f.name for f in job.run.checkpoints.glob("*.tmp")]

    caught: list[str] = []
    while not caught:  # a save that was over before its rank stood still does not count
        job.until(unfinished, "a save")
        rank.suspend()
        time.sleep(0.5)  # that the others have for a commit, if the rank had written its part
        caught = unfinished()
        if not caught:
            rank.resume()
    rank.kill()
    ends_well(job, undisturbed)
    assert told(job, "round_broken")["why"] == f"rank {victim} on node {victim} was killed by SIGKILL"
    step = int(caught[0].removeprefix("step-").split(".")[0])
    assert all(e["step"] < step for e in job.events("resumed")[:1])
    assert [e["step"] for e in job.events("checkpoint")].count(step) == 1  # when it was reached again
    assert not job.events("node_lost")
    assert rounds(job) == [[0, 1, 2]] * 2


@pytest.fixture(scope="module")
def four() -> Iterator[Fabric]:
    # Slow links make slow steps: the job is still at work when the node is back.
    with Fabric(["node1", "node2", "node3", "node4"], ["leaf1", "leaf1", "leaf2", "leaf2"], rate="40mbit") as nodes:
        yield nodes


@pytest.mark.parametrize(
    ("fsdp", "left"),
    [
        pytest.param(["fsdp=full_shard"], 3, marks=pytest.mark.soak, id="full_shard"),
        pytest.param(["fsdp=hybrid_shard", "fsdp.shard_group=2"], 2, id="whole-groups"),
    ],
)
def test_a_job_with_checkpoints_on_the_nodes_own_disks_shrinks_and_grows(
    four: Fabric, tmp_path: Path, undisturbed: dict[int, float], fsdp: list[str], left: int
) -> None:
    """Ranks that come back read their nodes' disks, and their peers'; when a disk is gone, shared storage.

    Without a replacement the job goes on with the nodes left, in whole shard groups; a returned one is taken in.
    """
    overrides = [o for o in OVERRIDES if not o.startswith("fsdp")]
    own_disk = "checkpoint.local_dir=/dev/shm/fast"  # each of these machines has its own /dev/shm
    with netns_job(four, tmp_path, "elastic", *overrides, *fsdp, own_disk, "nodes=2:4", switches=True) as job:
        job.until(lambda: bool(job.events("checkpoint")), "a checkpoint on shared storage")
        job.ranks(1)[0].kill()
        job.until(lambda: len(job.events("resumed")) == 1, "the ranks are back")
        step = job.events("resumed")[0]["step"]
        shards = [
            len(list(Path(f"/proc/{m.pid}/root/dev/shm/fast").glob(f"elastic-*/step-{step:08d}.*/*.distcp")))
            for name, m in four.machines.items()
            if name != CONTROL
        ]
        assert left == 3 or max(shards) > 1, "replicas share the writing, so a node needs a shard that a peer wrote"
        saved = len(job.events("checkpoint"))
        job.until(lambda: len(job.events("checkpoint")) > saved, "the next checkpoint")
        job.crash("node4")
        job.until(lambda: len(rounds(job)) == 3, "a smaller round")
        smaller = job.events("round_started")[2]
        assert len(smaller["nodes"]) == left and 3 not in smaller["nodes"]
        assert len(smaller["spares"]) == 3 - left
        job.replace("node4")
        assert job.wait().verdict == "done", job.story()
        assert accounts_for_every_step(job) == pytest.approx(undisturbed, rel=1e-5)
        assert [len(nodes) for nodes in rounds(job)] == [4, 4, left, 4], job.story()
        first, second, grown = job.events("resumed")
        before = [m["step"] for m in job.metrics() if m["time"] < grown["time"]]
        assert grown["step"] == before[-1] > second["step"]  # no step is lost when a node comes in
        assert grown["world_size"] == 4
        assert [first["place"], second["place"], grown["place"]] == ["local_dir", "storage", "local_dir"], job.story()
        on_nodes = [e["step"] for e in job.events("checkpoint_on_nodes")]
        assert set(on_nodes) >= {e["step"] for e in job.events("checkpoint")}
        assert job.events("checkpoint")[-1]["step"] == STEPS
        found = catalog.find_checkpoints(job.run.checkpoints)
        assert len(found) == 3 and all(catalog.verify(f) == [] for f in found)
