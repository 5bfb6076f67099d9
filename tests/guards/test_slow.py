"""Which node holds the others up, by what ranks say of themselves; and what follows from it."""

from __future__ import annotations

import random
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_jobs.guards.slow.messages import Slow, Throttled
from fsdp_jobs.guards.slow.node import throttled
from fsdp_jobs.guards.slow.windows import SlowWatch, Sums
from fsdp_jobs.run import messages
from fsdp_jobs.run.events import SlowNode, SlowSteps
from fsdp_jobs.run.rank_state import Report, Times
from tests.control.cluster import Cluster

STEP, FORWARD = 0.5, 0.1  # seconds


class Ranks:
    """Ranks that only count: two per node, whose forward passes take a tenth of a second, more or less."""

    def __init__(self, nodes: int, noise: float = 0.01, seed: int = 0):
        self.nodes, self.noise, self.random = nodes, noise, random.Random(seed)
        self.sums = {node: [Times()] * 2 for node in range(nodes)}

    def later(self, change: Callable[[int, Times], Times] = lambda _, times: times) -> Sums:
        """What they say twenty steps later; `change` is given the node and what a step takes."""
        for node, ranks in self.sums.items():
            for i, before in enumerate(ranks):
                forward = FORWARD * self.random.gauss(1, self.noise)
                step = change(node, Times(1, STEP, 0.0, 0.0, forward, forward, 100, 1.03 * FORWARD))
                ranks[i] = Times(*(b + 20 * s for b, s in zip(before, step, strict=True)))
        return {node: list(ranks) for node, ranks in self.sums.items()}


def found_in(
    ranks: Ranks, change: Callable[[int, Times], Times] = lambda _, times: times, windows: int = 5
) -> list[SlowNode | SlowSteps]:
    watch = SlowWatch()
    watch.see(ranks.later())
    return [found for _ in range(windows) if (found := watch.see(ranks.later(change))) is not None]


def slower(node: int, by: float) -> Callable[[int, Times], Times]:
    return lambda n, t: t._replace(compute=t.compute * by, host=t.host * by) if n == node else t


@pytest.mark.parametrize("nodes", [2, 3, 4, 16])
def test_a_node_that_is_slower_by_a_tenth_is_named_within_five_windows(nodes: int) -> None:
    for seed in range(10):
        (found,) = found_in(Ranks(nodes, seed=seed), slower(1, 1.11))
        assert isinstance(found, SlowNode) and (found.node, found.cause, found.others) == (1, "compute", nodes - 1)
        assert found.lost_s == pytest.approx(3 * 0.11 * FORWARD, rel=0.3)
        assert found.hours_per_day == pytest.approx(found.lost_s / STEP * 2 * nodes * 24)
        assert ("not known which" in found.sentence()) is (nodes == 2)


@pytest.mark.parametrize(("nodes", "slow"), [(4, {0, 1}), (8, {1, 5, 7}), (16, {0, 1, 2, 3, 4})])
def test_slow_nodes_do_not_hide_each_other(nodes: int, slow: set[int]) -> None:
    for seed in range(10):
        ranks = Ranks(nodes, 0.005, seed)
        found = found_in(ranks, lambda n, t: slower(n, 1.11)(n, t) if n in slow else t, windows=4 + len(slow))
        assert {one.node for one in found if isinstance(one, SlowNode)} == slow


@pytest.mark.parametrize("nodes", [2, 3, 4, 8])
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05])
def test_no_node_is_named_where_all_are_alike(nodes: int, noise: float) -> None:
    assert not [f for s in range(20) for f in found_in(Ranks(nodes, noise, s), windows=100)]


@pytest.mark.parametrize("nodes", [4, 8])
def test_no_node_is_named_for_being_late_now_and_then(nodes: int) -> None:
    """Waits are those of four nodes on two cores with much other work, in parts of a step."""
    for seed in range(20):
        late = random.Random(seed)

        def busy(_: int, times: Times, late: random.Random = late) -> Times:
            return times._replace(data=late.gammavariate(1.6, 0.0022), checkpoint=late.gammavariate(3, 0.0045))

        found = found_in(Ranks(nodes, 0.05, seed), busy, windows=300)
        assert not [slow for slow in found if isinstance(slow, SlowNode)]


def test_one_slow_window_in_five_is_no_slow_node() -> None:
    ranks, watch = Ranks(4), SlowWatch()
    windows = [ranks.later(slower(1, 2.0) if i % 5 == 0 else slower(1, 1.0)) for i in range(50)]
    assert not any(watch.see(sums) for sums in windows)


def test_what_costs_nothing_is_not_named() -> None:
    """Data that takes twice as long as the others', and a millisecond; a slow one that has less to do."""
    assert not found_in(Ranks(4), lambda n, t: t._replace(data=0.001 if n == 1 else 0.0005))
    assert not found_in(Ranks(4), lambda n, t: t._replace(compute=2 * t.compute, work=200) if n == 1 else t)


@pytest.mark.parametrize("nodes", [2, 4, 8])
@pytest.mark.parametrize("quadratic", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("longer", [0.5, 1.5, 4.0])
def test_a_node_with_longer_samples_is_not_slow(nodes: int, quadratic: float, longer: float) -> None:
    """Padded to the longest of a batch, and of other lengths with as many tokens; blocks that tell nothing of both."""
    part = 1 - quadratic
    for tokens, cost in ((longer, part * longer + quadratic * longer**2), (1.0, part + quadratic * longer)):

        def own(n: int, t: Times, tokens: float = tokens, cost: float = cost) -> Times:
            more = (cost, tokens, tokens * longer) if n == 1 else (1.0, 1.0, 1.0)
            return t._replace(compute=t.compute * more[0], work=100 * more[1], attention=6400 * more[2])

        assert not [f for f in found_in(Ranks(nodes), own, windows=20) if isinstance(f, SlowNode)]
        untold = lambda n, t: own(n, t)._replace(work=0.0, attention=0.0)  # noqa: E731
        assert not [f for f in found_in(Ranks(nodes), untold, windows=20) if isinstance(f, SlowNode)]


def test_the_cause_is_named() -> None:
    (found,) = found_in(Ranks(4), lambda n, t: t._replace(data=0.2 if n == 2 else 0.001))
    assert isinstance(found, SlowNode) and (found.node, found.cause) == (2, "data") and "data" in found.sentence()
    on_gpu = lambda n, t: t._replace(host=0.02, compute=t.compute * (1.2 if n == 3 else 1))  # noqa: E731
    (found,) = found_in(Ranks(4), on_gpu)
    assert isinstance(found, SlowNode) and (found.node, found.cause) == (3, "compute")
    bound = lambda n, t: t._replace(host=0.119, compute=0.12) if n == 3 else t._replace(host=0.06)  # noqa: E731
    (found,) = found_in(Ranks(4), bound)
    assert isinstance(found, SlowNode) and (found.node, found.cause) == (3, "host")


def test_no_node_is_blamed_for_samples_of_unequal_length() -> None:
    (found,) = found_in(Ranks(4), lambda _, t: t._replace(slowest=1.5 * FORWARD), windows=20)
    assert isinstance(found, SlowSteps) and "unequal" in found.why


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda _, t: t._replace(step=1.0), "network"),
        (lambda _, t: t._replace(step=1.0, data=0.5), "data"),
        (lambda _, t: t._replace(step=0.8, compute=2 * t.compute, slowest=2 * t.slowest), "computes"),
    ],
)
def test_all_nodes_that_become_slow_together(change: Callable[[int, Times], Times], word: str) -> None:
    ranks, watch = Ranks(4), SlowWatch()
    assert not any(watch.see(ranks.later()) for _ in range(20))
    (found,) = [f for _ in range(10) if (f := watch.see(ranks.later(change)))]
    assert isinstance(found, SlowSteps) and word in found.why


@pytest.mark.parametrize("slower_by", [1.0, 1.5])
def test_more_work_is_no_slowness(slower_by: float) -> None:
    """Twice the batch takes twice as long; what is slow at the new work is found by windows of the new work."""
    ranks, watch = Ranks(4), SlowWatch()
    for _ in range(20):
        assert watch.see(ranks.later()) is None

    def doubled(_: int, t: Times, by: float = 1.0) -> Times:
        return t._replace(step=2 * by * t.step, compute=2 * by * t.compute, slowest=2 * by * t.slowest, work=2 * t.work)

    for _ in range(20):
        assert watch.see(ranks.later(doubled)) is None
    found = [f for _ in range(10) if (f := watch.see(ranks.later(lambda n, t: doubled(n, t, slower_by))))]
    assert [f.why for f in found if isinstance(f, SlowSteps) and "every node computes more slowly" in f.why] == [
        f.why for f in found
    ] and bool(found) is (slower_by > 1)


def test_a_node_with_more_work_in_each_step_is_not_another_rank_each_time() -> None:
    def uneven(node: int, t: Times) -> Times:
        more = 1.3 if node == 2 else 1.0
        return t._replace(compute=more * t.compute, work=more * t.work, slowest=1.3 * 1.03 * FORWARD)

    assert not found_in(Ranks(4), uneven, windows=20)


def test_a_rank_that_says_nothing_ends_no_window() -> None:
    ranks, watch = Ranks(3), SlowWatch()
    for _ in range(20):
        assert watch.see({**ranks.later(slower(1, 2.0)), 2: []}) is None
        assert watch.see({**ranks.later(slower(1, 2.0)), 2: [Times()] * 2}) is None


def train(cluster: Cluster, slow: int, windows: int = 6) -> None:
    """Beats of nodes of which one takes a fifth longer."""
    ranks = Ranks(len(cluster.coordinator.agents))
    for i in range(windows):
        sums = ranks.later(slower(slow, 1.2))
        for agent in cluster.coordinator.agents.in_round():
            ranks_here = [(Report(0.0, 20 * (i + 1), 0, 1), times) for times in sums[agent.node]]
            cluster.coordinator.on_message(agent, messages.Beat(ranks_here, at=cluster.now), cluster.now)
        cluster.now += 1.1
        cluster.coordinator.tick(cluster.now)


def test_the_node_is_asked_why_and_named(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=3")
    agents = [cluster.join(n) for n in range(3)]
    cluster.later(0.5, *agents)
    train(cluster, slow=1)
    assert [a.node for a in agents if cluster.last(a, Slow)] == [1] and not cluster.events("slow_node")
    cluster.coordinator.on_message(agents[1], Throttled(["GPU 0 at 345 MHz of 1980 MHz: hot"]), cluster.now)
    (event,) = cluster.events("slow_node")
    assert (event["node"], event["host"]) == (1, "node1") and event["throttled"][0].endswith("hot")
    train(cluster, slow=1)
    assert len(cluster.events("slow_node")) == 1 and not cluster.events("machine_excluded")


@pytest.mark.parametrize("steps", [200, 1_000_000])
def test_it_is_excluded_if_the_job_is_done_sooner_without_it(tmp_path: Path, steps: int) -> None:
    cluster = Cluster(tmp_path, "nodes=2:3", f"steps={steps}", "elastic.exclude_slow=true", "elastic.join_window_s=0")
    agents = [cluster.join(n) for n in range(3)]
    cluster.later(0.5, *agents)
    spare = cluster.join(3)
    train(cluster, slow=1)
    cluster.coordinator.on_message(agents[1], Throttled([]), cluster.now)
    cluster.later(2.0, *agents, spare, step=120, committed=120)
    if steps == 200:
        assert not cluster.events("machine_excluded") and not cluster.last(agents[0], messages.Request)
        return
    (event,) = cluster.events("machine_excluded")
    assert event["host"] == "node1" and event["is_slow"]
    cluster.later(0.2, *agents, step=121, committed=121, phase=2)
    for agent in agents:
        cluster.ready(agent)
    cluster.later(3.0)
    assert cluster.events("round_started")[-1]["nodes"] == [0, 2, 3] and spare.in_round
    assert "slow" in cluster.events("round_broken")[-1]["why"]
    assert cluster.verdict is None


def test_a_fake_nvidia_smi_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    rows = "0, 1980 MHz, 1980 MHz, Not Active, Not Active, Not Active\n1, 345 MHz, 1980 MHz, Active, Not Active, Active"
    smi.write_text(f'#!/bin/sh\ncase "$1" in *clocks_event*) exit 2;; esac\nprintf "{rows}\n"\n')
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert throttled() == []
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    assert throttled() == ["GPU 1 at 345 MHz of 1980 MHz: hw_thermal_slowdown and hw_power_brake_slowdown"]


def test_windows_of_the_past_keep_no_times_of_each_node() -> None:
    """Two hundred windows of ten thousand nodes took half a gigabyte."""
    ranks, watch = Ranks(16), SlowWatch()
    for _ in range(12):
        watch.see(ranks.later())
    assert [len(window.by_node) for window in watch._windows] == [0] * 6 + [3] * 5
