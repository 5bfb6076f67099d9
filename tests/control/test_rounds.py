"""Who forms a round, when it ends, and how the attempt does when nothing has failed."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest

from fsdp_jobs.control import placement
from fsdp_jobs.control.placement import ConnectedAgent
from fsdp_jobs.plan.layout import partners
from fsdp_jobs.run import events, messages, threads, verdict
from fsdp_jobs.run.rank_state import SAVES_NOTHING, Phase, Request
from tests.control.cluster import PROGRAM, SILENCE, Cluster, fails, failure


def test_ranks_follow_the_topology_and_natural_order(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=4")
    members = {
        n: cluster.join(n, switches=("spine", leaf))
        for n, leaf in ((10, "leaf2"), (2, "leaf2"), (3, "leaf1"), (1, "leaf1"))
    }
    cluster.later(0.2, *members.values())
    ranks = {n: cluster.last(m, messages.Round).rank for n, m in members.items()}
    assert ranks == {1: 0, 3: 1, 2: 2, 10: 3}


def test_an_elastic_job_waits_for_more_nodes_then_starts_with_enough(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2:4", "elastic.join_window_s=20")
    a, b = cluster.join(0), cluster.join(1)
    cluster.later(19, a, b)
    assert cluster.last(a, messages.Round) is None
    cluster.later(2, a, b)
    assert cluster.last(a, messages.Round).size == 2


def test_a_node_that_comes_before_the_first_step_is_let_in_after_it(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=1:2", "elastic.join_window_s=0", "fsdp=full_shard")
    a = cluster.join(0)
    cluster.later(1, a, step=0)
    b = cluster.join(1)
    cluster.later(5, a, b, step=0)
    assert cluster.last(a, messages.Request) is None, "its model is being built, and would be built again"
    cluster.later(1, a, b, step=1)
    assert cluster.last(a, messages.Request) == messages.Request(Request.PARK)


def test_an_agent_that_says_twice_that_it_is_ready_has_not_left_the_round_that_followed(tmp_path: Path) -> None:
    """It connects while it is about to say so: `Hello` says it, too, and the round may begin in between."""
    cluster = Cluster(tmp_path, "nodes=2", "elastic.join_window_s=0", "fsdp=full_shard")
    a, b = cluster.join(0), cluster.join(1)
    cluster.later(0.2, a, b)
    assert cluster.last(b, messages.Round) is not None
    cluster.coordinator.on_message(b, messages.Ready(after=-1, at=cluster.now), cluster.now)
    cluster.later(1, a, b)
    assert cluster.last(a, messages.Break) is None
    cluster.ready(b)
    assert cluster.last(a, messages.Break) is not None


def test_a_dead_agent_breaks_the_round_at_once_and_a_silent_one_after_its_timeout(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=1:3", "elastic.join_window_s=0", "fsdp=full_shard")
    a, b, c = cluster.join(0), cluster.join(1), cluster.join(2)
    cluster.later(0.2, a, b, c)
    cluster.closed(c)
    assert cluster.last(a, messages.Break) is not None and cluster.last(b, messages.Break) is not None
    for member in (a, b):
        cluster.ready(member)
    cluster.later(3, a, b)
    assert cluster.last(a, messages.Round).size == 2
    silent_since = cluster.now
    cluster.later(9, a)
    assert len(cluster.events("node_lost")) == 1
    cluster.later(2, a)
    lost = cluster.events("node_lost")
    assert len(lost) == 2 and "silent" in lost[1]["why"]
    assert cluster.now - silent_since < 12


@pytest.mark.seen
def test_a_replacement_waits_for_the_node_that_still_saves_and_for_no_other(tmp_path: Path) -> None:
    """A cluster may start the next pod of a node before an evicted one has ended, and one that it cannot reach."""
    cluster = Cluster(tmp_path, "nodes=2", "elastic.join_window_s=0")
    a, b = cluster.join(0), cluster.join(1)
    cluster.later(0.2, a, b)
    cluster.coordinator.on_stop("node 1 is told to end", cluster.now)
    cluster.join(1, life="b", round_=-1)
    assert not cluster.is_taken and not cluster.events("node_lost") and b in cluster.coordinator.agents.values()
    cluster.later(11, a)  # b saves no longer: nothing is heard of it
    assert [e["node"] for e in cluster.events("node_lost")] == [1]
    new = cluster.join(1, life="c")
    assert new in cluster.coordinator.agents.values()

    cut_off = Cluster(tmp_path / "cut", "nodes=2", "elastic.join_window_s=0")
    a, b = cut_off.join(0), cut_off.join(1)
    cut_off.later(0.2, a, b)
    cut_off.join(1, life="b")
    assert not cut_off.is_taken, "the other has just been heard of"
    cut_off.later(4, a)
    new = cut_off.join(1, life="b")
    assert new in cut_off.coordinator.agents.values() and b not in cut_off.coordinator.agents.values()


def parking(folder: Path) -> tuple[Cluster, ConnectedAgent, ConnectedAgent]:
    """A node that trains and has been asked to park, for another one that wants to join; and both."""
    cluster = Cluster(folder, "nodes=1:2", "elastic.join_window_s=0", "fsdp=full_shard")
    a = cluster.join(0)
    cluster.later(0.5, a)
    b = cluster.join(1)
    cluster.later(1, a, b)
    assert cluster.last(a, messages.Request) == messages.Request(Request.PARK)
    return cluster, a, b


def test_new_nodes_wait_until_the_ranks_have_saved_and_parked(tmp_path: Path) -> None:
    cluster, a, b = parking(tmp_path)
    assert cluster.last(a, messages.Break) is None
    cluster.later(1, a, b, step=7, committed=7, phase=int(Phase.PARKED))
    assert cluster.last(a, messages.Break) is not None
    cluster.ready(a)
    cluster.later(2, a, b)
    assert cluster.last(b, messages.Round).size == 2
    assert cluster.verdict is None


def test_a_rank_that_fails_while_the_others_park_is_a_failure(tmp_path: Path) -> None:
    cluster, a, b = parking(tmp_path)
    fails(cluster, [a, b], node=0, error="ValueError: a bad sample")
    cluster.later(2, a, b)
    (broken,) = cluster.events("round_broken")
    assert not broken.get("is_planned") and "a bad sample" in broken["why"]


@pytest.mark.seen
def test_where_nodes_are_replaced_the_notice_of_one_ends_its_part_alone(tmp_path: Path) -> None:
    """A forced deletion of a pod is SIGTERM and 2 s, as seen on Kubernetes 1.36: no preemption of the job."""
    pods = ("cluster=kubernetes", "cluster.accelerator=cpu", "hardware=cpu", "nodes=2", "elastic.join_window_s=0")
    cluster = Cluster(tmp_path, *pods)
    a, b = cluster.join(0), cluster.join(1)
    for member in (a, b):
        cluster.ready(member)
    cluster.later(1, a, b)
    cluster.coordinator.on_message(b, messages.Notice("SIGTERM"), cluster.now)
    assert cluster.last(a, messages.Request) == messages.Request(Request.PARK)
    assert not cluster.events("stop_requested")
    cluster.later(1, a, b, step=7, committed=7, phase=int(Phase.PARKED))
    assert cluster.last(a, messages.Break) is not None
    for member in (a, b):
        cluster.ready(member)
    cluster.later(2, a)
    assert cluster.last(b, messages.End).exit_code == 75 and cluster.verdict is None
    assert "nodes [1] received a stop signal" in cluster.events("round_broken")[-1]["why"]
    new = cluster.join(1, life="b")
    cluster.ready(new)
    cluster.later(2, a, new)
    assert cluster.last(new, messages.Round).size == 2 and cluster.verdict is None

    for member in (a, new):  # all of it is taken away
        cluster.coordinator.on_message(member, messages.Notice("SIGTERM"), cluster.now)
    cluster.later(1, a, new, step=9, committed=9, phase=int(Phase.PARKED))
    assert cluster.verdict is not None and cluster.verdict.verdict == "preempted"

    killed = Cluster(tmp_path / "killed", *pods)
    a, b = killed.join(0), killed.join(1)
    for member in (a, b):
        killed.ready(member)
    killed.later(1, a, b)
    killed.coordinator.on_message(b, messages.Notice("SIGTERM"), killed.now)
    killed.later(1, a, b)
    killed.closed(b)  # before anything was saved
    killed.later(0.2, a)
    killed.ready(a)
    new = killed.join(1, life="b")
    killed.ready(new)
    killed.later(5, a, new)
    assert killed.last(new, messages.Round).size == 2 and killed.verdict is None


def test_a_stop_request_saves_everywhere_and_is_judged_preempted(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2")
    a, b = cluster.join(0), cluster.join(1)
    cluster.later(1, a, b)
    cluster.coordinator.on_stop("SIGTERM received", cluster.now)
    assert cluster.last(b, messages.Request) == messages.Request(Request.STOP)
    for member in (a, b):
        cluster.ready(member, failure(member.node, 0, exit_code=75))
    cluster.later(2, a, b)
    assert cluster.verdict is not None
    assert (cluster.verdict.verdict, cluster.verdict.decision) == ("preempted", "requeue")


def test_a_restarted_coordinator_adopts_the_running_round(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2")
    a, b = cluster.join(0, round_=4, size=2), cluster.join(1, round_=4, size=2)
    cluster.later(15, a, b)
    assert cluster.coordinator.round.number == 4 and cluster.coordinator.round.running
    assert cluster.last(a, messages.Break) is None and cluster.last(b, messages.Break) is None
    for member in (a, b):
        cluster.ended(member)
    assert cluster.verdict is not None and cluster.verdict.verdict == "done"


def test_a_restarted_coordinator_waits_as_long_as_agents_keep_coming(tmp_path: Path) -> None:
    """Thousands take longer than a heartbeat may; once nobody comes any more, those that are missing are lost."""
    cluster = Cluster(tmp_path, "nodes=4", "elastic.heartbeat_timeout_s=5")
    came: list[ConnectedAgent] = []
    for node in range(3):
        came.append(cluster.join(node, round_=4, size=4))
        cluster.later(4, *came)
        assert cluster.coordinator.round.running, cluster.events("round_broken")
    cluster.later(4, *came)
    assert "1 of 4 nodes did not come back to the new coordinator" in cluster.events("round_broken")[0]["why"]


def test_an_agent_that_is_lost_after_its_ranks_have_ended_breaks_no_round(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2", "elastic.heartbeat_timeout_s=5")
    a, b = cluster.join(0), cluster.join(1)
    cluster.later(1, a, b)
    cluster.ended(a)
    cluster.coordinator.on_gone(a, "its connection closed", cluster.now, certain=True)
    cluster.later(10, b)
    assert cluster.coordinator.round.running and not cluster.events("round_broken")
    cluster.ended(b)
    assert cluster.verdict is not None and cluster.verdict.verdict == "done"


def test_ranks_that_left_on_request_while_there_was_no_coordinator_were_preempted(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2")
    members = [cluster.join(n, round_=0, size=2, signal="SIGTERM" if n else "") for n in range(2)]
    for member in members:
        cluster.ready(member, failure(member.node, member.node, exit_code=75))
    cluster.later(3, *members)
    assert cluster.verdict is not None
    assert (cluster.verdict.verdict, cluster.verdict.decision) == ("preempted", "requeue")
    assert "node 1 received SIGTERM" in cluster.verdict.reason


def test_a_program_that_says_nothing_is_broken_off_for_new_nodes(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=1:2", *PROGRAM)
    a = cluster.join(0)
    cluster.later(3, a, **SILENCE)
    assert [e["nodes"] for e in cluster.events("round_started")] == [[0]]
    b = cluster.join(1)
    cluster.later(1, a, b, **SILENCE)
    assert cluster.last(a, messages.Break) is not None
    cluster.ready(a)
    cluster.later(2, a, b, **SILENCE)
    assert [e["nodes"] for e in cluster.events("round_started")] == [[0], [0, 1]]
    assert cluster.events("round_started")[-1]["shard_group"] == 4, "full_shard over all there are"
    assert cluster.coordinator.budget.count == 0, "growth is no failure"


def test_a_program_that_says_nothing_leaves_node_by_node(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2", *PROGRAM)
    a, b = cluster.join(0), cluster.join(1)
    cluster.later(3, a, b, **SILENCE)
    cluster.coordinator.on_stop("node 0 received SIGTERM", cluster.now)
    cluster.coordinator.on_message(a, messages.Failed([failure(0, 0, exit_code=-15, step=-1)]), cluster.now)
    cluster.ready(a)
    cluster.later(20, a, b, **SILENCE)
    assert cluster.verdict is None and cluster.last(b, messages.Break) is None, "the other is still saving"
    cluster.ended(b)
    cluster.later(1, a, b, **SILENCE)
    assert cluster.verdict is not None
    assert (cluster.verdict.verdict, cluster.verdict.decision) == ("preempted", "requeue")
    assert "it starts again from what it saved itself, or from zero" in cluster.verdict.reason
    assert "job.checkpointer" in cluster.verdict.reason


@pytest.mark.parametrize(
    ("keys", "committed", "said"),
    [
        ((), 9, "cancelled; saved at step 9"),
        ((), 5, "cancelled; saved at step 5, 4 steps before the last"),
        (("checkpoint.memory.every_steps=1",), 8, "cancelled; saved at step 5, 4 steps before the last"),
        (PROGRAM, SAVES_NOTHING, "cancelled; job.checkpointer has saved nothing"),
    ],
    ids=["saved", "the last save failed", "snapshots end with the job", "a program that saves by itself"],
)
def test_a_cancelled_job_says_which_step_its_resume_begins_with(
    tmp_path: Path, keys: tuple[str, ...], committed: int, said: str
) -> None:
    cluster = Cluster(tmp_path, "nodes=1", *keys)
    a = cluster.join(0)
    cluster.later(1, a, **SILENCE)
    events.record(cluster.run, 0, events.Checkpoint(5))
    cluster.later(1, a, step=9, committed=committed)
    cluster.run.stop_request.write_text("cancelled")
    cluster.later(1, a, step=9, committed=committed)
    cluster.ready(a, failure(0, 0, exit_code=75, step=9))
    cluster.later(3, a)
    assert cluster.verdict is not None
    assert (cluster.verdict.verdict, cluster.verdict.reason) == ("preempted", said)


def test_agents_whose_ranks_had_finished_tell_a_new_coordinator(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2", *PROGRAM)
    a = cluster.join(0, round_=0, size=2)
    a.ended = True
    cluster.later(2, a, **SILENCE)
    assert cluster.verdict is None, "the other node may still run"
    b = cluster.join(1, round_=0, size=2)
    b.ended = True
    cluster.later(1, a, b, **SILENCE)
    assert cluster.verdict is not None and cluster.verdict.verdict == "done"


def test_a_coordinator_that_stood_still_has_not_heard_less_of_its_agents(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2")
    a, b = cluster.join(0), cluster.join(1)
    cluster.later(1, a, b)
    cluster.now += 30
    cluster.later(5)
    cluster.later(1, a, b)
    assert not cluster.events("node_lost")


def test_torn_lines_do_not_keep_a_coordinator_from_starting(tmp_path: Path) -> None:
    first = Cluster(tmp_path, "nodes=1")
    a = first.join(0)
    first.later(1, a)
    with first.run.events.open("ab") as f:
        f.write(b'{"time": 1.0, "event": "chec\n\xff\x00\n[1]\n{"event": "checkpoint"}\n{"a": 1}\n')
        f.write(b'{"time": 2.0, "event": "checkpoint", "attempt": 0, "step": 7}\n')
    cluster = Cluster(tmp_path, "nodes=1")
    assert cluster.coordinator.committed == 7 and cluster.coordinator.round.number == 0


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Plans are not there before this is set; nor are they waited for."""
    released, make_plan = threading.Event(), placement.make_plan
    monkeypatch.setattr(threads, "_SOON_S", 0)
    monkeypatch.setattr(
        placement, "make_plan", lambda *given, **named: released.wait(60) and make_plan(*given, **named)
    )
    yield released
    released.set()


def planned(cluster: Cluster) -> None:
    """Wait until the threads have done what was begun."""
    coordinator = cluster.coordinator
    work = (coordinator.planner._answer, coordinator.terms._claim, coordinator.records.begin(bool))
    wait([future for future in work if future is not None], 60)


def test_agents_are_answered_while_a_plan_is_computed(tmp_path: Path, released: threading.Event) -> None:
    cluster = Cluster(tmp_path, "nodes=2")
    a, b = cluster.join(0), cluster.join(1)
    cluster.later(30, a, b)
    assert cluster.last(a, messages.Alive).at == pytest.approx(cluster.now)
    assert cluster.last(a, messages.Round) is None and cluster.verdict is None
    released.set()
    planned(cluster)
    cluster.later(0.1, a, b)
    assert cluster.last(b, messages.Round).size == 2


def test_a_plan_for_nodes_that_are_no_longer_there_is_thrown_away(tmp_path: Path, released: threading.Event) -> None:
    cluster = Cluster(tmp_path, "nodes=2:4", "elastic.join_window_s=0", "elastic.max_failures_without_progress=0")
    a, b, c = cluster.join(0), cluster.join(1), cluster.join(2)
    cluster.later(0.5, a, b, c)
    cluster.closed(b)
    cluster.later(4, a)
    elsewhere = cluster.join(2, life="b", host="node2b")  # in place of c, which is silent
    d = cluster.join(3)
    released.set()
    for _ in range(3):
        cluster.later(0.1, a, elsewhere, d)
        planned(cluster)
    cluster.later(0.1, a, elsewhere, d)
    planned(cluster)
    (started,) = cluster.events("round_started")
    assert started["nodes"] == [0, 2, 3] and started["hosts"] == ["node0", "node2b", "node3"]
    assert cluster.last(b, messages.Round) is None and cluster.last(c, messages.Round) is None
    assert [cluster.last(member, messages.Round).rank for member in (a, elsewhere, d)] == [0, 1, 2]


def test_a_round_does_not_begin_from_a_plan_when_the_job_was_stopped_meanwhile(
    tmp_path: Path, released: threading.Event
) -> None:
    cluster = Cluster(tmp_path, "nodes=1")
    a = cluster.join(0)
    cluster.later(0.5, a)
    cluster.coordinator.on_stop("cancelled", cluster.now)
    released.set()
    planned(cluster)
    cluster.later(1, a)
    assert cluster.last(a, messages.Round) is None and cluster.last(a, messages.End) is not None
    assert not cluster.events("round_started")


def test_a_verdict_that_a_full_disk_has_no_room_for_is_written_later_and_agents_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever restarts processes reads the verdict: an agent that ended without it would be started again."""
    cluster = Cluster(tmp_path, "nodes=1", "elastic.join_window_s=0")
    a = cluster.join(0)
    cluster.later(0.2, a)
    with monkeypatch.context() as full:
        full.setattr(verdict, "write_atomic", raises(errno.ENOSPC))
        cluster.ended(a)
        cluster.later(2, a)
        assert cluster.verdict is None and cluster.last(a, messages.End) is None
        cluster.closed(a)
        again = cluster.join(0, life="b")
        assert cluster.last(again, messages.End) is None
        assert len(cluster.events("waiting")) == 1, "said once"
    cluster.later(0.2, again)
    assert cluster.verdict is not None and cluster.verdict.verdict == "done"
    assert cluster.last(again, messages.End) is not None and len(cluster.events("attempt_ended")) == 1


def test_agents_get_answers_while_the_verdict_waits_for_the_run_directory_and_then_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, write = threading.Event(), verdict.write_atomic
    monkeypatch.setattr(verdict, "write_atomic", lambda *given: written.wait(60) and write(*given))
    monkeypatch.setattr(threads, "_SOON_S", 0.02)
    cluster = Cluster(tmp_path, "nodes=1", "elastic.join_window_s=0")
    a = cluster.join(0)
    while cluster.last(a, messages.Round) is None:
        cluster.later(0.1, a)
    cluster.ended(a)
    cluster.later(60, a)
    assert a.heard == cluster.now and cluster.last(a, messages.End) is None
    written.set()
    while cluster.verdict is None:
        time.sleep(0.01)
    while cluster.last(a, messages.End) is None:
        cluster.later(0.1, a)
    assert cluster.coordinator.closed_at == cluster.now, "agents have the time to leave from now on"


def test_a_request_to_stop_is_seen_where_only_a_listing_shows_new_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS client remembers for a minute which files are missing, and `cancel` kills the job after a minute."""
    cluster = Cluster(tmp_path, "nodes=1", "elastic.join_window_s=0")
    a = cluster.join(0)
    cluster.later(0.2, a)
    missing, stat, iterdir = {str(cluster.run.stop_request)}, os.stat, Path.iterdir

    def stat_(path: str, **more: bool) -> os.stat_result:
        if str(path) in missing:
            raise FileNotFoundError
        return stat(path, **more)

    def iterdir_(path: Path) -> Iterator[Path]:
        missing.clear()
        return iterdir(path)

    cluster.run.stop_request.write_text("cancelled")
    monkeypatch.setattr(os, "stat", stat_)
    monkeypatch.setattr(Path, "iterdir", iterdir_)
    cluster.later(0.2, a)
    assert [e["why"] for e in cluster.events("stop_requested")] == ["cancelled"]


def test_a_request_to_stop_that_cannot_be_read_is_told_once_and_stops_nothing(tmp_path: Path) -> None:
    """As another user's command leaves it in a run directory that the group may write."""
    cluster = Cluster(tmp_path, "nodes=1", "elastic.join_window_s=0", "elastic.stop_grace_s=20")
    a = cluster.join(0)
    cluster.later(0.2, a)
    cluster.run.stop_request.mkdir()  # root can read every file
    cluster.later(2, a)
    (told,) = cluster.events("waiting")
    assert "cannot be read, so nothing is stopped" in told["why"] and not cluster.events("stop_requested")
    cluster.run.stop_request.rmdir()
    cluster.run.stop_request.write_text("cancelled")
    cluster.later(0.2, a)
    assert [e["why"] for e in cluster.events("stop_requested")] == ["cancelled"]
    cluster.later(19, a)
    assert cluster.verdict is None
    cluster.coordinator.asked_at = cluster.now - 5
    cluster.later(2, a)
    assert cluster.verdict is not None and cluster.verdict.decision == "stop", "a request is not requeued"
    assert "cancelled; not saved within 20 s; storage has not answered for 6 s" in cluster.verdict.reason


def test_a_problem_that_comes_after_the_verdict_does_not_replace_its_reason(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=1", "elastic.join_window_s=0")
    a = cluster.join(0)
    cluster.later(0.2, a)
    cluster.ended(a)
    cluster.run.stop_request.mkdir()
    cluster.later(1, a)
    assert cluster.verdict is not None and not cluster.events("waiting")


def raises(number: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("nodes", range(1, 12))
def test_copies_go_to_nodes_far_away_and_pairs_are_mutual(nodes: int) -> None:
    of = partners(nodes)
    if nodes == 1:
        assert of == [None]
        return
    assert sorted(i for i in of if i is not None) == list(range(nodes)), "each keeps one other's"
    assert all(other != i for i, other in enumerate(of))
    in_pairs = sum(of[other] == i for i, other in enumerate(of) if other is not None)
    assert in_pairs == nodes - (3 if nodes % 2 else 0)


def test_a_node_that_went_silent_and_comes_back_breaks_nothing(tmp_path: Path) -> None:
    """The others began a round without it; what became of its ranks is news of the round before."""
    cluster = Cluster(tmp_path, "nodes=1:3", "elastic.join_window_s=0.5")
    a, b, c = (cluster.join(node) for node in range(3))
    cluster.later(1, a, b, c, step=10, committed=5)
    cluster.later(11, a, b, step=10, committed=5)
    cluster.ready(a)
    cluster.ready(b)
    cluster.later(5, a, b, step=5, committed=5)
    again = cluster.join(2, round_=0, size=3)
    cluster.coordinator.on_message(again, messages.Failed([failure(2, 4, exit_code=-9)]), cluster.now)
    cluster.later(1, a, b, again, step=5, committed=5)
    assert cluster.coordinator.round.running and cluster.coordinator.round.number == 1


@pytest.mark.parametrize("node", [0, 1])
def test_a_connection_that_is_lost_before_ranks_are_started_breaks_the_round(tmp_path: Path, node: int) -> None:
    """The first node's address, or the round itself, was lost with it."""
    cluster = Cluster(tmp_path, "nodes=2")
    members = [cluster.join(0), cluster.join(1)]
    cluster.later(0.5)
    assert cluster.coordinator.round.running
    again = cluster.join(node, round_=0, size=2) if node == 0 else cluster.join(node)
    assert cluster.last(members[1 - node], messages.Break).round == 0
    for member in (members[1 - node], again):
        cluster.ready(member)
    cluster.later(3, *cluster.coordinator.agents.values())
    assert cluster.coordinator.round.running and cluster.coordinator.round.number == 1


def test_an_elastic_job_goes_on_without_a_node_whose_ranks_do_not_stop(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=1:3", "elastic.join_window_s=0.5")
    members = [cluster.join(node) for node in range(3)]
    cluster.later(1, *members, step=10, committed=5)
    cluster.ready(members[0], failure(0, 0, "OSError: x"))
    cluster.ready(members[1])
    cluster.later(70, *members, committed=5)
    assert cluster.events("round_started")[-1]["nodes"] == [0, 1]
    assert "no longer waiting for node2/2: their ranks do not stop" in cluster.events("waiting")[-1]["why"]


def test_a_job_is_done_when_the_nodes_that_still_reconnect_are_done_too(tmp_path: Path) -> None:
    for _ in range(2):  # the second is a new coordinator
        cluster = Cluster(tmp_path, "nodes=2", *PROGRAM)
        if not cluster.coordinator.run.events.exists():
            members = [cluster.join(0), cluster.join(1)]
            cluster.later(2, *members, **SILENCE)
    a = cluster.join(0, round_=0, size=2)
    cluster.ended(a)
    assert cluster.verdict is None
    b = cluster.join(1, round_=0, size=2)
    cluster.ended(b)
    assert cluster.verdict is not None and cluster.verdict.verdict == "done"


def test_a_tick_compares_no_agents_with_each_other_while_all_are_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a thousand, each tick of a tenth of a second took half a second."""
    cluster = Cluster(tmp_path, "nodes=2", "elastic.join_window_s=0")
    members = [cluster.join(node) for node in (0, 1)]
    looks: list[float] = []
    machines = placement.Agents.machines

    def noted(agents: placement.Agents, heard_since: float) -> tuple[set[str], set[str]]:
        looks.append(heard_since)
        return machines(agents, heard_since)

    monkeypatch.setattr(placement.Agents, "machines", noted)
    cluster.later(5, *members)
    assert not looks
    for member in members:
        member.is_unreachable = True
    cluster.later(1)
    assert len(looks) == 10, "once for all that may be lost, each tick"
    cluster.later(60, members[1])
    assert [*cluster.coordinator.agents.values()] == [members[1]]


def test_an_agent_connects_without_a_look_at_all_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of ten thousand nodes come at once, also to a new coordinator."""
    cluster = Cluster(tmp_path, "nodes=3", "elastic.join_window_s=0")
    cluster.join(0)
    looks = list[str]()
    monkeypatch.setattr(placement.Agents, "values", lambda agents: looks.append("values") or dict.values(agents))
    monkeypatch.setattr(placement.Agents, "items", lambda agents: looks.append("items") or dict.items(agents))
    cluster.join(1)
    cluster.join(1, "b")
    assert not cluster.is_taken, "its other agent is alive"
    cluster.now += 60
    second = cluster.join(1, "c")
    assert cluster.is_taken
    assert not looks
    assert [agent.id for agent in dict.values(cluster.coordinator.agents)] == ["0a", second.id]


def test_the_end_of_a_node_costs_no_look_at_all_others_while_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of ten thousand nodes end at once."""
    cluster = Cluster(tmp_path, "nodes=3", "elastic.join_window_s=0")
    members = [cluster.join(node) for node in range(3)]
    cluster.later(1, *members)
    with monkeypatch.context() as here:
        here.setattr(placement.Agents, "in_round", lambda _: pytest.fail("lists the nodes of the round"))
        cluster.ended(members[2])
        cluster.ended(members[1])
    cluster.ended(members[0])
    assert cluster.verdict is not None and cluster.verdict.verdict == "done"
