"""A round in which no step is done, by a clock that only we move."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fsdp_jobs.control.placement import ConnectedAgent
from fsdp_jobs.guards.stall.messages import Dump, RankStack, Stacks
from fsdp_jobs.run import events, rank_state
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.messages import Request
from fsdp_jobs.run.rank_state import Phase
from tests.control.cluster import PROGRAM, SILENCE, Cluster


def _after_five_steps(folder: Path, nodes: str = "2") -> tuple[Cluster, list[ConnectedAgent]]:
    cluster = Cluster(folder, f"nodes={nodes}", "elastic.join_window_s=1")
    agents = [cluster.join(node) for node in range(2)]
    for agent in agents:
        cluster.ready(agent)
    for step in range(1, 6):
        cluster.later(1, *agents, step=step)
    return cluster, agents


def test_a_save_of_minutes_is_no_stall(tmp_path: Path) -> None:
    cluster, agents = _after_five_steps(tmp_path)
    cluster.later(1000, *agents, step=5, phase=int(Phase.ENDING))
    cluster.later(50, *agents, step=5)
    assert cluster.last(agents[0], Dump) is None, "the step after it has just begun"
    cluster.later(15, *agents, step=5)
    assert cluster.last(agents[0], Dump) is not None


def test_ranks_that_wait_for_a_file_server_have_not_stalled(tmp_path: Path) -> None:
    cluster, agents = _after_five_steps(tmp_path)
    cluster.coordinator.asked_at = cluster.now
    cluster.later(1000, *agents, step=5)
    cluster.coordinator.asked_at = math.inf
    cluster.later(50, *agents, step=5)
    assert cluster.last(agents[0], Dump) is None, "it has just come back"
    cluster.later(15, *agents, step=5)
    assert cluster.last(agents[0], Dump) is not None


def test_a_run_directory_that_answers_late_hides_no_stall(tmp_path: Path) -> None:
    cluster, agents = _after_five_steps(tmp_path)
    for _ in range(15):
        cluster.coordinator.asked_at = cluster.now
        cluster.later(3, *agents, step=5)
        cluster.coordinator.asked_at = math.inf
        cluster.later(4, *agents, step=5)
    assert cluster.last(agents[0], Dump) is not None


def test_a_save_without_end_is_one(tmp_path: Path) -> None:
    cluster, agents = _after_five_steps(tmp_path)
    cluster.later(1750, *agents, step=5, phase=int(Phase.SAVING))
    assert cluster.last(agents[0], Dump) is None
    cluster.later(150, *agents, step=5, phase=int(Phase.SAVING))
    assert cluster.last(agents[0], Dump) is not None


@pytest.mark.parametrize("answers", [0, 1])
def test_the_machine_of_ranks_that_do_not_respond_is_blamed_if_others_do(tmp_path: Path, answers: int) -> None:
    """If none does, as on the only node, a program that is not Python or never yields may be the reason."""
    cluster = Cluster(tmp_path, "nodes=1")
    cluster.ready(agent := cluster.join(0))
    for step in range(1, 6):
        cluster.later(1, agent, step=step)
    cluster.later(62, agent, step=5)
    ranks = [RankStack(n, "sleeping", n < answers, 5, False, "", False) for n in range(2)]
    cluster.coordinator.on_message(agent, Stacks(ranks), cluster.now)
    cluster.later(1, agent, step=5)
    cluster.ready(agent)
    cluster.later(5, agent, step=-1)
    (broken,) = cluster.events("round_broken")
    assert "does not respond" in broken["why"] and broken.get("blamed", "") == ("node0" if answers else "")


def test_a_step_that_ends_while_stacks_are_collected_is_no_stall(tmp_path: Path) -> None:
    cluster, agents = _after_five_steps(tmp_path)
    cluster.later(62, *agents, step=5)
    assert cluster.last(agents[0], Dump) is not None
    cluster.later(10, *agents, step=6)
    assert not cluster.events("stalled") and cluster.coordinator.round.running
    cluster.later(70, *agents, step=6)
    assert not cluster.events("stalled"), "the slowest step took 62 s, and 20 such steps may pass"


def test_ranks_that_work_again_while_stacks_are_collected_are_not_silent(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, *PROGRAM, "nodes=2")
    agents = [cluster.join(node) for node in range(2)]
    for agent in agents:
        cluster.ready(agent)
    cluster.silent = {agent.id: 1800.0 for agent in agents}
    cluster.later(1, *agents, **SILENCE)
    assert cluster.last(agents[0], Dump) is not None
    cluster.silent[agents[1].id] = 0.0
    cluster.later(10, *agents, **SILENCE)
    assert not cluster.events("stalled") and cluster.coordinator.round.running


def test_ranks_that_hang_before_they_park_for_a_node_that_joins_have_stalled(tmp_path: Path) -> None:
    cluster, agents = _after_five_steps(tmp_path, "2:3")
    cluster.ready(third := cluster.join(2))
    cluster.later(5, *agents, third, step=5)
    assert cluster.last(agents[0], Request) == Request(rank_state.Request.PARK)
    cluster.later(200, *agents, third, step=5, phase=int(Phase.SAVING))
    assert not cluster.events("stalled"), "they save"
    cluster.later(70, *agents, third, step=5)
    assert cluster.events("stalled") and not cluster.coordinator.round.running
    for agent in agents:
        cluster.ready(agent)
    cluster.later(5, *agents, third, step=-1)
    assert cluster.events("round_broken")[-1]["why"].startswith("no rank has done a step")
    assert cluster.events("round_started")[-1]["nodes"] == [0, 1, 2]


def test_what_a_rank_does_after_the_others_are_done_is_no_stall(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2")
    members = [cluster.join(0), cluster.join(1)]
    cluster.later(2, *members, step=10, committed=10)
    for _ in range(600):
        cluster.later(2, members[0], step=10, committed=10, phase=int(Phase.DONE))
        cluster.later(2, members[1], step=10, committed=10)
    assert not cluster.events("stalled") and cluster.coordinator.round.running


def test_a_first_step_after_a_restore_that_no_event_tells_may_be_long(tmp_path: Path) -> None:
    """Snapshots and the nodes' own disks have newer steps than the last checkpoint."""
    cluster = Cluster(tmp_path, "nodes=2")
    members = [cluster.join(0), cluster.join(1)]
    cluster.later(1, *members, step=-1, phase=int(Phase.STARTING))
    cluster.later(1, *members, step=80, committed=40, phase=int(Phase.STARTING))
    cluster.later(200, *members, step=80, committed=40)
    assert not cluster.events("stalled") and cluster.coordinator.round.running


@pytest.mark.parametrize("told", [True, False])
def test_a_stall_is_one_also_behind_the_newest_checkpoint_on_record(tmp_path: Path, told: bool) -> None:
    """That one was damaged; whether or not a beat came between the restore and the first step."""
    run = RunDir(tmp_path / "run")
    run.attempt(0).mkdir(parents=True)
    events.record(run, 0, events.Checkpoint(300))
    cluster = Cluster(tmp_path, "nodes=1")
    cluster.ready(a := cluster.join(0))
    if told:
        cluster.later(3, a, step=50, committed=50, phase=Phase.STARTING)
    for step in range(51, 56):
        cluster.later(1, a, step=step, committed=50)
    cluster.later(62, a, step=55, committed=50)
    assert cluster.last(a, Dump) is not None


def test_steps_of_minutes_are_no_stall_before_one_was_measured(tmp_path: Path) -> None:
    """In the second step only the first is known; a coordinator that takes over knows none."""
    cluster = Cluster(tmp_path / "a", "nodes=2", "elastic.join_window_s=1")
    agents = [cluster.join(node) for node in range(2)]
    for agent in agents:
        cluster.ready(agent)
    cluster.later(120, *agents, step=0)
    cluster.later(200, *agents, step=1)
    cluster.later(200, *agents, step=2)
    assert cluster.last(agents[0], Dump) is None
    cluster.later(20 * 200, *agents, step=2)
    assert cluster.last(agents[0], Dump) is not None

    cluster = Cluster(tmp_path / "b", "nodes=2", "elastic.join_window_s=1")
    agents = [cluster.join(node, round_=0, size=2) for node in range(2)]
    cluster.later(200, *agents, step=5000, committed=4990)
    assert cluster.coordinator.round.is_adopted and cluster.last(agents[0], Dump) is None


def test_a_stall_of_which_no_agent_knows_more_names_the_step(tmp_path: Path) -> None:
    cluster, agents = _after_five_steps(tmp_path)
    cluster.later(70, *agents, step=5)
    (stalled,) = cluster.events("stalled")
    assert "all are in step 6, and no node has sent their stacks" in stalled["why"]
