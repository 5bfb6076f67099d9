"""The coordinator's decisions, with agents that are only messages and a clock that only we move."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.elastic.placement import ConnectedAgent
from fsdp_jobs.elastic.rank_state import SAVES_NOTHING, Phase, Request
from fsdp_jobs.elastic.rounds import Coordinator
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.tail import read_json_lines
from fsdp_jobs.run.verdict import Verdict


class Cluster:
    """A coordinator, its clock, and the messages each agent has received."""

    def __init__(self, folder: Path, *overrides: str):
        self.run = RunDir(folder / "run")
        self.run.attempt(0).mkdir(parents=True, exist_ok=True)
        self.config = compose_job(["nproc_per_node=2", *overrides])
        self.now = 0.0
        self.coordinator = Coordinator(self.config, self.run, 0, self.now)
        self.received: dict[str, list[dict[str, Any]]] = {}

    def join(
        self,
        node: int,
        life: str = "a",
        round_: int = -1,
        size: int = 0,
        switches: tuple[str, ...] = (),
        host: str = "",
        signal: str = "",
        attempt: int = 0,
    ) -> ConnectedAgent:
        inbox = self.received.setdefault(f"{node}{life}", [])
        member = ConnectedAgent(
            node=node,
            host=host or f"node{node}",
            address=f"node{node}",
            nproc=2,
            switches=list(switches),
            id=f"{node}{life}",
            send=inbox.append,
            drop=lambda: None,
            heard=self.now,
        )
        running = {"round": round_, "epoch": 1 if round_ >= 0 else 0, "size": size, "shard_group": 2}
        hello = {**running, "attempt": attempt, "ready": round_ < 0, "signal": signal, "at": self.now}
        self.is_taken = self.coordinator.on_hello(member, hello, self.now)
        return member

    def ready(self, member: ConnectedAgent, *failures: dict[str, Any]) -> None:
        self.coordinator.on_ready(member, {"failures": list(failures), "at": self.now}, self.now)

    def ended(self, member: ConnectedAgent) -> None:
        self.coordinator.on_ended(member, {}, self.now)

    def closed(self, member: ConnectedAgent) -> None:
        """Its process has died, and the kernel has closed its connection."""
        self.coordinator.on_gone(member, "closed", self.now, certain=True)

    def later(
        self, seconds: float, *beating: ConnectedAgent, step: int = 1, committed: int = -1, phase: int = 1
    ) -> None:
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += 0.1
            for member in beating:
                ranks = [[step, committed, phase]] * 2 if member.in_round else []
                self.coordinator.on_beat(member, {"ranks": ranks, "at": self.now}, self.now)
            self.coordinator.tick(self.now)

    def last(self, member: ConnectedAgent, kind: str) -> dict[str, Any] | None:
        return next((m for m in reversed(self.received[member.id]) if m["kind"] == kind), None)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [e for e in read_json_lines(self.run.events) if e["event"] == name]

    @property
    def verdict(self) -> Verdict | None:
        return Verdict.read(self.run, 0)


def _failure(
    node: int, rank: int, error: str = "", exit_code: int = 1, step: int = 5, time: float = 1.0
) -> dict[str, Any]:
    return {"node": node, "rank": rank, "exit_code": exit_code, "error": error, "time": time, "step": step}


def test_ranks_follow_the_topology_and_natural_order(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=4")
    members = {
        n: cluster.join(n, switches=("spine", leaf))
        for n, leaf in ((10, "leaf2"), (2, "leaf2"), (3, "leaf1"), (1, "leaf1"))
    }
    cluster.later(0.2, *members.values())
    ranks = {n: cluster.last(m, "round")["rank"] for n, m in members.items()}  # type: ignore[index]
    assert ranks == {1: 0, 3: 1, 2: 2, 10: 3}


def test_an_elastic_job_waits_for_more_nodes_then_starts_with_enough(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2:4", "elastic.join_window_s=20")
    a, b = cluster.join(0), cluster.join(1)
    cluster.later(19, a, b)
    assert cluster.last(a, "round") is None
    cluster.later(2, a, b)
    assert cluster.last(a, "round")["size"] == 2  # type: ignore[index]


def test_a_dead_agent_breaks_the_round_at_once_and_a_silent_one_after_its_timeout(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=1:3", "elastic.join_window_s=0", "fsdp=full_shard")
    a, b, c = cluster.join(0), cluster.join(1), cluster.join(2)
    cluster.later(0.2, a, b, c)
    cluster.closed(c)
    assert cluster.last(a, "break") is not None and cluster.last(b, "break") is not None
    for member in (a, b):
        cluster.ready(member)
    cluster.later(3, a, b)
    assert cluster.last(a, "round")["size"] == 2  # type: ignore[index]
    silent_since = cluster.now
    cluster.later(9, a)
    assert len(cluster.events("node_lost")) == 1
    cluster.later(2, a)
    lost = cluster.events("node_lost")
    assert len(lost) == 2 and "silent" in lost[1]["why"]
    assert cluster.now - silent_since < 12


def test_a_fenced_node_that_wakes_up_is_told_that_its_round_is_over(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=1:2", "elastic.join_window_s=0")
    a, b = cluster.join(0), cluster.join(1)
    cluster.later(0.2, a, b)
    cluster.later(11, a)
    cluster.ready(a)
    cluster.later(8, a)
    assert cluster.coordinator.round.number == 0, "its ranks may run until its lease ends"
    cluster.later(6, a)
    assert cluster.coordinator.round.number == 1
    b_again = cluster.join(1, round_=0, size=2)
    assert cluster.last(b_again, "break")["round"] == 0  # type: ignore[index]


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


def test_new_nodes_wait_until_the_ranks_have_saved_and_parked(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=1:2", "elastic.join_window_s=0", "fsdp=full_shard")
    a = cluster.join(0)
    cluster.later(0.5, a)
    b = cluster.join(1)
    cluster.later(1, a, b)
    assert cluster.last(a, "request") == {"kind": "request", "request": int(Request.PARK)}
    assert cluster.last(a, "break") is None
    cluster.later(1, a, b, step=7, committed=7, phase=int(Phase.PARKED))
    assert cluster.last(a, "break") is not None
    cluster.ready(a)
    cluster.later(2, a, b)
    assert cluster.last(b, "round")["size"] == 2  # type: ignore[index]
    assert cluster.verdict is None


def test_where_nodes_are_replaced_the_notice_of_one_ends_its_part_alone(tmp_path: Path) -> None:
    """A forced deletion of a pod is SIGTERM and 2 s, as seen on Kubernetes 1.36: no preemption of the job."""
    pods = ("cluster=kubernetes", "cluster.accelerator=cpu", "hardware=cpu", "nodes=2", "elastic.join_window_s=0")
    cluster = Cluster(tmp_path, *pods)
    a, b = cluster.join(0), cluster.join(1)
    for member in (a, b):
        cluster.ready(member)
    cluster.later(1, a, b)
    cluster.coordinator.on_notice(b, {"signal": "SIGTERM"}, cluster.now)
    assert cluster.last(a, "request") == {"kind": "request", "request": int(Request.PARK)}
    assert not cluster.events("stop_requested")
    cluster.later(1, a, b, step=7, committed=7, phase=int(Phase.PARKED))
    assert cluster.last(a, "break") is not None
    for member in (a, b):
        cluster.ready(member)
    cluster.later(2, a)
    assert cluster.last(b, "end")["exit_code"] == 75 and cluster.verdict is None  # type: ignore[index]
    assert "nodes [1] were told to end" in cluster.events("round_broken")[-1]["why"]
    new = cluster.join(1, life="b")
    cluster.ready(new)
    cluster.later(2, a, new)
    assert cluster.last(new, "round")["size"] == 2 and cluster.verdict is None  # type: ignore[index]

    for member in (a, new):  # all of it is taken away
        cluster.coordinator.on_notice(member, {"signal": "SIGTERM"}, cluster.now)
    cluster.later(1, a, new, step=9, committed=9, phase=int(Phase.PARKED))
    assert cluster.verdict is not None and cluster.verdict.verdict == "preempted"

    killed = Cluster(tmp_path / "killed", *pods)
    a, b = killed.join(0), killed.join(1)
    for member in (a, b):
        killed.ready(member)
    killed.later(1, a, b)
    killed.coordinator.on_notice(b, {"signal": "SIGTERM"}, killed.now)
    killed.later(1, a, b)
    killed.closed(b)  # before anything was saved
    killed.later(0.2, a)
    killed.ready(a)
    new = killed.join(1, life="b")
    killed.ready(new)
    killed.later(5, a, new)
    assert killed.last(new, "round")["size"] == 2 and killed.verdict is None  # type: ignore[index]


def test_below_the_minimum_the_job_waits_then_leaves_to_be_requeued(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2", "elastic.wait_for_nodes_s=30")
    a = cluster.join(0)
    cluster.later(29, a)
    assert cluster.verdict is None
    cluster.later(2, a)
    assert cluster.verdict is not None
    assert (cluster.verdict.verdict, cluster.verdict.decision) == ("infrastructure", "requeue")
    assert cluster.last(a, "end")["exit_code"] == 75  # type: ignore[index]


@pytest.mark.parametrize(
    ("errors", "verdict", "rounds"),
    [
        (["ValueError: bug", "ValueError: bug"], "user_error", 2),
        (["JobFailed: checkpoint of another model"], "user_error", 1),
        (["", "", "", ""], "infrastructure", 4),
        (["ValueError: one", "ValueError: two", "KeyError: three", "OSError: four"], "user_error", 4),
    ],
)
def test_when_failures_end_the_job(tmp_path: Path, errors: list[str], verdict: str, rounds: int) -> None:
    cluster = Cluster(tmp_path, "nodes=2", "elastic.max_failures_without_progress=3", "elastic.exclude_after=0")
    a, b = cluster.join(0), cluster.join(1)
    for error in errors:
        cluster.later(1.5, a, b)
        failure = _failure(1, 2, error, exit_code=1 if error else -9)
        victim = _failure(
            0, 0, "RuntimeError: Connection closed by peer", time=0.5
        )  # earlier, and no cause all the same
        cluster.ready(b, failure)
        cluster.ready(a, victim)
    cluster.later(3, a, b)
    assert cluster.verdict is not None, cluster.events("round_broken")
    assert cluster.verdict.verdict == verdict and cluster.verdict.rank == 2
    assert len(cluster.events("round_started")) == rounds


def test_progress_renews_the_budget(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=1", "elastic.max_failures_without_progress=1")
    a = cluster.join(0)
    for i in range(6):
        cluster.later(1.5, a, step=i * 10, committed=i * 10)
        cluster.ready(a, _failure(0, 0, exit_code=-9))
    cluster.later(3, a, committed=60)
    assert cluster.verdict is None


def test_a_stop_request_saves_everywhere_and_is_judged_preempted(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2")
    a, b = cluster.join(0), cluster.join(1)
    cluster.later(1, a, b)
    cluster.coordinator.on_stop("SIGTERM received", cluster.now)
    assert cluster.last(b, "request") == {"kind": "request", "request": int(Request.STOP)}
    for member in (a, b):
        cluster.ready(member, _failure(member.node, 0, exit_code=75))
    cluster.later(2, a, b)
    assert cluster.verdict is not None
    assert (cluster.verdict.verdict, cluster.verdict.decision) == ("preempted", "requeue")


def test_a_restarted_coordinator_adopts_the_running_round(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2")
    a, b = cluster.join(0, round_=4, size=2), cluster.join(1, round_=4, size=2)
    cluster.later(15, a, b)
    assert cluster.coordinator.round.number == 4 and cluster.coordinator.round.running
    assert cluster.last(a, "break") is None and cluster.last(b, "break") is None
    for member in (a, b):
        cluster.ended(member)
    assert cluster.verdict is not None and cluster.verdict.verdict == "done"


def fails(cluster: Cluster, members: list[ConnectedAgent], node: int, error: str = "") -> None:
    """A rank of a node fails in the running round, and everyone comes back."""
    failure = _failure(node, node * 2, error, exit_code=1 if error else -9)
    for member in members:
        cluster.ready(member, *[failure] if member.node == node else [])


def test_a_machine_that_fails_repeatedly_is_done_without_and_taken_back_later(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2:3", "elastic.join_window_s=0", "elastic.exclude_after=3", "fsdp=full_shard")
    members = [cluster.join(n) for n in range(3)]
    for i in range(3):
        cluster.later(1.5, *members, step=i + 1, committed=i)  # it makes progress: the budget is not what ends this
        fails(cluster, members, node=2)
    cluster.later(2, *members)
    assert list(cluster.run.excluded_hosts()) == ["node2"]
    (event,) = cluster.events("machine_excluded")
    assert event["host"] == "node2" and "3 failures" in event["why"] and "rank 4 on node 2" in event["why"]
    assert cluster.events("round_started")[-1]["nodes"] == [0, 1]
    assert cluster.last(members[2], "end")["exit_code"] == 75  # type: ignore[index]
    listed = json.loads(cluster.run.excluded.read_text())
    cluster.run.excluded.write_text(json.dumps({"node2": {**listed["node2"], "until": 0}}))
    cluster.later(1, *members[:2], step=9)
    back = cluster.join(2, life="b")
    cluster.later(1, *members[:2], back, step=9)
    assert cluster.last(members[0], "request") == {"kind": "request", "request": int(Request.PARK)}


def test_without_an_excluded_machine_below_the_minimum_the_launcher_is_to_find_another(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2", "elastic.exclude_after=1")
    members = [cluster.join(0), cluster.join(1)]
    cluster.later(1.5, *members)
    fails(cluster, members, node=1)
    cluster.later(70, members[0])
    assert cluster.verdict is not None and cluster.verdict.decision == "requeue"
    assert "node1 is excluded" in cluster.verdict.reason


def test_attempts_that_lead_nowhere_are_not_repeated_for_ever(tmp_path: Path) -> None:
    decisions = []
    for _ in range(4):
        cluster = Cluster(tmp_path, "nodes=2", "elastic.wait_for_nodes_s=5")
        cluster.later(6, cluster.join(0))
        verdict = cluster.verdict
        assert verdict is not None and verdict.verdict == "infrastructure"
        decisions.append(verdict.decision)
    assert decisions == ["requeue", "requeue", "requeue", "stop"]
    assert "4 attempts without a new checkpoint" in verdict.reason


def test_ranks_that_run_out_of_memory_stop_the_job_with_what_would_fit(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2", "data.micro_batch=4")
    members = [cluster.join(0), cluster.join(1)]
    for size in (512, 514):
        cluster.later(1.5, *members)
        fails(cluster, members, node=1, error=f"OutOfMemoryError: CUDA out of memory. Tried to allocate {size} MiB")
    cluster.later(3, *members)
    assert cluster.verdict is not None and cluster.verdict.verdict == "user_error"
    assert "the same error at the same step twice" in cluster.verdict.reason
    assert "fsdp.activation_checkpointing=full" in cluster.verdict.reason


def test_ranks_that_left_on_request_while_there_was_no_coordinator_were_preempted(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2")
    members = [cluster.join(n, round_=0, size=2, signal="SIGTERM" if n else "") for n in range(2)]
    for member in members:
        cluster.ready(member, _failure(member.node, member.node, exit_code=75))
    cluster.later(3, *members)
    assert cluster.verdict is not None
    assert (cluster.verdict.verdict, cluster.verdict.decision) == ("preempted", "requeue")
    assert "node 1 received SIGTERM" in cluster.verdict.reason


PROGRAM = ("script=train.py", "elastic.join_window_s=1")
SILENCE = {"step": -1, "committed": SAVES_NOTHING, "phase": int(Phase.STARTING)}


def test_a_program_that_says_nothing_is_broken_off_for_new_nodes(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=1:2", *PROGRAM)
    a = cluster.join(0)
    cluster.later(3, a, **SILENCE)
    assert [e["nodes"] for e in cluster.events("round_started")] == [[0]]
    b = cluster.join(1)
    cluster.later(1, a, b, **SILENCE)
    assert cluster.last(a, "break") is not None
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
    cluster.coordinator.on_failed(a, {"failures": [_failure(0, 0, exit_code=-15, step=-1)]}, cluster.now)
    cluster.ready(a)
    cluster.later(20, a, b, **SILENCE)
    assert cluster.verdict is None and cluster.last(b, "break") is None, "the other is still saving"
    cluster.ended(b)
    cluster.later(1, a, b, **SILENCE)
    assert cluster.verdict is not None
    assert (cluster.verdict.verdict, cluster.verdict.decision) == ("preempted", "requeue")


@pytest.mark.parametrize(
    ("lives_s", "errors", "verdict"), [(700, 6, None), (5, 2, "user_error"), (700, 1, "user_error")]
)
def test_long_lives_are_a_silent_programs_progress(
    tmp_path: Path, lives_s: float, errors: int, verdict: str | None
) -> None:
    """Six failures, `errors` different ones in turn, each after so many seconds."""
    cluster = Cluster(tmp_path, "nodes=2", *PROGRAM)
    members = [cluster.join(0), cluster.join(1)]
    for i in range(6):
        cluster.later(2, *members, **SILENCE)
        cluster.now += lives_s
        for member in members:
            member.heard = cluster.now
            failed = [_failure(1, 2, f"ValueError: {'x' * (i % errors)}", step=-1)] if member.node else []
            cluster.ready(member, *failed)
        cluster.later(1.5, *members, **SILENCE)
        if cluster.verdict is not None:
            break
    assert (cluster.verdict.verdict if cluster.verdict else None) == verdict


def test_an_exit_code_without_a_word_is_the_programs(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2", *PROGRAM)
    members = [cluster.join(0), cluster.join(1)]
    for _ in range(2):
        cluster.later(2, *members, **SILENCE)
        for member in members:
            failed = [_failure(1, 2, exit_code=3, step=-1)] if member.node else []
            cluster.ready(member, *failed)
    cluster.later(2, *members, **SILENCE)
    assert cluster.verdict is not None
    assert cluster.verdict.verdict == "user_error" and "exit code 3; the same twice in a row" in cluster.verdict.reason


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


def test_no_round_begins_while_a_silent_nodes_lease_runs(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=1", "elastic.heartbeat_timeout_s=4", "elastic.lease_s=12")
    a = cluster.join(0)
    cluster.later(1, a)
    answered = [m["at"] for m in cluster.received[a.id] if m["kind"] == "alive"][-1]
    replacement = cluster.join(0, life="b", host="other")
    assert not cluster.is_taken, "the one that it replaces may be well"
    cluster.later(5)
    replacement = cluster.join(0, life="b", host="other")
    cluster.later(answered + 12 - cluster.now, replacement)
    assert cluster.last(replacement, "round") is None
    cluster.later(2, replacement)
    begun = cluster.last(replacement, "round")
    assert begun is not None and (begun["round"], begun["epoch"]) == (1, 2)
    assert "waiting until no rank" in cluster.events("waiting")[0]["why"]


def test_a_node_that_comes_back_before_its_lease_ends_is_not_waited_for(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2", "elastic.heartbeat_timeout_s=4", "elastic.lease_s=60")
    a, b = cluster.join(0), cluster.join(1)
    cluster.later(1, a, b)
    cluster.later(5, a)
    cluster.ready(a)
    back = cluster.join(1, round_=0, size=2)
    assert cluster.last(back, "break") is not None
    cluster.ready(back)
    cluster.later(2, a, back)
    assert cluster.last(back, "round")["round"] == 1  # type: ignore[index]


def test_ranks_of_a_round_that_is_over_get_no_longer_lease(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2")
    a, b = cluster.join(0), cluster.join(1)
    cluster.later(1, a, b)
    assert cluster.last(b, "alive")["at"] == pytest.approx(cluster.now)  # type: ignore[index]
    cluster.closed(a)
    cluster.later(0.5, b)
    assert cluster.last(b, "alive") == {"kind": "alive", "at": None}


def test_a_restarted_coordinator_waits_for_nodes_that_it_does_not_see(tmp_path: Path) -> None:
    first = Cluster(tmp_path, "nodes=1", "elastic.lease_s=20")
    first.later(1, first.join(0))
    for host, waits in (("node0", False), ("other", True)):
        cluster = Cluster(tmp_path, "nodes=1", "elastic.lease_s=20")
        cluster.later(1)
        cluster.coordinator.leases.on_charge(5.0, cluster.now)
        replacement = cluster.join(0, life="b", host=host)
        cluster.later(24, replacement)
        assert (cluster.last(replacement, "round") is None) == waits
        cluster.later(5, replacement)
        assert cluster.last(replacement, "round") is not None


def test_a_coordinator_that_was_replaced_writes_and_decides_nothing(tmp_path: Path) -> None:
    old, new = Cluster(tmp_path, "nodes=1"), Cluster(tmp_path, "nodes=1")
    a = old.join(0)
    old.later(1, a)
    b = new.join(0, life="b", host="node0")
    new.later(1, b)
    assert new.last(b, "round")["epoch"] == 2  # type: ignore[index]
    old.ready(a, _failure(0, 0, exit_code=-9))
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


def test_a_coordinator_that_loses_several_machines_at_once_blames_none(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=3", "elastic.exclude_after=1")
    a, b, c = (cluster.join(n) for n in range(3))
    cluster.later(1, a, b, c)
    cluster.later(0.5, a, b)
    cluster.later(12, a)
    (broken,) = cluster.events("round_broken")
    assert broken["why"] == "the coordinator lost 2 of 3 nodes at once" and "blamed" not in broken
    assert not cluster.run.excluded_hosts()


def test_a_coordinator_that_stood_still_has_not_heard_less_of_its_agents(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2")
    a, b = cluster.join(0), cluster.join(1)
    cluster.later(1, a, b)
    cluster.now += 30
    cluster.later(5)
    cluster.later(1, a, b)
    assert not cluster.events("node_lost")


def test_the_first_cause_is_the_first_that_arrived(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2")
    a, b = cluster.join(0), cluster.join(1)
    cluster.later(1, a, b)
    cluster.ready(b, _failure(1, 2, exit_code=-9, time=5000.0))
    cluster.ready(a, _failure(0, 0, exit_code=-9, time=100.0))  # of a machine whose clock is behind
    cluster.later(2, a, b)
    assert "rank 2 on node 1" in cluster.events("round_broken")[0]["why"]


def test_a_stop_file_that_cannot_be_read_is_a_warning(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=1")
    a = cluster.join(0)
    cluster.run.stop_request.mkdir()
    cluster.later(2, a)
    assert cluster.verdict is None and not cluster.events("stop_requested")
    assert "stop cannot be read" in cluster.events("waiting")[0]["why"]
    assert len(cluster.events("waiting")) < 3, "said once"


def test_torn_lines_do_not_keep_a_coordinator_from_starting(tmp_path: Path) -> None:
    first = Cluster(tmp_path, "nodes=1")
    a = first.join(0)
    first.later(1, a)
    with first.run.events.open("ab") as f:
        f.write(b'{"time": 1.0, "event": "chec\n\xff\x00\n[1]\n{"event": "checkpoint"}\n{"a": 1}\n')
        f.write(b'{"time": 2.0, "event": "checkpoint", "attempt": 0, "step": 7}\n')
    cluster = Cluster(tmp_path, "nodes=1")
    assert cluster.coordinator.committed == 7 and cluster.coordinator.round.number == 0


def test_an_agent_of_an_attempt_that_is_over_is_ended_and_not_adopted(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=1")
    late = cluster.join(0, round_=3, size=1, attempt=-1)
    assert not cluster.is_taken and cluster.last(late, "end")["exit_code"] == 75  # type: ignore[index]
    assert not cluster.events("adopted") and not cluster.coordinator.agents


def test_a_killed_job_resumed_with_fewer_nodes_on_its_machine_waits_for_nobody(tmp_path: Path) -> None:
    first = Cluster(tmp_path, "nodes=2")
    first.later(1, first.join(0, host="vm"), first.join(1, host="vm"))
    assert first.events("round_started")
    resumed = Cluster(tmp_path, "nodes=1")
    a = resumed.join(0, life="b", host="vm")
    resumed.later(1, a)
    assert resumed.last(a, "round") is not None
