"""Checkpoints on the nodes' own disks: a node gets what it lacks from its peers, and shared storage has the rest."""

from __future__ import annotations

import errno
import os
import pathlib
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from fsdp_jobs.checkpoints import disk as local_disks
from fsdp_jobs.checkpoints.blocks import SummedFile
from fsdp_jobs.checkpoints.catalog import MANIFEST, SHARDS, find_checkpoints, find_on_nodes, step_of
from fsdp_jobs.checkpoints.checkpointer import Checkpointer
from fsdp_jobs.config.errors import JobFailed
from fsdp_jobs.run.directory import RunDir
from tests.checkpoints.saving import fill, save_steps, trained, value_of
from tests.world import events_of, run_world

pytestmark = pytest.mark.integration


def _of_rank(folder: str, restart: str) -> Checkpointer:
    return trained(folder, restart, local_dir=f"{folder}/node-{dist.get_rank()}")


def _saved(folder: str) -> None:
    checkpoints = _of_rank(folder, "0-0")
    save_steps(checkpoints, 2, 4)
    checkpoints.close()


def _resumed(folder: str) -> tuple[int, float]:
    checkpoints = _of_rank(folder, "0-1")
    return checkpoints.restore(), value_of(checkpoints)


def test_a_node_gets_what_it_lacks_from_its_peers(tmp_path: Path) -> None:
    run_world(2, _saved, str(tmp_path))
    first, second = (next(tmp_path.glob(f"node-{node}/*/step-00000004.*")) for node in range(2))
    shutil.move(second / "__1_0.distcp", first / "__1_0.distcp")  # rank 1's part is on the other node alone
    assert run_world(2, _resumed, str(tmp_path)) == [(4, 4.0), (4, 4.0)]
    for node in range(2):
        shutil.rmtree(tmp_path / f"node-{node}")
    assert run_world(2, _resumed, str(tmp_path)) == [(4, 4.0), (4, 4.0)]
    assert [e["place"] for e in events_of(RunDir(tmp_path), "resumed")] == ["local_dir", "storage"]


def _two_of_one_name(folder: str) -> list[list[str]]:
    """Save two runs of one name, of other directories, on the same disks; returns the steps there before and after."""
    disk, here = f"{folder}/disk-{dist.get_rank()}", []
    for project in ("mine", "other"):
        checkpoints = trained(f"{folder}/{project}/same", "0-0", local_dir=disk)
        save_steps(checkpoints, 2, 4)
        checkpoints.close()
        here.append(sorted(step.name for step in Path(disk).glob("*/step-*")))
    again = trained(f"{folder}/mine/same", "0-1", local_dir=disk)
    assert again.restore() == 4
    return here


def test_a_clock_that_goes_back_removes_no_newest_step(tmp_path: Path) -> None:
    folders = [tmp_path / f"step-{step:08d}.0-1-1" for step in (10, 20, 30)]
    for folder, ahead_s in zip(folders, (3600, 3601, 0), strict=True):
        folder.mkdir()
        os.utime(folder, (time.time() + ahead_s,) * 2)
    disks = SimpleNamespace(ranks=SimpleNamespace(leads=True), _upload=None, folder=tmp_path)
    local_disks.LocalDisks.tidy(disks, folders[-1])  # type: ignore[arg-type]
    assert [folder.exists() for folder in folders] == [False, True, True]


def test_runs_of_one_name_keep_their_steps_apart(tmp_path: Path) -> None:
    for of_one, of_both in run_world(2, _two_of_one_name, str(tmp_path)):
        assert len(of_one) == 2 and of_both == sorted(of_one * 2)
    assert [e["place"] for e in events_of(RunDir(tmp_path / "mine" / "same"), "resumed")] == ["local_dir"]


def _resumed_from_sick_disk(folder: str) -> tuple[int, float]:
    """Node 1's disk tells sizes, and gives no byte of a shard."""
    opened = pathlib.Path.open

    def refuse(self: Path, *args: Any, **keys: Any) -> Any:
        if "node-1" in str(self) and self.suffix == ".distcp":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))
        return opened(self, *args, **keys)

    pathlib.Path.open = refuse  # type: ignore[method-assign, assignment]
    return _resumed(folder)


@pytest.mark.parametrize("moved", [False, True], ids=["its own", "a peer's"])
def test_a_disk_that_cannot_be_read_is_as_good_as_lost(tmp_path: Path, moved: bool) -> None:
    run_world(2, _saved, str(tmp_path))
    first, second = (next(tmp_path.glob(f"node-{node}/*/step-00000004.*")) for node in range(2))
    if moved:
        shutil.move(first / "__0_0.distcp", second / "__0_0.distcp")  # which node 1 has to send
    assert run_world(2, _resumed_from_sick_disk, str(tmp_path)) == [(4, 4.0), (4, 4.0)]
    assert [e["place"] for e in events_of(RunDir(tmp_path), "resumed")] == ["storage"]


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_disk_that_takes_nothing_is_as_good_as_lost(tmp_path: Path, is_committed: bool) -> None:
    run_world(2, _saved, str(tmp_path))
    if not is_committed:
        (newest, _), on_nodes = find_checkpoints(tmp_path / "checkpoints"), "step-00000004.0-0-9.tmp"
        newest = newest.rename(newest.with_name(on_nodes))
        (newest / MANIFEST).rename(newest / SHARDS)
    first, second = (next(tmp_path.glob(f"node-{node}/*/step-00000004.*")) for node in range(2))
    shutil.move(second / "__1_0.distcp", first / "__1_0.distcp")  # which node 1 needs
    shutil.rmtree(tmp_path / "node-1")
    (tmp_path / "node-1").touch()
    step = 4 if is_committed else 2
    assert run_world(2, _resumed, str(tmp_path)) == [(step, float(step))] * 2
    assert [e["place"] for e in events_of(RunDir(tmp_path), "resumed")] == ["storage"]
    skipped = events_of(RunDir(tmp_path), "checkpoint_skipped")
    assert is_committed or f"cannot keep {tmp_path}/node-1/" in skipped[0]["why"][0]


def _save_onto_full_disk(folder: str) -> str:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoints = _of_rank(folder, "0-0")
    if dist.get_rank() == 1:
        SummedFile._write = fail  # type: ignore[method-assign]
    save_steps(checkpoints, 2)
    return str(checkpoints.failure)


def test_the_disk_that_is_full_is_the_one_to_make_room_on(tmp_path: Path) -> None:
    for failure in run_world(2, _save_onto_full_disk, str(tmp_path)):
        assert "rank 1: OSError: [Errno 28] No space left on device" in failure
        assert f"Free space under {tmp_path}/node-1/" in failure


def _save_onto_unlisted_disk(folder: str) -> int:
    checkpoints, glob = _of_rank(folder, "0-0"), pathlib.Path.glob
    assert checkpoints.disks is not None
    own = checkpoints.disks.folder

    def refuse(self: Path, pattern: str) -> Any:
        if self == own:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))
        return glob(self, pattern)

    pathlib.Path.glob = refuse  # type: ignore[method-assign, assignment]
    save_steps(checkpoints, 2, 4)
    checkpoints.close()
    return checkpoints.committed_step


def test_a_disk_whose_old_steps_cannot_be_listed_ends_no_training(tmp_path: Path) -> None:
    assert run_world(2, _save_onto_unlisted_disk, str(tmp_path)) == [4, 4]


def _a_copy_dies(folder: str) -> tuple[int, str]:
    def die(*_: object) -> None:
        raise SystemExit("the thread is gone")

    checkpoints, copy = _of_rank(folder, "0-0"), local_disks._copy_checked
    save_steps(checkpoints, 2)
    local_disks._copy_checked = die if dist.get_rank() == 1 else copy  # type: ignore[assignment]
    save_steps(checkpoints, 4)
    of_four = str(checkpoints.failure)
    local_disks._copy_checked = copy
    save_steps(checkpoints, 6)
    checkpoints.close()
    return checkpoints.committed_step, of_four


def test_a_copy_whose_thread_dies_is_a_failed_copy_and_holds_nobody_up(tmp_path: Path) -> None:
    for step, failure in run_world(2, _a_copy_dies, str(tmp_path)):
        assert step == 6 and "the thread is gone" in failure
    assert [step_of(f) for f in find_checkpoints(tmp_path / "checkpoints")] == [6, 2]


def test_a_copy_onto_a_full_disk_leaves_no_part(tmp_path: Path) -> None:
    with (tmp_path / "source").open("wb") as raw:
        shard = SummedFile(raw)
        shard.write(bytes(1 << 20))
        shard.close()
    (tmp_path / "target").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        local_disks._copy_checked(tmp_path / "source", tmp_path / "target", shard.sums())
    assert not (tmp_path / "target").is_symlink()


def test_a_cut_list_of_shards_costs_that_step_alone(tmp_path: Path) -> None:
    run_world(2, _saved, str(tmp_path))
    newest, before = find_checkpoints(tmp_path / "checkpoints")
    on_nodes = newest.with_name("step-00000006.0-0-9.tmp")  # as if the copying of a step 6 had not ended
    newest.rename(on_nodes)
    (on_nodes / MANIFEST).unlink(missing_ok=True)
    (on_nodes / SHARDS).write_text('{"step": 6, "sam')
    assert run_world(2, _resumed, str(tmp_path)) == [(2, 2.0), (2, 2.0)]
    assert before.exists()


def _cut_off(folder: str, *copied: int) -> None:
    """The job ends while its last step is being copied."""
    checkpoints = _of_rank(folder, "0-0")
    save_steps(checkpoints, *copied)
    assert checkpoints.disks is not None
    checkpoints.disks.upload = lambda request: None  # type: ignore[method-assign]
    fill(checkpoints, 4.0)
    checkpoints.save(4)


def _ends_at_once(folder: str) -> int:
    checkpoints = _of_rank(folder, "0-1")
    step = checkpoints.restore()
    checkpoints.save(step, block=True)  # as `finish` does, which has nothing left to train
    checkpoints.close()
    return step


def test_a_last_step_that_was_not_copied_is_copied_by_the_next_resume(tmp_path: Path) -> None:
    run_world(2, _cut_off, str(tmp_path), 2)
    committed = find_checkpoints(RunDir(tmp_path).checkpoints)
    assert [step_of(f) for f in committed] == [2]
    assert [step_of(f) for f in find_on_nodes(RunDir(tmp_path).checkpoints, committed)] == [4]
    assert run_world(2, _ends_at_once, str(tmp_path)) == [4, 4]
    assert [step_of(f) for f in find_checkpoints(RunDir(tmp_path).checkpoints)] == [4, 2]
    for node in range(2):
        shutil.rmtree(tmp_path / f"node-{node}")
    assert run_world(2, _resumed, str(tmp_path)) == [(4, 4.0), (4, 4.0)]


def _resumed_without_disks(folder: str) -> str:
    with pytest.raises(JobFailed) as refused:
        trained(folder, "0-1").restore()
    return str(refused.value)


def test_a_job_whose_only_steps_are_on_disks_that_a_resume_does_not_use_begins_again_only_when_told_so(
    tmp_path: Path,
) -> None:
    run_world(1, _cut_off, str(tmp_path))
    (refused,) = run_world(1, _resumed_without_disks, str(tmp_path))
    assert "this run had a checkpoint of step 4" in refused, refused
    assert "step-00000004.0-0-1.tmp: its shards are on the nodes' disks, in checkpoint.local_dir" in refused, refused
    assert run_world(1, _resumed, str(tmp_path)) == [(4, 4.0)]


def _resumed_from_storage(folder: str) -> tuple[int, float]:
    checkpoints = trained(folder, "0-1")
    return checkpoints.restore(), value_of(checkpoints)


def test_a_resume_without_the_disks_says_which_newer_step_it_passes_over(tmp_path: Path) -> None:
    run_world(1, _cut_off, str(tmp_path), 2)
    assert run_world(1, _resumed_from_storage, str(tmp_path)) == [(2, 2.0)]
    (skipped,) = events_of(RunDir(tmp_path), "checkpoint_skipped")
    assert skipped["checkpoint"] == "step-00000004.0-0-2.tmp", skipped
    assert skipped["why"] == ["its shards are on the nodes' disks, in checkpoint.local_dir"], skipped
