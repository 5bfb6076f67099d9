"""Snapshots in memory: sealed, found, and refused when a bit of them has changed."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fsdp_jobs.run.checksum import checksum
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.verdict import Verdict
from fsdp_jobs.tiers.memory.rank import Tier
from fsdp_jobs.tiers.memory.slots import (
    COPIES,
    Entry,
    Found,
    Slot,
    Snapshot,
    adopt_folder,
    lost_shards,
    newest_complete,
    newest_in,
    slots_in,
)


def sealed(folder: Path, rank: int = 0, step: int = 1) -> Slot:
    """One snapshot of two tensors, sealed."""
    entries = [Entry("w", "float32", [8, 4], [4 * rank, 0], [4, 4], 64, True), Entry("n", "int64", [], [], [], 8, True)]
    snapshot = Snapshot(1, rank, 0, step, 8 * step, 2, 2, entries).placed()
    slot = Slot(folder / snapshot.name)
    data = slot.map(snapshot.size)
    data[:] = random.Random(rank).randbytes(len(data))
    slot.publish(snapshot)
    assert slot.seal(snapshot) is not None
    return slot


def test_a_snapshot_of_another_version_is_none(tmp_path: Path) -> None:
    slot = sealed(tmp_path)
    text = slot.about.read_text().partition("\n")[2].replace('"samples"', '"documents"')
    slot.about.write_text(f"{checksum(text.encode())}\n{text}")
    assert slot.snapshot() is None and newest_in(tmp_path) == (-1, -1)


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    slot = sealed(tmp_path)
    (snapshot,) = [slot.snapshot()]
    assert slot.verify() == [] and snapshot is not None
    places = [entry.begin * 8 + bit for entry in snapshot.entries for bit in range(entry.bytes * 8)]
    for place in random.Random(0).sample(places, 100):
        content = bytearray(slot.data.read_bytes())
        content[place // 8] ^= 1 << place % 8
        slot.data.write_bytes(content)
        (named,) = slot.verify()
        assert named == ("w" if place < 64 * 8 else "n")
        content[place // 8] ^= 1 << place % 8
        slot.data.write_bytes(content)
    for file in (slot.about, slot.sums):
        whole = file.read_bytes()
        for place in random.Random(1).sample(range(8 * len(whole)), 100):
            changed = bytearray(whole)
            changed[place // 8] ^= 1 << place % 8
            file.write_bytes(changed)
            assert slot.verify(), place
        file.write_bytes(whole[: len(whole) // 2])
        assert slot.verify()
        file.write_bytes(whole)
    assert slot.verify() == []
    other = Slot(tmp_path / "1-0-1")
    for one, same in ((slot.about, other.about), (slot.data, other.data), (slot.sums, other.sums)):
        same.write_bytes(one.read_bytes())
    (tmp_path / "x.json").write_text("{}")
    assert other.snapshot() is None and [s.about for s in slots_in(tmp_path) if s.snapshot()] == [slot.about]


def test_where_a_stream_continues_is_in_a_snapshot(tmp_path: Path) -> None:
    snapshot = sealed(tmp_path).snapshot()
    assert snapshot is not None
    streamed = replace(snapshot, stream={"at": 3})
    assert Snapshot.from_json(streamed.to_json()) == streamed


def test_what_was_not_sealed_in_time_is_sealed_by_who_reads_it_and_what_was_withdrawn_is_not(tmp_path: Path) -> None:
    slot = sealed(tmp_path)
    slot.sums.unlink()
    assert slot.verify() == []
    snapshot = slot.snapshot()
    slot.withdraw()
    assert snapshot is not None and slot.verify() and slot.seal(snapshot) is None and not slot.sums.exists()


def _found(step: int, rank: int, group: int = 2, term: int = 1, **more: object) -> Found:
    about = {"is_whole": True, "is_copy": False, "holder": 0, "samples": 0, **more}
    return Found(term=term, rank=rank, slot=0, step=step, world_size=4, shard_group=group, **about)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "step"),
    [
        ([_found(7, 0), _found(7, 1)], 7),
        ([_found(7, 0), _found(7, 3)], 7),  # a replica's rank has the same shards
        ([_found(7, 0), _found(7, 2)], 0),
        ([_found(7, 0), _found(7, 1), _found(8, 0)], 7),
        ([_found(8, 0), _found(8, 1, is_copy=True), _found(7, 0), _found(7, 1)], 8),
        ([_found(8, 0), _found(8, 1, is_copy=True, is_whole=False), _found(7, 0), _found(7, 1)], 7),
        ([_found(9, 0, term=1), _found(9, 1, term=1), _found(8, 0, term=2), _found(8, 1, term=2)], 8),
        ([_found(9, 0, term=1), _found(9, 1, term=2)], 0),  # two lives are not one state
        ([], 0),
    ],
)
def test_the_newest_step_whose_shards_are_all_there_is_chosen(found: list[Found], step: int) -> None:
    chosen = newest_complete(found)
    assert (chosen[0].step if chosen else 0) == step


def test_what_was_lost_with_its_nodes_is_named() -> None:
    left = [_found(5, 0, 4), _found(7, 1, 4), _found(7, 3, 4), _found(7, 2, 4, is_whole=False)]
    told = lost_shards(left, 5, 7)
    assert told is not None and told[0] == 7 and "no node has its shards 0, 2 of 4 whole" in told[1]
    assert lost_shards(left, 7, 7) is None and lost_shards([], 0, -1) is None
    told = lost_shards([], 0, 7)
    assert told is not None and told[0] == 7 and "there is no older checkpoint" in told[1]


def test_a_node_takes_over_what_an_agent_that_died_has_left_and_removes_what_nobody_wants(tmp_path: Path) -> None:
    memory_, run = tmp_path / "shm", RunDir(tmp_path / "run")
    memory_.mkdir()
    run.path.mkdir()
    run.job.write_text('{"submission": "first"}')
    (first, lock), (second, other) = adopt_folder(memory_, run), adopt_folder(memory_, run)
    assert first != second and (first / COPIES).is_dir()
    lock.close()
    assert adopt_folder(memory_, run)[0] == first  # its lock is free
    run.job.write_text('{"submission": "second"}')
    third, _third = adopt_folder(memory_, run)
    assert {*memory_.iterdir()} == {second, third}, "of an earlier submission; the second is still held"
    other.close()
    (tmp_path / "another").mkdir()
    _fourth = adopt_folder(memory_, RunDir(tmp_path / "another"))
    assert not second.exists() and third.exists(), "of a submission that is over, also when another run looks"


def _left(memory_: Path, run: RunDir, step: int = 1) -> Path:
    """What an agent leaves that was killed while its job waits for another attempt."""
    run.path.mkdir(exist_ok=True)
    run.job.write_text('{"submission": "only"}')
    folder, lock = adopt_folder(memory_, run)
    sealed(folder, step=step)
    lock.close()
    os.utime(folder, (step, step))
    return folder


def test_snapshots_of_a_job_that_waits_are_kept_however_old_they_are(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an hour in a queue a job lost them to the next job on its node, and began from older storage."""
    memory_ = small_disk
    (tmp_path / "other").mkdir()
    waits, ended, gone = (RunDir(tmp_path / name) for name in ("waits", "ended", "gone"))
    left, over, orphan = (_left(memory_, run) for run in (waits, ended, gone))
    ended.attempt(0).mkdir(parents=True)
    Verdict("done", "stop", "all steps are done").close(ended, 0)
    shutil.rmtree(gone.path)
    _other = adopt_folder(memory_, RunDir(tmp_path / "other"))
    assert left.exists() and not over.exists() and not orphan.exists()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", lambda _: False)  # as of Python 3.14 where storage does not answer
        _held = adopt_folder(memory_, RunDir(tmp_path / "other"))
    assert left.is_dir()
    waits.path.rename(tmp_path / "unmounted")
    again, _lock = adopt_folder(memory_, RunDir(tmp_path / "other"))
    assert again.exists() and not left.exists(), "its run is gone"


def test_snapshots_of_jobs_that_wait_do_not_fill_a_nodes_memory(small_disk: Path, tmp_path: Path) -> None:
    older, newer = (_left(small_disk, RunDir(tmp_path / name), step) for name, step in (("a", 1), ("b", 2)))
    for folder in (older, newer):
        (folder / "1-0-1.data").write_bytes(bytes(3 << 20))
    os.utime(older, (1, 1))
    os.utime(newer, (2, 2))
    (tmp_path / "other").mkdir()
    _other = adopt_folder(small_disk, RunDir(tmp_path / "other"))
    assert newer.exists() and not older.exists()


def test_no_room_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root, to mount")
    small = tmp_path / "small"
    small.mkdir()
    assert os.system(f"mount -t tmpfs -o size=64k tmpfs {small}") == 0
    try:
        with pytest.raises(OSError, match="No space"):
            Slot(small / "1-0-0").map(1 << 20)
    finally:
        os.system(f"umount {small}")


def test_a_rank_wants_only_its_shard_when_replicas_are_lost() -> None:
    """Replicas of the same shard groups hold the same: with fewer of them no rank needs the other shards."""
    found = [Found(1, rank, 0, 5, 8, 2, True, copy, rank // 2 * 2, 40) for rank in range(8) for copy in (False, True)]
    for world, group, expected in ((8, 2, ["1-3-0"]), (6, 2, ["1-3-0"]), (6, 6, ["1-2-0", "1-3-0"])):
        tier = Tier.__new__(Tier)
        ranks, layout = SimpleNamespace(rank=3, world=world, leader=2), SimpleNamespace(shard_group=group)
        vars(tier).update(ranks=ranks, layout=layout)
        assert sorted(tier._sources(found)) == expected, "of its own node"
