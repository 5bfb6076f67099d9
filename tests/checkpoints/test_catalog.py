"""Commit, verify, prune: without torch."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from upath import UPath

from fsdp_jobs.checkpoints import catalog
from fsdp_jobs.checkpoints.blocks import SummedFile
from fsdp_jobs.checkpoints.catalog import Manifest


def _write(checkpoints: Path, step: int, content: bytes = b"weights") -> Path:
    temporary = checkpoints / f"step-{step:08d}.0-0.tmp"
    temporary.mkdir(parents=True)
    with (temporary / "shard").open("wb") as raw:
        shard = SummedFile(raw)
        shard.write(content)
        shard.close()
    files = {"shard": shard.sums()}
    final = catalog.folder_of(checkpoints, step, "0-0")
    catalog.commit(temporary, final, Manifest(step, step * 8, 1, {"shard": 1}, "t", time.time(), files))
    return final


def test_what_is_shorter_than_reported_is_not_committed(tmp_path: Path) -> None:
    temporary, final = tmp_path / ".part", tmp_path / "step-00000003"
    temporary.mkdir()
    with (temporary / "shard").open("wb") as raw:
        shard = SummedFile(raw)
        shard.write(b"all that was reported")
        shard.close()
    os.truncate(temporary / "shard", 5)  # as a store does that says yes and keeps half
    manifest = Manifest(3, 24, 1, {"shard": 1}, "t", time.time(), {"shard": shard.sums()})
    with pytest.raises(OSError, match=r"is not whole: .*shard"):
        catalog.commit(temporary, final, manifest)
    assert not final.exists()


def test_a_file_system_that_cannot_sync_folders_has_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As 9p, by which WSL mounts Windows' disks, and VirtualBox's shared folders."""

    def sync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", sync)
    _write(tmp_path, 10)
    assert [catalog.verify(folder) for folder in catalog.find_checkpoints(tmp_path)] == [[]]


def test_checkpoints_that_cannot_be_listed_are_not_said_to_be_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job would begin from zero, or from an older step than one on the nodes' disks or half replaced."""
    assert catalog.find_checkpoints(tmp_path / "none") == []
    _write(tmp_path, 10)

    def fails(_: object) -> NoReturn:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(Path, "exists", lambda _: False)  # as of Python 3.14
    for way in ("listdir", "scandir"):  # of Python 3.11 and 3.13
        monkeypatch.setattr(os, way, fails)
    for look in (catalog.find_checkpoints, partial(catalog.find_on_nodes, committed=()), catalog.remove_unfinished):
        with pytest.raises(OSError, match="Stale"):
            look(tmp_path)


def test_prune_counts_whole_checkpoints_only(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        _write(tmp_path, step)
    (tmp_path / "step-00000050" / "shard").write_bytes(b"short")
    (tmp_path / "step-00000040" / "manifest.json").unlink()
    removed = catalog.prune(tmp_path, keep=2)
    assert [f.name for f in removed] == ["step-00000010"]
    whole = [f.name for f in catalog.find_checkpoints(tmp_path) if not catalog.verify(f, shards=False)]
    assert whole == ["step-00000030", "step-00000020"]


def test_a_folder_that_may_not_be_listed_is_not_an_empty_one(tmp_path: Path) -> None:
    """A run whose checkpoints are hidden from this user would begin again."""
    _write(tmp_path / "checkpoints", 10)
    (tmp_path / "checkpoints").chmod(0)
    as_others = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    look = "import pathlib, sys; from fsdp_jobs.checkpoints.catalog import find_checkpoints as find; "
    command = [*as_others, sys.executable, "-c", f"{look}find(pathlib.Path(sys.argv[1]))", f"{tmp_path}/checkpoints"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "PermissionError: [Errno 13] Permission denied" in done.stderr
    assert catalog.find_checkpoints(tmp_path / "none") == []


def test_steps_on_nodes_go_once_a_newer_one_may_be_resumed_from(tmp_path: Path) -> None:
    for step, agreed in ((100, None), (200, False)):
        folder = _write(tmp_path, step)
        replace(Manifest.read(folder), agreed=agreed).write(folder)
    on_nodes = [tmp_path / f"step-{step:08d}.1-2-1.tmp" for step in (90, 130)]
    for folder in on_nodes:
        folder.mkdir()
        Manifest.read(tmp_path / "step-00000100").write(folder, catalog.SHARDS)
    catalog.prune(tmp_path, keep=2)
    assert [folder.exists() for folder in on_nodes] == [False, True], "step 200 differs between replicas"


def test_a_look_that_fails_removes_nothing_from_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec's `exists` says no to any error of a connection."""
    home = UPath("memory://looked-at")
    for step in (100, 200):
        folder = home / f"step-{step:08d}.0-1-1"
        folder.mkdir(parents=True)
        Manifest(step, 0, 1, {}, "x", 0.0, {}, None).write(folder)
    (home / "step-00000300.0-1-1").mkdir()
    (home / "step-00000300.0-1-1" / "half").write_text("")
    look = MemoryFileSystem.info

    def fails(self: MemoryFileSystem, path: str, **kwargs: Any) -> Any:
        if "00000200" in path and path.endswith("manifest.json"):
            raise OSError(110, "timed out")
        return look(self, path, **kwargs)

    with monkeypatch.context() as now:
        now.setattr(MemoryFileSystem, "info", fails)
        catalog.remove_unfinished(home)
        catalog.remove_failed(home / "step-00000200.0-1-1")
    assert [catalog.step_of(folder) for folder in catalog.find_checkpoints(home)] == [200, 100]
    assert not [*home.glob("step-00000300*")]


def test_keep_zero_keeps_all_and_a_save_reads_none_of_them(tmp_path: Path) -> None:
    for step in range(5):
        _write(tmp_path, step)
    for file in ("manifest.json", "shard"):
        (tmp_path / "step-00000000" / file).unlink()
        (tmp_path / "step-00000000" / file).symlink_to(file)  # an error for whoever reads it
    catalog.mark_agreed(tmp_path, lambda step: True if step > 2 else None)
    assert catalog.prune(tmp_path, keep=0) == []
    assert [Manifest.read(f).agreed for f in catalog.find_checkpoints(tmp_path)[:3]] == [True, True, None]


def test_steps_sort_as_numbers_and_other_folders_are_no_checkpoints(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000, 5):
        _write(tmp_path, step)
    mine = ("step-00000008.damaged", "step-9", "other", "step-old", "step-mine.tmp", "step-mine.replaced")
    for name in ("step-00000007.x.tmp", *mine):
        (tmp_path / name).mkdir()
    (tmp_path / "step-old" / catalog.SHARDS).touch()
    assert [f.name for f in catalog.find_checkpoints(tmp_path)] == ["step-100000000", "step-99999999", "step-00000005"]
    assert catalog.find_on_nodes(tmp_path, ()) == []
    catalog.remove_unfinished(tmp_path)
    assert {f.name for f in tmp_path.iterdir()} >= {*mine} and not (tmp_path / "step-00000007.x.tmp").exists()


@settings(max_examples=60, deadline=None)
@given(content=st.binary(min_size=1, max_size=400), data=st.data())
def test_any_flipped_bit_is_found(content: bytes, data: st.DataObject, tmp_path_factory: object) -> None:
    folder = tmp_path_factory.mktemp("flip")  # type: ignore[attr-defined]
    checkpoint = _write(folder, 1, content)
    assert catalog.verify(checkpoint) == []
    bit = data.draw(st.integers(0, len(content) * 8 - 1))
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    (checkpoint / "shard").write_bytes(damaged)
    (fault,) = catalog.verify(checkpoint)
    assert fault.startswith("shard differs from its checksum")


def _rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest as another version of this program would have written it."""
    file = folder / catalog.MANIFEST
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps({**content, "sum": catalog._sum(content)}))


def test_fields_of_other_versions_condemn_nothing(tmp_path: Path) -> None:
    folder = _write(tmp_path, 10)
    _rewrite(folder, lambda content: content.update(config_digest="0a1b", kept_for={"years": 3}))
    assert catalog.verify(folder) == [] and Manifest.read(folder).step == 10
    _rewrite(folder, lambda content: content.pop("samples"))
    (fault,) = catalog.verify(folder)
    assert catalog.OTHER_VERSION in fault and "samples" in fault
    _rewrite(folder, lambda content: content.update(samples=80, files={"shard": {"bytes": 7, "blake9": "0a"}}))
    (fault,) = catalog.verify(folder)
    assert catalog.OTHER_VERSION in fault and "shard" in fault


def test_of_two_saves_of_a_step_in_a_store_the_later_is_newer() -> None:
    names = ["step-00000010.0-9-1", "step-00000010.0-10-1", "step-00000009.1-0-1", "step-00000010.0-9-12"]
    newest = catalog._newest_first([Path(name) for name in names])
    assert [f.name for f in newest] == [names[1], names[3], names[0], names[2]]


@pytest.mark.parametrize("content", ["", "[1]", "null", '"step"', "7", "\x00" * 40, "{}"])
def test_a_manifest_that_is_none_stops_neither_a_look_nor_a_mark(tmp_path: Path, content: str) -> None:
    sound, damaged = _write(tmp_path, 1), _write(tmp_path, 2)
    (damaged / "manifest.json").write_text(content)
    (fault,) = catalog.verify(damaged)
    assert fault.startswith("manifest.json is ")
    catalog.mark_agreed(tmp_path, lambda _: True)
    assert Manifest.read(sound).agreed and catalog.prune(tmp_path, keep=1) == []
