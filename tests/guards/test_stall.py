"""A round in which no step is done, by a clock that only we move."""

from __future__ import annotations

from pathlib import Path

from fsdp_jobs.control.placement import ConnectedAgent
from fsdp_jobs.run.rank_state import Phase
from tests.control.cluster import Cluster


def _after_five_steps(folder: Path) -> tuple[Cluster, list[ConnectedAgent]]:
    cluster = Cluster(folder, "nodes=2")
    agents = [cluster.join(node) for node in range(2)]
    for agent in agents:
        cluster.ready(agent)
    for step in range(1, 6):
        cluster.later(1, *agents, step=step)
    return cluster, agents


def test_a_save_of_minutes_is_no_stall(tmp_path: Path) -> None:
    cluster, agents = _after_five_steps(tmp_path)
    cluster.later(1000, *agents, step=5, phase=int(Phase.SAVING))
    cluster.later(50, *agents, step=5)
    assert cluster.last(agents[0], "dump") is None, "the step after it has just begun"
    cluster.later(15, *agents, step=5)
    assert cluster.last(agents[0], "dump") is not None


def test_a_save_without_end_is_one(tmp_path: Path) -> None:
    cluster, agents = _after_five_steps(tmp_path)
    cluster.later(1750, *agents, step=5, phase=int(Phase.SAVING))
    assert cluster.last(agents[0], "dump") is None
    cluster.later(150, *agents, step=5, phase=int(Phase.SAVING))
    assert cluster.last(agents[0], "dump") is not None
