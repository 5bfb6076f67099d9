"""Snapshots that must not be restored: others are, or the newest checkpoint on disk."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fsdp_jobs.checkpoints import catalog
from fsdp_jobs.checkpoints.checkpointer import Checkpointer
from fsdp_jobs.checkpoints.tensors import local
from fsdp_jobs.config.errors import JobFailed
from fsdp_jobs.config.schema import MemoryConfig
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.run.env import MEMORY_ENV, TERM_ENV
from fsdp_jobs.run.tail import read_json_lines
from fsdp_jobs.tiers.memory import snapshots
from fsdp_jobs.tiers.memory.rank import Tier
from fsdp_jobs.tiers.memory.slots import COPIES, Slot, Snapshot, slots_in
from tests.checkpoints.saving import fill, run_to_the_end, save_steps, trained, value_of
from tests.world import flip_byte, run_world

pytestmark = pytest.mark.integration


def _rank(folder: str, term: int, layout: Layout | None = None, **keys: Any) -> Checkpointer:
    """A rank with memory of its own, whose agent does nothing by itself."""
    memory = Path(folder) / f"memory-{dist.get_rank()}"
    (memory / COPIES).mkdir(parents=True, exist_ok=True)
    os.environ |= {MEMORY_ENV: str(memory), TERM_ENV: str(term), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    made = trained(folder, f"0-{term}", memory=MemoryConfig(1), **keys)
    if layout is not None:
        memory = _memory(made)
        memory.layout, memory._has_replica = layout, layout.replicas > 1
    return made


def _memory(checkpoints: Checkpointer) -> Tier:
    (tier,) = checkpoints.snapshots
    assert isinstance(tier, Tier)
    return tier


def _snapshot(checkpoints: Checkpointer, *steps: int, value: float | None = None) -> None:
    for step in steps:
        fill(checkpoints, float(step) if value is None else value)
        checkpoints.stream = {"at": step}
        checkpoints.snapshot(step, lambda: None)
        checkpoints.stream["at"] = -1  # a program that reads on meanwhile
        checkpoints.poll()
        for slot in slots_in(_memory(checkpoints).folder):  # in the agent's place
            if (snapshot := slot.snapshot()) is not None:
                slot.seal(snapshot)
            slot.copied.touch()


def _steps(memory: Tier) -> list[int]:
    """Return the steps that a rank's memory holds."""
    snapshots = [slot.snapshot() for slot in slots_in(memory.folder)]
    return sorted(snapshot.step for snapshot in snapshots if snapshot is not None)


def _leave(folder: str, layout: Layout | None, value: float | None, on_disk: tuple[int, ...]) -> None:
    checkpoints = _rank(folder, 1, layout)
    save_steps(checkpoints, *on_disk)
    _snapshot(checkpoints, 5, 6, value=value)
    checkpoints.close()


def _resume(folder: str, layout: Layout | None = None) -> tuple[int, float]:
    checkpoints = _rank(folder, 2, layout)
    fill(checkpoints, -1.0)
    step = checkpoints.restore()
    found = value_of(checkpoints)
    assert checkpoints.stream == ({"at": step} if step in (5, 6) else None), "where a stream is read on"
    _snapshot(checkpoints, step + 1, step + 2, step + 3)
    assert len(list(_memory(checkpoints).folder.glob("*.data"))) == 2, "the snapshots of earlier rounds have gone"
    checkpoints.close()
    return step, found


def _changes(folder: str) -> None:
    checkpoints = _rank(folder, 1)
    _snapshot(checkpoints, 1, 2)
    memory = _memory(checkpoints)
    assert memory._newest is not None
    if dist.get_rank() == 1:
        memory._newest.withdraw()  # as an agent does that finds it changed
        memory._newest.copied.touch()
    _snapshot(checkpoints, 3)
    assert _steps(memory) == [1, 3] and memory.step == 1
    _snapshot(checkpoints, 4)
    assert _steps(memory) == [3, 4] and memory.step == 3
    checkpoints.close()


def test_a_snapshot_that_has_changed_is_not_made_up_for_with_the_only_other_one(tmp_path: Path) -> None:
    run_world(2, _changes, str(tmp_path))


def _withdrawn_first(folder: str) -> None:
    before = _rank(folder, 1)
    _snapshot(before, 1, 2)
    before.close()
    checkpoints = _rank(folder, 2)
    memory = _memory(checkpoints)
    _snapshot(checkpoints, 3)
    assert memory._newest is not None
    if dist.get_rank() == 1:
        memory._newest.withdraw()
        memory._newest.copied.touch()
    _snapshot(checkpoints, 4)
    assert {1, 2} < {*_steps(memory)}, "no other node need have step 4 yet"
    _snapshot(checkpoints, 5)
    assert _steps(memory) == [4, 5]
    checkpoints.close()


def test_snapshots_of_earlier_rounds_stay_until_every_node_has_one_of_this(tmp_path: Path) -> None:
    run_world(2, _withdrawn_first, str(tmp_path))


def _large(folder: str) -> None:
    snapshots._AT_ONCE = 0
    checkpoints = _rank(folder, 1)
    memory = _memory(checkpoints)
    _snapshot(checkpoints, 1)
    assert memory._newest is not None and not [*slots_in(memory.folder)], "its slots are made first"
    memory._thread.submit(lambda: None).result()
    assert memory._newest.copied.exists() and len(memory._maps) == 2
    dist.barrier()
    _snapshot(checkpoints, 2, 3, 4)
    assert _steps(memory) == [3, 4] and memory.step == 3
    with torch.no_grad():  # a state that grows has larger slots made, and loses none
        checkpoints.state.to_save = _with_more(checkpoints.state.to_save)  # type: ignore[method-assign]
    _snapshot(checkpoints, 5)
    memory._thread.submit(lambda: None).result()
    dist.barrier()
    assert _steps(memory) == [4] and not any(slot.verify() for slot in slots_in(memory.folder))
    _snapshot(checkpoints, 6, 7)
    assert _steps(memory) == [6, 7] and memory.step == 6
    checkpoints.close()


def _with_more(to_save: Callable[[], tuple[dict[str, Any], dict[str, Any]]]) -> Any:
    def saved() -> tuple[dict[str, Any], dict[str, Any]]:
        tensors, objects = to_save()
        return {**tensors, "more": torch.ones(3 << 20)}, objects

    return saved


def test_no_step_waits_until_the_slots_of_a_large_state_are_made(tmp_path: Path) -> None:
    run_world(2, _large, str(tmp_path))


def _leave_and_resume(
    folder: Path, on_disk: tuple[int, ...] = (2, 4), value: float | None = None, layout: Layout | None = None
) -> list[tuple[int, float]]:
    run_world(2, _leave, str(folder), layout, value, on_disk)
    return run_world(2, _resume, str(folder), layout)


def test_the_newest_snapshot_is_restored(tmp_path: Path) -> None:
    assert _leave_and_resume(tmp_path) == [(6, 6.0)] * 2


@pytest.mark.parametrize(("recorded", "taken"), [([5], 5), ([5, 6], 6), ([4], 6)])
def test_a_step_that_replicas_have_and_rank_0_has_not_recorded_is_done_again(
    tmp_path: Path, recorded: list[int], taken: int
) -> None:
    """Unless more than one step would be: then the line is lost, and not the work."""
    run_world(2, _leave, str(tmp_path), None, None, (2,))
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in recorded))
    assert run_world(2, _resume, str(tmp_path)) == [(taken, float(taken))] * 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_that_is_not_finite_is_not(tmp_path: Path, value: float) -> None:
    assert _leave_and_resume(tmp_path, value=value) == [(4, 4.0)] * 2


def _begin_anew(folder: str) -> list[float]:
    torch.use_deterministic_algorithms(True)  # which fills memory that was not written with NaN
    checkpoints = _rank(folder, 2, restart_from_zero=True)
    assert checkpoints.restore() == 0
    held = [value for state in checkpoints.state.optimizer.state.values() for value in state.values()]
    found = [float(local(value).abs().max()) for value in held]
    checkpoints.close()
    return found


def _is_refused(folder: str) -> None:
    checkpoints = _rank(folder, 2)
    if dist.get_rank():
        with pytest.raises(RuntimeError):  # rank 0 has gone
            checkpoints.restore()
    else:
        with pytest.raises(JobFailed, match=r"this run had a checkpoint of step 5.*restart_from_zero=true"):
            checkpoints.restore()
        (Path(folder) / "refused").touch()
    os._exit(0)


def test_a_job_whose_only_state_was_lost_with_all_its_nodes_does_not_begin_again_unasked(tmp_path: Path) -> None:
    """No process was left to record which snapshots there were."""
    run_world(2, _leave, str(tmp_path), None, None, ())
    for memory in tmp_path.glob("memory-*"):
        shutil.rmtree(memory)
    run_to_the_end(2, _is_refused, str(tmp_path))
    assert (tmp_path / "refused").exists()


def test_a_job_that_begins_anew_because_no_snapshot_is_finite_has_a_new_optimizer(tmp_path: Path) -> None:
    run_world(2, _leave, str(tmp_path), None, float("nan"), ())
    for found in run_world(2, _begin_anew, str(tmp_path)):
        assert not any(found)


def test_one_is_taken_when_the_newer_checkpoint_on_disk_is_damaged(tmp_path: Path) -> None:
    run_world(2, _leave, str(tmp_path), None, None, (2, 8))
    newest = catalog.find_checkpoints(tmp_path / "checkpoints")[0]
    flip_byte(next(newest.glob("*.distcp")))
    assert run_world(2, _resume, str(tmp_path)) == [(6, 6.0)] * 2


def test_half_a_model_is_never_gone_on_from_whatever_the_layout_says(tmp_path: Path) -> None:
    replicas = Layout("hybrid_shard", 2, 1)  # and the program shards over both ranks
    run_world(2, _leave, str(tmp_path), replicas, None, (2,))
    shutil.rmtree(tmp_path / "memory-1")
    assert run_world(2, _resume, str(tmp_path), replicas) == [(2, 2.0)] * 2


def _resume_without_room(folder: str) -> tuple[int, float]:
    checkpoints = _rank(folder, 2)
    if dist.get_rank() == 1:  # a file may have so many bytes and no more, as on a full file system
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    step = checkpoints.restore()
    checkpoints.snapshot(step + 1, lambda: None)
    checkpoints.poll()
    left = len(list(_memory(checkpoints).folder.glob("2-*.json")))
    assert left == 1 - dist.get_rank(), "training goes on where there is no room for a snapshot"
    return step, value_of(checkpoints)


def test_without_room_for_what_other_nodes_send_the_disk_is_read_and_training_goes_on(tmp_path: Path) -> None:
    run_world(2, _leave, str(tmp_path), None, None, (2, 4))
    for old, new in (("memory-0", "other"), ("memory-1", "memory-0"), ("other", "memory-1")):
        (tmp_path / old).rename(tmp_path / new)  # so that each node has what the other one needs
    assert run_world(2, _resume_without_room, str(tmp_path)) == [(4, 4.0)] * 2
    failed = [e for e in read_json_lines(tmp_path / "events.jsonl") if e["event"] == "checkpoint_failed"]
    assert [e["step"] for e in failed] == [5] and "checkpoint.memory.dir" in failed[0]["error"]


def _die_while_loading(folder: str) -> None:
    checkpoints = _rank(folder, 2)

    def die(*_: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    torch.Tensor.copy_ = die  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space"):
        checkpoints.restore()


def test_the_one_before_is_taken_when_three_rounds_have_died_of_the_newest(tmp_path: Path) -> None:
    run_world(2, _leave, str(tmp_path), None, None, (2,))
    for _ in range(3):
        run_world(2, _die_while_loading, str(tmp_path))
    assert run_world(2, _resume, str(tmp_path)) == [(5, 5.0)] * 2


def _without_room_to_publish(folder: str) -> list[int]:
    checkpoints = _rank(folder, 1)
    publish = Slot.publish

    def full(slot: Slot, snapshot: Snapshot) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(slot.about))

    Slot.publish = full  # type: ignore[method-assign]
    _snapshot(checkpoints, 5)
    Slot.publish = publish  # type: ignore[method-assign]
    _snapshot(checkpoints, 6)  # training goes on
    checkpoints.close()
    return [event["step"] for event in read_json_lines(Path(folder) / "events.jsonl")]


def test_memory_that_is_full_when_a_snapshot_is_published_costs_the_snapshot_and_no_rank(tmp_path: Path) -> None:
    assert run_world(1, _without_room_to_publish, str(tmp_path)) == [[5]]


def _changing(folder: str) -> None:
    checkpoints = _rank(folder, 1)
    memory, (weight, _) = _memory(checkpoints), checkpoints.state.model.parameters()
    filled, changes = memory._fill, [True] if dist.get_rank() == 1 else []

    def fill_late(*args: Any) -> None:
        if changes:
            changes.clear()
            with torch.no_grad():
                weight.mul_(3.0)  # as another thread does before all is copied
        filled(*args)

    _snapshot(checkpoints, 1)
    memory._fill = fill_late  # type: ignore[method-assign]
    _snapshot(checkpoints, 2, 3, 4)
    assert not changes
    again = _rank(folder, 2)
    assert again.restore() == 4 and value_of(again) == 4.0
    failed = [e["error"] for e in read_json_lines(checkpoints.run.events) if e["event"] == "checkpoint_failed"]
    assert len(failed) == 1 and "no snapshot of step 2: model.weight changed before" in failed[0], failed
    checkpoints.close()
    again.close()


def test_a_state_that_changes_during_its_snapshot_is_not_restored(tmp_path: Path) -> None:
    run_world(2, _changing, str(tmp_path))


@given(st.integers(0, 40), st.integers(0, 40), st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
def test_no_copy_crosses_the_pieces_that_are_registered(begin: int, rows: int, dtype: torch.dtype) -> None:
    begin, source = 64 * begin, torch.arange(8 * rows).view(8, rows).to(dtype).T  # not contiguous
    target = torch.zeros(rows, 8, dtype=dtype)
    with patch.object(snapshots, "_PIECE", 256):
        pairs = list(snapshots._cut(target, source, begin))
    places = [begin + to.data_ptr() - target.data_ptr() for to, _ in pairs]
    assert all(at // 256 == (at + to.nbytes - 1) // 256 for at, (to, _) in zip(places, pairs, strict=True) if to.nbytes)
    for to, part in pairs:
        to.copy_(part)
    assert torch.equal(target, source)
