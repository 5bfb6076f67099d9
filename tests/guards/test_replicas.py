"""What the coordinator makes of sums of replicas: whom it names, what it goes back to, and when it stops trying."""

from __future__ import annotations

import errno
import random
from pathlib import Path
from typing import Any

import pytest

from fsdp_jobs.config.schema import dump_config
from fsdp_jobs.control.coordinator import Coordinator
from fsdp_jobs.guards.replicas.control import Guard
from fsdp_jobs.guards.replicas.difference import Difference, Place
from fsdp_jobs.guards.replicas.messages import Ask, Compared, Digests, Limits, Tensors
from fsdp_jobs.run import events, messages
from fsdp_jobs.run.agreement import NO_LIMIT, digest
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.rank_state import Phase
from tests.control.cluster import Cluster

TENSORS = ("model.a", "model.b", "optim.state.a.exp_avg")


def replicas(coordinator: Coordinator) -> Guard:
    return next(guard for guard in coordinator.guards if isinstance(guard, Guard))


def limit_of(coordinator: Coordinator) -> int:
    return replicas(coordinator).limit


class Replicas(Cluster):
    """Nodes of two ranks, each node a replica."""

    def __init__(self, folder: Path, nodes: int, *overrides: str):
        super().__init__(folder, f"nodes={nodes}", "fsdp=hybrid_shard", "fsdp.shard_group=2", *overrides)
        self.members = [self.join(node) for node in range(nodes)]
        self.later(0.2, *self.members)

    def tell(self, step: int, wrong: dict[int, tuple[str, ...]] | None = None, salt: str = "") -> None:
        """All ranks tell of a step; these differ in some tensors, each in its own way."""
        number = self.coordinator.round.number
        sums = {
            rank: {
                name: f"{step}{name}{rank % 2}{(salt, rank) if name in (wrong or {}).get(rank, ()) else ''}"
                for name in TENSORS
            }
            for rank in range(2 * len(self.members))
        }
        for node, member in enumerate(self.members):
            here = [2 * node, 2 * node + 1]
            self.coordinator.on_message(member, Digests(number, step, {r: digest(sums[r]) for r in here}), self.now)
        if (asked := self.last(self.members[0], Ask)) is not None and asked.step == step:
            for rank in asked.ranks:
                for name, value in sums[rank].items():
                    one = Tensors(step, rank, len(TENSORS), {name: value})
                    self.coordinator.on_message(self.members[rank // 2], one, self.now)

    def again(self) -> Limits:
        """The round was broken, and the next one forms; returns what its agents are told."""
        for member in self.members:
            self.ready(member)
        self.later(3, *self.members, step=1, phase=Phase.STARTING)
        return self.limits()

    def limits(self) -> Limits:
        """What an agent was told last before its newest round."""
        inbox = self.received[self.members[0].id]
        told = inbox[inbox.index(self.last(self.members[0], messages.Round)) - 1]
        assert isinstance(told, Limits)
        return told

    @property
    def found(self) -> list[dict[str, Any]]:
        return self.events("corruption")


def test_the_minority_is_named_once_and_what_agrees_again_can_differ_again(tmp_path: Path) -> None:
    job = Replicas(tmp_path, 3)
    job.tell(0)
    job.tell(5)
    assert job.last(job.members[2], Compared) == Compared(5, 5, differ=False)
    job.tell(10, {3: ("model.b",)})
    (first,) = job.found
    assert (first["finding"], first["ranks"], first["nodes"], first["hosts"]) == ("outvoted", [3], [1], ["node1"])
    assert (first["tensors"], first["agreed"]) == (["model.b"], 5) and "local rank 1" in first["why"]
    job.tell(15, {3: ("model.b",)})
    assert len(job.found) == 1 and job.last(job.members[0], Compared).agreed == 5
    job.tell(20)
    job.tell(25, {0: ("model.a",), 3: ("model.b",)})
    assert job.found[1]["ranks"] == [0, 3] and job.coordinator.round.running, "the job goes on"


def test_records_that_cannot_be_read_do_not_hide_who_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error ended each connection that reported a difference."""
    job, opened = Replicas(tmp_path, 3), Path.open

    def fails(file: Path, *how: Any, **details: Any) -> Any:
        if file == job.run.events:
            raise OSError(errno.EIO, "Input/output error")
        return opened(file, *how, **details)

    monkeypatch.setattr(Path, "open", fails)
    job.tell(0)
    job.tell(5)
    job.tell(10, {3: ("model.b",)})
    monkeypatch.undo()
    (first,) = job.found
    assert (first["ranks"], first["agreed"]) == ([3], 5)


def test_agents_that_do_not_answer_do_not_hide_who_differs(tmp_path: Path) -> None:
    job = Replicas(tmp_path, 3)
    job.tell(0)
    for node, member in enumerate(job.members):
        told = Digests(0, 5, {2 * node: "x" if node == 2 else "y", 2 * node + 1: "z"})
        job.coordinator.on_message(member, told, job.now)
    job.later(2, *job.members)
    (first,) = job.found
    assert (first["ranks"], first["tensors"]) == ([4], [])


@pytest.mark.parametrize("action", ["restart", "exclude"])
def test_the_job_goes_back_to_where_replicas_agreed(tmp_path: Path, action: str) -> None:
    job = Replicas(tmp_path, 3, f"integrity.action={action}", "elastic.join_window_s=0")
    assert job.limits().limit == NO_LIMIT
    job.tell(0)
    job.tell(5)
    job.later(0.2, *job.members, step=10, committed=10)
    job.tell(10, {3: ("model.b",)})
    assert job.last(job.members[0], messages.Break) is not None and job.found[0]["finding"] == "outvoted"
    if action == "exclude":
        job.later(2)
        assert job.run.excluded_hosts().keys() == {"node1"}
        return
    assert job.again().limit == 5 and not job.run.excluded_hosts()
    assert limit_of(Coordinator(job.config, job.run, 0, 0.0)) == 5, "for a coordinator that was restarted, too"
    assert job.events("round_broken")[0]["blamed"] == "node1"
    job.tell(5)
    job.coordinator.break_round("something else", job.now)
    assert job.again().limit == NO_LIMIT, "from there on replicas were the same"


def test_two_replicas_are_told_apart_by_doing_the_step_again_at_most_twice(tmp_path: Path) -> None:
    job = Replicas(tmp_path, 2, "integrity.action=restart", "elastic.join_window_s=0")
    for again, finding in ((None, "transient"), ({1: ("model.a",)}, "reproduced")):
        job.tell(5)
        job.tell(6, {1: ("model.a",)})
        assert job.found[-1]["finding"] == "two" and job.found[-1]["ranks"] == [1, 3]
        told = job.again()
        assert (told.limit, told.replayed) == (5, 6)
        job.tell(5)
        job.tell(6, again)
        assert job.found[-1]["finding"] == finding and job.found[-1]["ranks"] == ([1, 3] if again else [1])
        assert job.coordinator.round.running
    job.tell(7)
    job.tell(8, {1: ("model.a",)})
    assert job.found[-1]["finding"] == "two" and job.coordinator.round.running, "never again"
    compared = job.last(job.members[0], Compared)
    assert compared is not None and compared.compared == 8
    assert not compared.differ, "else nothing that is saved from now on could be gone on from"


def test_a_round_that_went_on_from_where_replicas_agreed_is_gone_on_from(tmp_path: Path) -> None:
    job = Replicas(tmp_path, 3, "integrity.action=restart", "elastic.join_window_s=0")
    job.tell(900)
    job.later(0.2, *job.members, step=1000)
    job.tell(1000, {3: ("model.b",)})
    assert job.again().limit == 900
    job.later(0.2, *job.members, step=5000, committed=5000)  # nothing more was compared
    job.coordinator.break_round("something else", job.now)
    assert job.again().limit == NO_LIMIT and job.coordinator.committed == 5000


@pytest.mark.parametrize(("place", "agreed", "limit"), [("storage", 900, 900), ("memory", -1, 999)])
def test_what_all_have_read_from_one_file_was_the_same(tmp_path: Path, place: str, agreed: int, limit: int) -> None:
    job = Replicas(tmp_path, 3, "integrity.action=restart", "elastic.join_window_s=0")
    events.record(job.run, 0, events.Resumed(900, 0, 6, place))
    job.tell(1000, {3: ("model.b",)})  # nothing was compared before, in this coordinator's life
    assert job.found[0]["agreed"] == agreed
    assert job.again().limit == limit
    assert limit_of(Coordinator(job.config, job.run, 0, 0.0)) == limit


def test_many_ranks_make_a_short_sentence_and_a_notification_that_fails_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_long(*_: object, **__: object) -> None:
        raise OSError(7, "Argument list too long")

    monkeypatch.setattr("fsdp_jobs.run.verdict.subprocess.Popen", too_long)
    job = Replicas(tmp_path, 10, "notify.command=true", "notify.on=[corruption]")
    write_atomic(job.run.config, dump_config(job.config))
    job.tell(5)
    job.tell(6, dict.fromkeys(range(20), ("model.a",)))
    assert "and 12 more ranks" in job.found[0]["why"] and job.coordinator.round.running
    (failed,) = events.newest_of(job.run, events.NotifyFailed)
    assert "Argument list too long" in failed.why


def test_a_replay_with_other_sums_on_both_sides_tells_nothing(tmp_path: Path) -> None:
    job = Replicas(tmp_path, 2, "integrity.action=restart", "elastic.join_window_s=0")
    job.tell(5)
    job.tell(6, {1: ("model.a",), 3: ("model.a",)})
    job.again()
    job.tell(6)
    assert [e["finding"] for e in job.found] == ["two", "unknown"] and job.coordinator.round.running


def test_what_agreed_in_the_round_before_says_nothing_of_one_that_begins_earlier(tmp_path: Path) -> None:
    job = Replicas(tmp_path, 2, "elastic.join_window_s=0")
    job.tell(80)
    job.coordinator.break_round("a failure", job.now)
    job.again()
    job.tell(50, {1: ("model.a",)})
    assert job.found[-1]["agreed"] == 49
    assert job.last(job.members[0], Compared) == Compared(49, 50, differ=True)
    for node, member in enumerate(job.members[:1]):  # the other does not tell of these
        for step in range(51, 200):
            told = Digests(1, step, {2 * node: "", 2 * node + 1: ""})
            job.coordinator.on_message(member, told, job.now)
    assert len(replicas(job.coordinator)._comparison.digests) == 64


@pytest.mark.parametrize("action", ["report", "restart"])
def test_replicas_that_begin_with_other_bits_are_the_configurations_fault(tmp_path: Path, action: str) -> None:
    job = Replicas(tmp_path, 2, f"integrity.action={action}")
    job.tell(0, {1: ("model.a",)})
    (start,) = job.found
    assert start["finding"] == "start" and "same weights" in start["why"]
    assert (job.verdict.verdict if job.verdict else "") == ("" if action == "report" else "user_error")


def test_a_difference_in_the_last_step_is_told(tmp_path: Path) -> None:
    job = Replicas(tmp_path, 3, "integrity.action=restart")
    for node, member in enumerate(job.members):
        told = Digests(0, 9, {2 * node: str(node == 1), 2 * node + 1: ""})
        job.coordinator.on_message(member, told, job.now)
    for member in job.members:
        job.ended(member)
    assert job.found[0]["ranks"] == [2] and job.verdict is not None and job.verdict.verdict == "done"


def test_any_minority_of_any_number_of_replicas_is_named() -> None:
    for seed in range(300):
        chance = random.Random(seed)
        replicas, group = chance.randrange(3, 8), chance.randrange(1, 5)
        wrong = {chance.randrange(replicas * group): chance.choice(TENSORS)}
        sums = {rank: {name: f"{name}{rank % group}" for name in TENSORS} for rank in range(replicas * group)}
        for rank, name in wrong.items():
            sums[rank][name] += "!"
        places = {rank: Place(rank // group, "", rank % group) for rank in sums}
        found = Difference(7, group, {rank: digest(of) for rank, of in sums.items()}, places, 0.0)
        assert found.outvoted() == {rank: [] for rank in wrong}, "from digests alone"
        for rank, of in sums.items():
            found.sums[rank] |= of
            found.expected[rank] = len(of)
        assert found.outvoted() == {rank: [name] for rank, name in wrong.items()}
        assert found.tensors() == [*wrong.values()]
