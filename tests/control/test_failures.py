"""What follows from failures: another round, the end of the job, machines that are excluded."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_jobs.control.failures import Machines
from fsdp_jobs.control.placement import Agents
from fsdp_jobs.run import events, messages
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.failure import summary
from fsdp_jobs.run.rank_state import Phase, Request
from tests.control.cluster import PROGRAM, SILENCE, Cluster, fails, failure
from tests.nfs import away


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
        cause = failure(1, 2, error, exit_code=1 if error else -9)
        victim = failure(
            0, 0, "RuntimeError: Connection closed by peer", time=0.5
        )  # earlier, and no cause all the same
        cluster.ready(b, cause)
        cluster.ready(a, victim)
    cluster.later(3, a, b)
    assert cluster.verdict is not None, cluster.events("round_broken")
    assert cluster.verdict.verdict == verdict and cluster.verdict.rank == 2
    assert len(cluster.events("round_started")) == rounds


def test_a_rank_that_a_real_time_signal_ends_is_a_failure_like_others(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=1")
    a = cluster.join(0)
    cluster.later(1.5, a)
    cluster.ready(a, failure(0, 0, exit_code=-37))
    cluster.later(1.5, a)
    assert cluster.events("round_broken")[-1]["why"] == "rank 0 on node 0 was killed by SIGRTMIN+3"


def test_a_job_that_is_suspended_again_and_again_goes_on_and_nobody_is_blamed(tmp_path: Path) -> None:
    """As under SLURM's time slices: each time the ranks' leases run out, and the agents kill their ranks."""
    cluster = Cluster(tmp_path, "nodes=2", "elastic.exclude_after=1")
    a, b = cluster.join(0), cluster.join(1)
    for _ in range(6):
        cluster.later(1.5, a, b)
        cluster.now += 40
        cluster.ready(b, failure(1, 2, exit_code=-9))  # its message comes before the next tick
        cluster.later(0.1, a, b)
        cluster.ready(a, failure(0, 0, exit_code=-9))
        cluster.later(3, a, b)
    broken = cluster.events("round_broken")
    assert cluster.verdict is None and len(broken) == 6, broken
    assert all(e["why"].startswith("the job stood still for 40 s") and not e.get("blamed") for e in broken), broken
    assert not cluster.events("machine_excluded")


def test_progress_renews_the_budget(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=1", "elastic.max_failures_without_progress=1")
    a = cluster.join(0)
    for i in range(6):
        cluster.later(1.5, a, step=i * 10, committed=i * 10)
        cluster.ready(a, failure(0, 0, exit_code=-9))
    cluster.later(3, a, committed=60)
    assert cluster.verdict is None


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
    assert cluster.last(members[2], messages.End).exit_code == 75
    listed = json.loads(cluster.run.excluded.read_text())
    cluster.run.excluded.write_text(json.dumps({"node2": {**listed["node2"], "until": 0}}))
    cluster.later(1, *members[:2], step=9)
    back = cluster.join(2, life="b")
    cluster.later(1, *members[:2], back, step=9)
    assert cluster.last(members[0], messages.Request) == messages.Request(Request.PARK)


def test_failures_of_days_ago_exclude_no_machine() -> None:
    def blamed(ago_s: float) -> events.RoundBroken:
        return events.RoundBroken("ECC", 5, -1, blamed="node1", time=time.time() - ago_s)

    assert Machines(3, 3600, [blamed(4000), blamed(60)]).blame("node1", "ECC") is None
    assert "3 failures within 3600 s" in str(Machines(3, 3600, [blamed(3000), blamed(60)]).blame("node1", "ECC"))


def test_without_an_excluded_machine_below_the_minimum_the_launcher_is_to_find_another(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2", "elastic.exclude_after=1")
    members = [cluster.join(0), cluster.join(1)]
    cluster.later(1.5, *members)
    fails(cluster, members, node=1)
    cluster.later(70, members[0])
    assert cluster.verdict is not None and cluster.verdict.decision == "requeue"
    assert "node1 is excluded" in cluster.verdict.reason


@pytest.mark.parametrize("first", ["killed", "lost"])
def test_of_two_failures_within_a_second_one_is_told_and_blamed(tmp_path: Path, first: str) -> None:
    cluster = Cluster(tmp_path, "nodes=3", "elastic.join_window_s=0")
    members = a, b, c = [cluster.join(n) for n in range(3)]
    cluster.later(1.5, *members)
    happens = {"killed": lambda: cluster.ready(a, failure(0, 0, exit_code=-9)), "lost": lambda: cluster.closed(b)}
    happens.pop(first)()
    cluster.later(0.3, a, c)
    for then in happens.values():
        then()
    cluster.ready(c)
    cluster.later(2, a, c)
    (broken,) = cluster.events("round_broken")
    expected = ("rank 0 on node 0", "node0") if first == "killed" else ("closed", "node1")
    assert (broken["why"].startswith(expected[0]), broken["blamed"]) == (True, expected[1]), broken


@pytest.mark.parametrize("count", [1, 2])
def test_what_two_nodes_cannot_read_accuses_no_machine(tmp_path: Path, count: int) -> None:
    """As a file server that hangs, or a store's credentials that have expired."""
    cluster = Cluster(tmp_path, "nodes=2", "elastic.join_window_s=0")
    members = [cluster.join(n) for n in range(2)]
    cluster.later(1.5, *members)
    for number, member in enumerate(members):
        why = f"CannotReadHere: node{number} cannot read step-00000002/__{number}_0.distcp: Input/output error."
        cluster.ready(member, *([failure(number, number, why)] if number < count else []))
    cluster.later(2, *members)
    (broken,) = cluster.events("round_broken")
    assert broken["why"].startswith("rank 0 on node 0 failed") and broken.get("blamed") == ("node0", None)[count - 1]


def test_a_node_that_is_lost_is_told_also_where_its_victims_say_so_first(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2", "elastic.join_window_s=0")
    a, b = [cluster.join(n) for n in range(2)]
    cluster.later(1.5, a, b)
    cluster.ready(a, failure(0, 0, "RuntimeError: Connection closed by peer"))
    cluster.closed(b)
    cluster.later(2, a)
    (broken,) = cluster.events("round_broken")
    assert (broken["why"], broken["blamed"]) == ("closed", "node1")


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
    events.append_lines(cluster.run.events, events.Submitted("local_fsdp://m/x", time=1.0).to_record())
    cluster = Cluster(tmp_path, "nodes=2", "elastic.wait_for_nodes_s=5")
    cluster.later(6, cluster.join(0))
    assert cluster.verdict is not None and cluster.verdict.decision == "requeue", "who submits again has mended it"


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
        cluster.skip(lives_s, *members)
        for member in members:
            failed = [failure(1, 2, f"ValueError: {'x' * (i % errors)}", step=-1)] if member.node else []
            cluster.ready(member, *failed)
        cluster.later(1.5, *members, **SILENCE)
        if cluster.verdict is not None:
            break
    assert (cluster.verdict.verdict if cluster.verdict else None) == verdict


@pytest.mark.parametrize("reports_steps", [False, True])
def test_time_in_a_collective_that_timed_out_is_no_progress(tmp_path: Path, reports_steps: bool) -> None:
    """A program that saves nothing hangs in every round until its collectives time out, half an hour later."""
    cluster = Cluster(tmp_path, "nodes=2", *PROGRAM, "elastic.max_failures_without_progress=3")
    members = [cluster.join(0), cluster.join(1)]
    state = {**SILENCE, "step": 7} if reports_steps else SILENCE
    for _ in range(6):
        cluster.later(2, *members, **state)
        cluster.skip(1800, *members)
        for member in members:
            timed_out = failure(member.node, 2 * member.node, "RuntimeError: Timed out waiting 1800000ms for recv")
            cluster.ready(member, replace(timed_out, waited_s=1800.0 if member.node else 0.0))
        cluster.later(1.5, *members, **state)
        if cluster.verdict is not None:
            break
    assert cluster.verdict is not None and cluster.verdict.decision == "stop"
    assert "4 failures without a new checkpoint; the last: rank 0 on node 0" in cluster.verdict.reason


def test_an_exit_code_without_a_word_is_the_programs(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2", *PROGRAM)
    members = [cluster.join(0), cluster.join(1)]
    for _ in range(2):
        cluster.later(2, *members, **SILENCE)
        for member in members:
            failed = [failure(1, 2, exit_code=3, step=-1)] if member.node else []
            cluster.ready(member, *failed)
    cluster.later(2, *members, **SILENCE)
    assert cluster.verdict is not None
    assert cluster.verdict.verdict == "user_error" and "exit code 3; the same twice in a row" in cluster.verdict.reason


def test_an_error_is_the_same_whether_or_not_its_rank_had_ended_when_it_was_reported(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=1", *PROGRAM)
    a = cluster.join(0)
    for exit_code in (1, 2):  # of a rank that is still ending the agent knows no exit code, and says 1
        cluster.later(2, a, **SILENCE)
        cluster.ready(a, failure(0, 0, "NoSuchOption: No such option: --stepz", exit_code, step=-1))
    cluster.later(2, a, **SILENCE)
    assert cluster.verdict is not None and cluster.verdict.verdict == "user_error", cluster.events("round_broken")
    assert "--stepz; the same twice in a row" in cluster.verdict.reason


@pytest.mark.parametrize(
    ("steps", "restored", "verdict"),
    [
        ((57, 57), (50, 50), "user_error"),
        ((57, 58, 57, 58), (50, 50, 50, 50), "infrastructure"),
        ((50, 50, 50, 50), (50, 50, 50, 50), "infrastructure"),  # the machine may be broken: nothing has run on it
        ((80, 80, 80, 80), (50, 80, 80, 80), "infrastructure"),  # the same, from a snapshot of step 80
    ],
)
def test_a_segmentation_fault_at_the_same_step_is_the_programs(
    tmp_path: Path, steps: tuple[int, ...], restored: tuple[int, ...], verdict: str
) -> None:
    cluster = Cluster(tmp_path, "nodes=2", "elastic.max_failures_without_progress=3", "elastic.exclude_after=0")
    members = [cluster.join(0), cluster.join(1)]
    for step, begin in zip(steps, restored, strict=True):
        cluster.later(2, *members, step=begin, committed=50, phase=int(Phase.STARTING))
        for member in members:
            crashed = [failure(1, 2, exit_code=-signal.SIGSEGV, step=step)] if member.node else []
            cluster.ready(member, *crashed)
        cluster.later(1.5, *members, step=begin, committed=50, phase=int(Phase.STARTING))
    assert cluster.verdict is not None and cluster.verdict.verdict == verdict
    is_named = "SIGSEGV; the same error at the same step twice" in cluster.verdict.reason
    assert is_named is (verdict == "user_error"), cluster.verdict.reason


def test_a_coordinator_that_loses_several_machines_at_once_blames_none(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=3", "elastic.exclude_after=1")
    a, b, c = (cluster.join(n) for n in range(3))
    cluster.later(1, a, b, c)
    cluster.later(0.5, a, b)
    cluster.later(12, a)
    (broken,) = cluster.events("round_broken")
    assert broken["why"] == "the coordinator lost 2 of 3 nodes at once" and "blamed" not in broken
    assert not cluster.run.excluded_hosts()


def test_a_coordinator_that_hears_no_other_machine_blames_none(tmp_path: Path) -> None:
    """Of two nodes it cannot know which one's network is down."""
    cluster = Cluster(tmp_path, "nodes=2", "elastic.exclude_after=1")
    a, b = cluster.join(0), cluster.join(1)
    a.is_beside = True
    cluster.later(1, a, b)
    cluster.later(15, a)
    (broken,) = cluster.events("round_broken")
    assert "node 1 (node1) was silent" in broken["why"] and "blamed" not in broken
    assert not cluster.run.excluded_hosts()


def test_the_machine_of_a_single_node_is_excluded_where_another_can_be_had(tmp_path: Path) -> None:
    for where, is_excluded in (
        (["cluster=slurm"], True),
        (["cluster=slurm", "cluster.nodelist=node0"], False),
        ([], False),
    ):
        cluster = Cluster(tmp_path / str(len(where)), "nodes=1", "elastic.exclude_after=1", *where)
        a = cluster.join(0)
        cluster.later(1, a)
        cluster.ready(a, failure(0, 0, "AcceleratorError: CUDA error: uncorrectable ECC error encountered"))
        cluster.later(2, a)
        assert bool(cluster.run.excluded_hosts()) is is_excluded


NCCL = """DistBackendError: NCCL error in: a.cpp:9, remote process exited or there was a network error, \
NCCL version 2.26.2
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:"""


@pytest.mark.parametrize(
    ("message", "is_victim", "is_hardware"),
    [
        (NCCL, True, False),
        (NCCL.replace("remote process exited or there was a network error, ", "unknown result code,"), True, False),
        ("RuntimeError: NCCL communicator was aborted on rank 3.", True, False),
        ("DistStoreError: wait timeout after 2000ms, keys: /default_pg/0//cuda//1", True, False),
        ("TimeoutError: download of s3://data/7 timed out", False, False),
        ("BrokenPipeError: [Errno 32] Broken pipe", False, False),
        ("RuntimeError: DataLoader timed out after 30 seconds", False, False),
        ("KeyError: 'heartbeat'", False, False),
        ("AcceleratorError: CUDA error: device-side assert triggered", False, False),
        ("OutOfMemoryError: the kernel killed it because memory had run out", False, False),
        ("AcceleratorError: CUDA error: uncorrectable ECC error encountered", False, True),
    ],
)
def test_whose_fault_an_error_is(message: str, is_victim: bool, is_hardware: bool) -> None:
    failed = failure(0, 0, summary(message), exit_code=-9 if "kernel" in message else 1)
    assert (failed.is_victim, failed.may_be_machine_fault) == (is_victim, is_hardware)
    assert message.startswith(failed.error.partition(": ncclRemote")[0])


def test_a_rank_that_ends_while_its_peers_wait_for_it_is_the_programs_fault(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, *PROGRAM, "nodes=2")
    a, b = cluster.join(0), cluster.join(1)
    for address in ("10.0.0.1:7", "10.0.0.2:8"):
        cluster.later(1.5, a, b, **SILENCE)
        cluster.later(0.1, b, step=-1, phase=Phase.DONE)
        cluster.ended(b)
        cluster.ready(a, failure(0, 0, f"RuntimeError: Connection closed by peer [{address}]", step=-1))
        cluster.ready(b)
    cluster.later(2, a, b)
    assert cluster.verdict is not None and cluster.verdict.verdict == "user_error", cluster.verdict
    said = "other ranks, on nodes [1], had ended before, with exit code 0; the same twice in a row"
    assert said in cluster.verdict.reason


@pytest.mark.parametrize(("reached", "verdict"), [(23, "user_error"), (22, "infrastructure")])
def test_ranks_that_do_more_steps_than_others_are_the_programs_fault(
    tmp_path: Path, reached: int, verdict: str
) -> None:
    """One has done 23 and saves for the last time; one that has not reached 23 may have been held up by anything."""
    cluster = Cluster(tmp_path, "nodes=2", "elastic.max_failures_without_progress=3", "elastic.exclude_after=0")
    a, b = cluster.join(0), cluster.join(1)
    while cluster.verdict is None:
        cluster.later(1.5, a, b, step=20)
        cluster.later(0.1, b, step=23, phase=Phase.ENDING)
        cluster.later(0.1, a, step=reached, phase=Phase.TRAINING)
        cluster.ready(a, failure(0, 0, "RuntimeError: Timed out waiting 600000ms for send operation", step=reached))
        cluster.ready(b)
        cluster.later(2, a, b, step=20)
    assert cluster.verdict.verdict == verdict, cluster.events("round_broken")
    said = "other ranks, on nodes [1], had ended before, after step 23; the same error at the same step twice"
    assert (said in cluster.verdict.reason) is (reached == 23), cluster.verdict.reason


def test_the_first_cause_is_the_first_that_arrived(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2")
    a, b = cluster.join(0), cluster.join(1)
    cluster.later(1, a, b)
    cluster.ready(b, failure(1, 2, exit_code=-9, time=5000.0))
    cluster.ready(a, failure(0, 0, exit_code=-9, time=100.0))  # of a machine whose clock is behind
    cluster.later(2, a, b)
    assert "rank 2 on node 1" in cluster.events("round_broken")[0]["why"]


def test_a_rank_that_leaves_to_be_started_again_has_not_failed(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=1", *PROGRAM)
    a = cluster.join(0)
    cluster.later(1, a, **SILENCE)
    cluster.ready(a, failure(0, 0, exit_code=75))
    cluster.later(3, a)
    assert cluster.verdict is not None and cluster.verdict.decision == "requeue"
    assert cluster.verdict.reason == "rank 0 on node 0 left with exit code 75, to be started again"


def test_below_the_minimum_the_job_waits_then_leaves_to_be_requeued(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2", "elastic.wait_for_nodes_s=30")
    a = cluster.join(0)
    cluster.later(29, a)
    assert cluster.verdict is None
    cluster.later(2, a)
    assert cluster.verdict is not None
    assert (cluster.verdict.verdict, cluster.verdict.decision) == ("infrastructure", "requeue")
    assert cluster.last(a, messages.End).exit_code == 75


def test_a_gpu_that_is_broken_again_and_again_is_its_machines_fault(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2:3", "elastic.join_window_s=0.5")
    members = [cluster.join(node) for node in range(3)]
    for step in (500, -1, -1):
        cluster.later(2, *members, step=max(step, 0), committed=400)
        broken = failure(1, 2, "AcceleratorError: CUDA error: uncorrectable ECC error encountered", step=step)
        for member in members:
            cluster.ready(member, *[broken] if member.node == 1 else [])
    cluster.later(2, *members, committed=400)
    assert cluster.verdict is None and [e["host"] for e in cluster.events("machine_excluded")] == ["node1"]


def test_ranks_of_all_nodes_that_a_watchdog_ends_accuse_no_machine(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=3")
    members = [cluster.join(node) for node in range(3)]
    cluster.later(2, *members)
    for member in members:
        cluster.ready(member, failure(member.node, 2 * member.node, exit_code=-6, time=3.0 - member.node))
    cluster.later(2, *members)
    assert [e.get("blamed") for e in cluster.events("round_broken")] == [None]


@pytest.mark.parametrize(("silent_s", "blamed"), [(8, None), (9.5, "node2")])
def test_a_rank_that_a_watchdog_ends_while_a_node_is_silent_does_not_accuse_its_own(
    tmp_path: Path, silent_s: float, blamed: str | None
) -> None:
    cluster = Cluster(tmp_path, "nodes=3", "elastic.heartbeat_timeout_s=10")
    members = [cluster.join(node) for node in range(3)]
    cluster.later(2, *members)
    cluster.later(silent_s, *members[:2])
    cluster.ready(members[0], failure(0, 0, exit_code=-6))
    cluster.later(1.5, *members[:2])
    assert [e.get("blamed") for e in cluster.events("round_broken")] == [blamed]


def test_an_error_that_progress_has_separated_from_its_like_is_not_its_repetition(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=1")
    a = cluster.join(0)
    for error, committed in (("OSError: busy", 10), ("", 90), ("OSError: busy", 90)):
        cluster.later(2, a, committed=committed)
        cluster.ready(a, failure(0, 0, error, exit_code=1 if error else -9, step=-1))
    cluster.later(2, a, committed=90)
    assert cluster.verdict is None and len(cluster.events("round_broken")) == 3


@pytest.mark.parametrize(("worked_s", "decision"), [(7200, "requeue"), (60, "stop")])
def test_a_program_that_records_no_checkpoints_may_lose_a_node_every_day(
    tmp_path: Path, worked_s: float, decision: str
) -> None:
    """Unless it did nothing for most of the time."""
    for day in range(5):
        cluster = Cluster(tmp_path, "nodes=2", *PROGRAM)
        began = events.RoundStarted([0, 1], ["a", "b"], "full_shard", 2, 4)
        for event, at in (
            (began, 86400.0 * day),
            (events.RoundBroken("node 1 was lost", 0, -1, None, 86400.0 * day + worked_s), 86400.0 * day + 7200),
        ):
            events.append_lines(cluster.run.events, replace(event, time=at, attempt=0).to_record())
        cluster = Cluster(tmp_path, "nodes=2", *PROGRAM)
        a = cluster.join(0)
        cluster.later(cluster.config.elastic.wait_for_nodes_s + 2, a)
        assert cluster.verdict is not None
        assert cluster.verdict.decision == (decision if day > 2 else "requeue"), f"day {day}"
        cluster.run.verdict(0).unlink()


@pytest.mark.parametrize("content", ["", '{"node1": {"until": 1e12, "why": "x"},}', '{"node9": 3}'])
def test_a_list_of_excluded_machines_that_is_being_edited_excludes_nobody(tmp_path: Path, content: str) -> None:
    cluster = Cluster(tmp_path, "nodes=2", "elastic.exclude_after=1")
    members = [cluster.join(0), cluster.join(1)]
    cluster.run.excluded.write_text(content)
    cluster.later(2, *members)
    fails(cluster, members, node=1)
    cluster.later(2, *members)
    assert cluster.verdict is None and len(cluster.events("round_started")) == 2


def test_an_exclusion_is_forgotten_once_a_round_has_begun_without_the_machine(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "nodes=2", "elastic.exclude_after=1")
    members = [cluster.join(0), cluster.join(1)]
    cluster.later(2, *members)
    fails(cluster, members, node=1)
    cluster.later(2, members[0])
    spare = cluster.join(1, "b", host="spare")
    cluster.later(5, members[0], spare, step=5, committed=4)
    cluster.closed(spare)
    cluster.later(2, members[0])
    cluster.ready(members[0])
    cluster.later(70, members[0])
    assert cluster.verdict is None, "a replacement has as long as any"


def test_a_run_that_went_back_behind_its_newest_checkpoint_makes_progress_from_there(tmp_path: Path) -> None:
    """That one was damaged, or the run was allowed to begin again."""
    run = RunDir(tmp_path / "run")
    run.attempt(0).mkdir(parents=True)
    events.record(run, 0, events.Checkpoint(300))
    cluster = Cluster(tmp_path, "nodes=1", "elastic.max_failures_without_progress=1")
    a = cluster.join(0)
    for step in (50, 100, 150):
        cluster.later(3, a, step=step - 50, committed=step - 50, phase=Phase.STARTING)
        cluster.later(1, a, step=step + 5, committed=step)
        fails(cluster, [a], 0)
        cluster.later(2, a)
    assert cluster.verdict is None, "each round has saved"
    broken = [(e["step"], e["committed"]) for e in cluster.events("round_broken")]
    assert broken == [(55, 50), (105, 100), (155, 150)]


def test_the_failure_of_one_node_of_many_is_taken_without_a_look_at_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes of a job may fail at once: of a thousand with eight ranks each, that took five seconds."""
    cluster = Cluster(tmp_path, "nodes=2", "elastic.join_window_s=0")
    members = [cluster.join(node) for node in (0, 1)]
    cluster.later(1, *members)
    monkeypatch.setattr(Agents, "phases", lambda _: pytest.fail("looks at all ranks"))
    for member in members:
        report = messages.Failed([failure(member.node, member.node * 2, "RuntimeError: wrong")])
        cluster.coordinator.on_message(member, report, cluster.now)
    assert len(cluster.coordinator.round.failures) == 2


@pytest.mark.parametrize("ends", ["failed", "cancelled"])
def test_a_verdict_is_written_once_the_run_directory_is_back(tmp_path: Path, ends: str) -> None:
    """Of a file server that was away, simulated: the coordinator died, and its successor began the last round again."""
    cluster = Cluster(tmp_path, "nodes=1", "elastic.join_window_s=0")
    member = cluster.join(0)
    cluster.later(1.5, member)
    if ends == "cancelled":
        cluster.run.stop_request.write_text("cancelled")
        cluster.later(0.5, member)
    with away(tmp_path):
        cluster.ready(member, failure(0, 0, "JobFailed: checkpoint of step 5 failed" if ends == "failed" else ""))
        cluster.later(3, member)
    assert cluster.verdict is None
    cluster.later(0.5, member)
    assert cluster.verdict is not None and cluster.verdict.decision == "stop"
    assert cluster.verdict.reason.startswith({"failed": "rank 0 on node 0 failed: JobFailed"}.get(ends, ends))


@pytest.mark.parametrize(("in_use", "excluded"), [(0.97, []), (0.5, ["node1"])])
def test_an_agent_that_is_killed_for_memory_accuses_no_machine(
    tmp_path: Path, in_use: float, excluded: list[str]
) -> None:
    """Kubernetes has all processes of a container killed at its memory limit, the agent too."""
    limits = ("elastic.max_failures_without_progress=3", "elastic.exclude_after=3")
    cluster = Cluster(tmp_path, "cluster=kubernetes", "cluster.image=i", "nodes=2", *limits)
    a = cluster.join(0)
    for i in range(4):
        b = cluster.join(1, life=str(i))
        cluster.later(2, a, b)
        beat = messages.Beat(b.beat.ranks, {}, cluster.now, in_use)
        cluster.coordinator.on_message(b, beat, cluster.now)
        cluster.closed(b)
        cluster.ready(a)
        cluster.later(2, a)
    assert [*cluster.run.excluded_hosts()] == excluded
    if not excluded:
        assert cluster.verdict is not None and "97% of its memory limit was in use" in cluster.verdict.reason
        assert "cluster.memory=... or fewer workers of data loaders" in cluster.verdict.reason
        assert "97%" in cluster.events("node_lost")[0]["why"]
