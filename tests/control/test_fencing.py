"""No two rounds of a run at a time: leases, terms, coordinators that were replaced."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_jobs.control.fencing import Terms
from fsdp_jobs.run import messages, threads
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.rank_state import SAVES_NOTHING
from fsdp_jobs.run.term import ROUND, Fenced, claim, newest
from fsdp_jobs.run.threads import wait_until
from tests.control.cluster import Cluster, failure


@pytest.mark.parametrize("saves", [False, True])
def test_a_fenced_node_that_wakes_up_is_told_that_its_round_is_over(tmp_path: Path, saves: bool) -> None:
    cluster = Cluster(tmp_path, "nodes=1:2", "elastic.join_window_s=0")
    a, b = cluster.join(0), cluster.join(1)
    committed = -1 if saves else SAVES_NOTHING
    cluster.later(0.2, a, b, committed=committed)
    cluster.later(11, a, committed=committed)
    assert cluster.coordinator.round.number == 0, "the others are still stopping their ranks"
    cluster.ready(a)
    cluster.later(8, a)
    assert cluster.coordinator.round.number == saves, "the program's own writing is fenced by its lease alone"
    cluster.later(6, a)
    assert cluster.coordinator.round.number == 1
    b_again = cluster.join(1, round_=0, size=2)
    assert cluster.last(b_again, messages.Break).round == 0


def test_no_round_begins_while_a_silent_nodes_lease_runs(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=1", "elastic.heartbeat_timeout_s=4", "elastic.lease_s=12")
    a = cluster.join(0)
    cluster.later(1, a)
    answered = cluster.last(a, messages.Alive).at
    replacement = cluster.join(0, life="b", host="other")
    assert not cluster.is_taken, "the one that it replaces may be well"
    cluster.later(5)
    replacement = cluster.join(0, life="b", host="other")
    cluster.later(answered + 12 - cluster.now, replacement)
    assert cluster.last(replacement, messages.Round) is None
    cluster.later(2, replacement)
    begun = cluster.last(replacement, messages.Round)
    assert begun is not None and (begun.number, begun.term) == (1, 2)
    assert "waiting until no rank" in cluster.events("waiting")[0]["why"]


def test_a_node_that_comes_back_before_its_lease_ends_is_not_waited_for(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2", "elastic.heartbeat_timeout_s=4", "elastic.lease_s=60")
    a, b = cluster.join(0), cluster.join(1)
    cluster.later(1, a, b)
    cluster.later(5, a)
    cluster.ready(a)
    back = cluster.join(1, round_=0, size=2)
    assert cluster.last(back, messages.Break) is not None
    cluster.ready(back)
    cluster.later(2, a, back)
    assert cluster.last(back, messages.Round).number == 1


def test_ranks_of_a_round_that_is_over_get_no_longer_lease(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2")
    a, b = cluster.join(0), cluster.join(1)
    cluster.later(1, a, b)
    assert cluster.last(b, messages.Alive).at == pytest.approx(cluster.now)
    cluster.closed(a)
    cluster.later(0.5, b)
    assert cluster.last(b, messages.Alive).at is None


def test_a_restarted_coordinator_waits_for_nodes_that_it_does_not_see(tmp_path: Path) -> None:
    first = Cluster(tmp_path, "nodes=1", "elastic.lease_s=20")
    first.later(1, first.join(0))
    for host, waits in (("node0", False), ("other", True)):
        cluster = Cluster(tmp_path, "nodes=1", "elastic.lease_s=20")
        cluster.later(1)
        cluster.coordinator.leases.on_charge(cluster.now)
        replacement = cluster.join(0, life="b", host=host)
        cluster.later(24, replacement)
        assert (cluster.last(replacement, messages.Round) is None) == waits
        cluster.later(5, replacement)
        assert cluster.last(replacement, messages.Round) is not None


def test_a_coordinator_that_was_replaced_writes_and_decides_nothing(tmp_path: Path) -> None:
    old, new = Cluster(tmp_path, "nodes=1"), Cluster(tmp_path, "nodes=1")
    a = old.join(0)
    old.later(1, a)
    b = new.join(0, life="b", host="node0")
    new.later(1, b)
    assert new.last(b, messages.Round).term == 2
    old.ready(a, failure(0, 0, exit_code=-9))
    before = old.run.events.read_text()
    old.later(2, a)
    assert old.coordinator.is_superseded, "a newer round has begun"
    recorded = old.run.events.read_text()
    assert "round_started" not in recorded.removeprefix(before)
    old.coordinator.on_stop("SIGTERM", old.now)
    old.later(70)
    assert old.run.events.read_text() == recorded and old.verdict is None and not old.coordinator.agents


def test_a_store_that_cannot_be_written_is_said_and_ends_the_attempt_in_time(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("no folder")
    place = f"checkpoint.dir={tmp_path / 'home'}"
    cluster = Cluster(tmp_path, "nodes=1", place, "elastic.wait_for_nodes_s=10")
    a = cluster.join(0)
    cluster.later(3, a)
    (waiting,) = cluster.events("waiting")
    assert "checkpoint.dir" in waiting["why"] and "cannot be written" in waiting["why"]
    cluster.later(9, a)
    assert cluster.verdict is not None and "cannot be written" in cluster.verdict.reason
    assert not cluster.events("round_started")


def test_a_killed_job_resumed_with_fewer_nodes_on_its_machine_waits_for_nobody(tmp_path: Path) -> None:
    first = Cluster(tmp_path, "nodes=2")
    first.later(1, first.join(0, host="vm"), first.join(1, host="vm"))
    assert first.events("round_started")
    resumed = Cluster(tmp_path, "nodes=1")
    a = resumed.join(0, life="b", host="vm")
    resumed.later(1, a)
    assert resumed.last(a, messages.Round) is not None


def test_an_agent_of_an_attempt_that_is_over_is_ended_and_not_adopted(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=1")
    late = cluster.join(0, round_=3, size=1, attempt=-1)
    assert not cluster.is_taken and cluster.last(late, messages.End).exit_code == 75
    assert not cluster.events("adopted") and not cluster.coordinator.agents


def test_a_node_whose_machine_is_not_there_is_lost_sooner_than_a_silent_one(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2:3", "elastic.join_window_s=0")
    a, b, c = (cluster.join(node) for node in range(3))
    cluster.later(1, a, b, c)
    cut_at = cluster.now
    cluster.later(3, a, b)
    c.is_unreachable = True  # its connection has timed out
    cluster.later(0.1, a, b)
    assert "cannot be reached" in cluster.events("node_lost")[0]["why"]
    for member in (a, b):
        cluster.ready(member)
    cluster.later(1, a, b)
    assert cluster.coordinator.round.number == 1 and cluster.coordinator.round.size == 2
    assert cluster.now - cut_at < 4.5, cluster.events("waiting")


def test_who_hears_only_its_own_machine_is_cut_off_itself_and_loses_none_before_the_timeout(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=1:4", "elastic.join_window_s=0")
    members = [cluster.join(node) for node in range(4)]
    cluster.later(1, *members)
    members[0].is_beside = True  # the coordinator runs on the first node, as on SLURM
    cluster.later(3, members[0])
    for member in members[1:]:
        member.is_unreachable = True
    cluster.later(4, members[0])
    assert not cluster.events("node_lost") and cluster.coordinator.round.running


def test_who_hears_nobody_may_be_cut_off_itself_and_loses_none_before_the_timeout(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2:3", "elastic.join_window_s=0")
    members = [cluster.join(node) for node in range(3)]
    cluster.later(1, *members)
    for member in members:
        cluster.later(3 if member is members[0] else 0.3)
        member.is_unreachable = True
    cluster.later(4)
    assert not cluster.events("node_lost")
    for node in range(3):  # the same agents, over new connections
        cluster.join(node, round_=0, size=3)
    cluster.later(1, *cluster.coordinator.agents.values())
    assert cluster.coordinator.round.running and not cluster.events("node_lost")


def test_a_new_coordinator_numbers_on_where_the_markers_were_purged(tmp_path: Path) -> None:
    """As by scratch's age limit, which spares the run directory's records: they are written to."""
    old = Cluster(tmp_path, "nodes=1", "elastic.join_window_s=0")
    a = old.join(0)
    old.later(1, a)
    old.ready(a, failure(0, 0, exit_code=-9))
    old.later(2, a)
    assert old.last(a, messages.Round).term == 2
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "terms")
    new = Cluster(tmp_path, "nodes=1", "elastic.join_window_s=0")
    b = new.join(0, life="b")
    new.later(60, b)
    assert new.last(b, messages.Round).term == 3


def test_a_first_claim_that_hangs_while_another_coordinator_takes_over_fences_no_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, answers, iterdir = RunDir(tmp_path / "run"), threading.Event(), Path.iterdir
    run.attempt(0).mkdir(parents=True)
    hanging = [answers]

    def slowly(path: Path) -> Iterator[Path]:
        if path.parent == run.checkpoints and hanging:
            hanging.pop().wait(20)
        return iterdir(path)

    monkeypatch.setattr(threads, "_SOON_S", 0.1)
    monkeypatch.setattr(Path, "iterdir", slowly)
    old, new = (Terms(run.checkpoints, run, 0) for _ in range(2))
    old.take_charge(seen=0)
    assert old.next(0, 0, now=0.0) is None
    new.take_charge(seen=0)
    assert wait_until(lambda: new.next(0, 0, now=0.0) is not None, 20)
    answers.set()
    with pytest.raises(Fenced):
        wait_until(lambda: old.next(0, 0, now=1.0) is not None, 20)
    assert newest(run.checkpoints, ROUND) == new.next(0, 0, now=1.0)


def test_a_claim_that_fails_after_it_was_made_does_not_fence_its_own_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took the number for another's, and decided nothing more: the job stood still for ever."""
    run, errors, iterdir = RunDir(tmp_path / "run"), [OSError(errno.EIO, "Input/output error")], Path.iterdir
    run.attempt(0).mkdir(parents=True)
    claim(run.checkpoints, ROUND, "the round before", above=4)

    def fails(path: Path) -> Iterator[Path]:
        if errors and (path / f"{ROUND}-00000006").exists():
            raise errors.pop()
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", fails)
    terms = Terms(run.checkpoints, run, 0)
    terms.take_charge(seen=0)
    assert wait_until(lambda: terms.next(5, 0, now=0.0) is None and bool(terms.problem), 20)
    assert wait_until(lambda: terms.next(5, 0, now=60.0) is not None, 20)
    assert terms.next(5, 0, now=60.0) == newest(run.checkpoints, ROUND) == 7
    terms.use()
    claim(run.checkpoints, ROUND, "another's")
    with pytest.raises(Fenced):
        wait_until(lambda: terms.next(7, 0, now=120.0) is not None, 20)
