"""Files whose blocks are summed while they are written, and compared while they are read."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, cast
from unittest import mock

import psutil
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fsdp_jobs.checkpoints import blocks, catalog, storage
from fsdp_jobs.checkpoints.blocks import Damaged, SummedFile, difference, open_verified, reading_back
from fsdp_jobs.config.errors import JobFailed
from fsdp_jobs.run.directory import RunDir
from tests.checkpoints.saving import fill, save_steps, trained, value_of
from tests.world import events_of, run_world

pytestmark = pytest.mark.integration

SMALL_BLOCKS = {"_BLOCK": 64, "_LARGE": 32, "SMALL": 8, "_TAIL": 4, "_BATCH": 100}
RECORDED = Path(__file__).parent / "recorded_crc32"  # a run of version 0.1 with one checkpoint, of two ranks


def _write(file: Path, pieces: list[bytes]) -> dict[str, Any]:
    files = storage._SummedFileSystem(read_back=True)
    with files.create_stream(file, "wb") as stream:
        summed = cast(SummedFile, stream)
        assert summed._beside is not None
        for piece in pieces:
            assert summed.write(piece) == len(piece)
            summed.flush()
        assert summed.tell() == sum(map(len, pieces))
    return files.sums[file.name]


@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(st.binary(max_size=200), max_size=12), data=st.data())
def test_what_is_read_is_what_was_written_or_nothing(
    pieces: list[bytes], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file, content = tmp_path_factory.mktemp("blocks") / "shard", b"".join(pieces)
    with mock.patch.multiple(blocks, **SMALL_BLOCKS):
        expected = _write(file, pieces)
        assert file.read_bytes() == content and expected["bytes"] == len(content)
        assert difference(file, expected) == difference(file, expected, from_disk=True) == ""
        begin = data.draw(st.integers(0, len(content)))
        size = data.draw(st.integers(0, len(content)))
        with open_verified(file, expected) as f:
            f.seek(begin)
            assert f.read(size) == content[begin : begin + size] and f.tell() == min(begin + size, len(content))
            f.seek(0)
            assert f.read() == content
        if not content:
            return
        flipped = data.draw(st.integers(0, len(content) * 8 - 1))
        damaged = bytearray(content)
        damaged[flipped // 8] ^= 1 << flipped % 8
        file.write_bytes(damaged)
        said = re.fullmatch(r"differs from its checksum in bytes (\d+) to (\d+)", difference(file, expected))
        assert said and int(said[1]) <= flipped // 8 < int(said[2])
        with open_verified(file, expected) as f:
            f.seek(begin)
            with_it = begin < int(said[2]) and begin + size > int(said[1]) and size > 0 and begin < len(content)
            if with_it:
                with pytest.raises(Damaged, match="shard differs from its checksum"):
                    f.read(size)
            else:
                assert f.read(size) == content[begin : begin + size]


@pytest.mark.parametrize("batch", [0, 5, -1])
def test_each_batch_is_compared_with_what_the_disk_has(tmp_path: Path, batch: int) -> None:
    file, pieces = tmp_path / "shard", [bytes([n]) * 10_000 for n in range(100)]
    synced, fdatasync = list[int](), os.fdatasync

    def changed(descriptor: int) -> None:
        fdatasync(descriptor)
        synced.append(file.stat().st_size)

    with mock.patch.multiple(blocks, _BLOCK=20_000, _BATCH=100_000), mock.patch.object(os, "fdatasync", changed):
        _write(file, pieces)
    assert len(synced) == 10 and synced == sorted(synced) and file.read_bytes() == b"".join(pieces)

    def damages(descriptor: int) -> None:
        changed(descriptor)
        if len(synced) == batch % 10 + 1:
            _at(file, batch % 10 * 100_000 + 50)

    synced.clear()
    said = pytest.raises(OSError, match=f"shard: what is on disk differs from its checksum in bytes {batch % 10}")
    with mock.patch.multiple(blocks, _BLOCK=20_000, _BATCH=100_000), mock.patch.object(os, "fdatasync", damages), said:
        _write(file, pieces)


def test_a_store_that_is_mounted_is_no_disk_simulated(tmp_path: Path) -> None:
    def mount(folder: Path, kind: str) -> Any:
        return mock.Mock(mountpoint=str(folder), fstype=kind)

    (tmp_path / "bucket" / "disk").mkdir(parents=True)
    mounts = [mount(Path("/"), "ext4"), mount(tmp_path / "bucket", "fuse.gcsfuse"),
              mount(tmp_path / "bucket" / "disk", "xfs"), mount(tmp_path / "buck", "fuse.s3fs")]  # fmt: skip
    with mock.patch.object(psutil, "disk_partitions", lambda all: mounts):
        for folder, is_disk in ((tmp_path, True), (tmp_path / "bucket", False), (tmp_path / "bucket" / "disk", True)):
            (folder / "file").touch()
            with reading_back(folder / "file") as beside:
                assert (beside is not None) == is_disk


def test_a_file_that_is_cut_is_damaged_from_there_on(tmp_path: Path) -> None:
    with mock.patch.object(blocks, "_LARGE", 1 << 16):
        expected = _write(tmp_path / "shard", [b"x" * 100_000, b"y" * 100_000])
    os.truncate(tmp_path / "shard", 150_000)
    with open_verified(tmp_path / "shard", expected) as f:
        assert f.read(95_904) == b"x" * 95_904
        assert f.read(4096) == b"x" * 4096
        with pytest.raises(Damaged, match="in bytes 100000 to 195904"):
            f.read(1)


@pytest.mark.parametrize("kind", [RuntimeError, SystemError])
def test_the_fault_is_named_whatever_torch_makes_of_it_simulated(tmp_path: Path, kind: type[Exception]) -> None:
    """Under Python 3.13 torch asks the file again with the first error pending: a SystemError."""
    expected = _write(tmp_path / "shard", [b"x" * 9000])
    (tmp_path / "shard").write_bytes(b"y" * 9000)
    with pytest.raises(Damaged), open_verified(tmp_path / "shard", expected) as f:
        try:
            f.read()
        except Damaged as e:
            raise kind("PytorchStreamReader failed") from e


def _saved(folder: str) -> None:
    checkpoints = trained(folder, model=nn.Linear(512, 512))
    save_steps(checkpoints, 2, 4)
    checkpoints.close()


def _resumed(folder: str, small: bool = False, threads: int = 1) -> tuple[int, float, int]:
    """Return step, value, and the bytes of shards that were read."""
    checkpoints = trained(folder, "0-1", model=nn.Linear(8, 8) if small else nn.Linear(512, 512))
    checkpoints.ranks.threads = threads
    fill(checkpoints, -1.0)
    read = [0]

    class Counting(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            size = super().readinto(buffer)
            read[0] += size
            return size

    opened = Path.open

    def open_(self: Path, mode: str = "r", *rest: Any, **keys: Any) -> Any:
        return Counting(self) if self.suffix == ".distcp" and mode == "rb" else opened(self, mode, *rest, **keys)

    with mock.patch.object(Path, "open", open_):
        step = checkpoints.restore()
    return step, value_of(checkpoints), read[0]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_resume_reads_each_byte_once_at_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    run_world(2, _saved, str(tmp_path))
    shards = (tmp_path / "checkpoints" / "step-00000004").glob("*.distcp")
    size = sum(f.stat().st_size for f in shards)
    found = run_world(ranks, _resumed, str(tmp_path))
    assert [(step, value) for step, value, _ in found] == [(4, 4.0)] * ranks
    # Of a tensor that several ranks have parts of, DCP has each of them read all that one rank has written.
    assert sum(read for *_, read in found) <= size * (1.05 if ranks < 3 else 2.05)


def _at(file: Path, position: int) -> None:
    with file.open("r+b") as f:
        f.seek(position)
        (byte,) = f.read(1)
        f.seek(position)
        f.write(bytes([byte ^ 4]))


def _with_threads(folder: str) -> tuple[int, float, int]:
    storage._OF_A_THREAD = 1 << 14
    return _resumed(folder, threads=8)


@pytest.mark.parametrize("ranks", [1, 2])
def test_several_threads_read_what_one_does(tmp_path: Path, ranks: int) -> None:
    run_world(2, _saved, str(tmp_path))
    found = run_world(ranks, _with_threads, str(tmp_path))
    assert [(step, value) for step, value, _ in found] == [(4, 4.0)] * ranks
    shard = tmp_path / "checkpoints" / "step-00000004" / "__1_0.distcp"
    _at(shard, shard.stat().st_size * 2 // 3)
    found = run_world(ranks, _with_threads, str(tmp_path))
    assert [(step, value) for step, value, _ in found] == [(2, 2.0)] * ranks, "what one of them finds damaged"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_byte_flipped_anywhere_sends_all_ranks_one_checkpoint_back(tmp_path: Path, ranks: int) -> None:
    run_world(2, _saved, str(tmp_path / "run"))
    newest = tmp_path / "run" / "checkpoints" / "step-00000004"
    for file in sorted(newest.iterdir()):
        for part in (0.01, 0.5, 0.999):
            again = tmp_path / f"{file.name}-{part}"
            shutil.copytree(tmp_path / "run", again)
            position = int(file.stat().st_size * part)
            _at(again / newest.relative_to(tmp_path / "run") / file.name, position)
            found = run_world(ranks, _resumed, str(again))
            steps = {(step, value) for step, value, _ in found}
            assert steps == {(2, 2.0)} or (steps == {(4, 4.0)} and ranks == 1), (file.name, part, found)
            if steps == {(2, 2.0)}:
                (skipped,) = events_of(RunDir(again), "checkpoint_skipped")
                assert file.name in skipped["why"][0] or "manifest.json is damaged" in skipped["why"][0], skipped
                if file.suffix == ".distcp":
                    begin, end = map(int, re.findall(r"in bytes (\d+) to (\d+)", skipped["why"][0])[0])
                    assert begin <= position < end


def _fails(folder: str) -> str:
    checkpoints = trained(folder, "0-1", model=nn.Linear(512, 512))
    with pytest.raises(JobFailed) as failed:
        checkpoints.restore()
    return str(failed.value)


def _begun_again(folder: str) -> tuple[int, float]:
    checkpoints = trained(folder, "0-2", model=nn.Linear(512, 512), restart_from_zero=True)
    fill(checkpoints, -1.0)
    return checkpoints.restore(), value_of(checkpoints)


def test_a_state_that_half_a_checkpoint_was_read_into_is_never_begun_with(tmp_path: Path) -> None:
    run_world(1, _saved, str(tmp_path))
    for folder in catalog.find_checkpoints(tmp_path / "checkpoints"):
        shard = folder / "__0_0.distcp"
        _at(shard, int(shard.stat().st_size * 0.9))
    (tmp_path / "events.jsonl").unlink()  # nothing else says that there ever was one
    for _ in range(2):
        copy = tmp_path.with_name(f"{tmp_path.name}-copy")
        shutil.copytree(tmp_path, copy)
        (said,) = run_world(1, _fails, str(copy))
        assert "had a checkpoint of step 4" in said and "__0_0.distcp differs from its checksum in bytes" in said
        shutil.rmtree(copy)
    assert run_world(1, _begun_again, str(tmp_path)) == [(0, -1.0)]


def _resumed_small(folder: str) -> tuple[int, float, int]:
    return _resumed(folder, small=True)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_checkpoint_of_an_earlier_version_is_verified_too(tmp_path: Path, ranks: int, is_damaged: bool) -> None:
    run = tmp_path / "run"
    shutil.copytree(RECORDED, run)
    newest = run / "checkpoints" / "step-00000004"
    manifest = json.loads((newest / "manifest.json").read_text())
    assert {*manifest["files"]["__0_0.distcp"]} == {"bytes", "crc32"} and "sum" not in manifest
    for file in run.glob("checkpoints/*/manifest.json"):  # the fields of a version before that one
        before = {key: value for key, value in json.loads(file.read_text()).items() if key != "agreed"}
        file.write_text(json.dumps({**before, "config_digest": "0a1b2c"}))
    if is_damaged:
        _at(newest / "__1_0.distcp", 1000)
    step = 2 if is_damaged else 4
    found = run_world(ranks, _resumed_small, str(run))
    assert [(step, value) for step, value, _ in found] == [(step, float(step))] * ranks
    assert catalog.verify(catalog.find_checkpoints(run / "checkpoints")[0]) == []


def _full(folder: str) -> str:
    checkpoints = trained(folder, model=nn.Linear(512, 512))
    checkpoints.save(2, block=True)
    return str(checkpoints.failure)


@pytest.mark.parametrize("mounted", [False, True])
def test_read_back_finds_what_the_disk_has_changed(mounted: bool, tmp_path: Path) -> None:
    (said,) = run_world(1, _changed_on_disk, str(tmp_path), mounted)
    assert "what is on disk differs from its checksum in bytes" in said
    assert not any((tmp_path / "checkpoints").glob("step-*"))


def _changed_on_disk(folder: str, mounted: bool) -> str:
    fsync = os.fsync

    def fsync_(descriptor: int) -> None:
        fsync(descriptor)
        file = Path(f"/proc/self/fd/{descriptor}").readlink()
        if file.suffix == ".distcp":
            _at(file, 2000)

    assert dist.get_world_size() == 1
    is_mounted = mock.patch.object(blocks, "_is_mounted_store", lambda _: mounted)
    with mock.patch.object(os, "fsync", fsync_), is_mounted:
        return _full(folder)
