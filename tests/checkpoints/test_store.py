"""A checkpoint in an object store is there from its manifest on, whatever its client says afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from fsdp_jobs.checkpoints import catalog
from fsdp_jobs.checkpoints.catalog import MANIFEST, SHARDS, Manifest
from fsdp_jobs.run.directory import RunDir
from tests.checkpoints.saving import save_steps, trained
from tests.store import simulated_store
from tests.world import events_of, run_world


class Refused(Exception):
    """As clients have them: no OSError."""


def _refuse(*_: object) -> None:
    raise Refused("the credential has expired")


def _save_with_refusals(folder: str) -> list[str]:
    checkpoints = trained(folder, dir="memory://kept")
    write = Manifest.write

    def write_and_lose_the_answer(self: Manifest, *args: Any) -> None:
        write(self, *args)
        _refuse()

    save_steps(checkpoints, 1)
    with patch.object(catalog, "prune", _refuse):
        save_steps(checkpoints, 2)
    with patch.object(Manifest, "write", write_and_lose_the_answer):
        save_steps(checkpoints, 3)
    with patch.object(Manifest, "write", _refuse):
        save_steps(checkpoints, 4)
    with patch.object(Manifest, "read", _refuse):  # also after the commit
        save_steps(checkpoints, 5)
    return [f.name for f in checkpoints.home.glob("step-*")]


def test_what_a_store_refuses_after_the_manifest_removes_nothing(tmp_path: Path) -> None:
    (names,) = run_world(1, _save_with_refusals, str(tmp_path))
    assert sorted(name.partition(".")[0] for name in names) == [f"step-0000000{step}" for step in (1, 2, 3, 5)]
    run = RunDir(tmp_path)
    assert [event["step"] for event in events_of(run, "checkpoint")] == [1, 2, 5]
    assert [event["step"] for event in events_of(run, "checkpoint_failed")] == [3, 4]


def test_a_store_of_many_steps_is_asked_once_for_each() -> None:
    from s3fs import S3FileSystem
    from upath import UPath

    with simulated_store() as bucket:
        home = UPath(f"s3://{bucket}/run", use_listings_cache=False)
        whole, unfinished, damaged, on_nodes = (home / f"step-0000000{n}.0-0-1" for n in range(4))
        many = [home / f"step-{n:08d}.0-0-1" for n in range(10, 40)]
        another_runs = home / "another" / many[0].name
        files = [folder / MANIFEST for folder in (whole, *many, another_runs)]
        files += [unfinished / "__0_0.distcp", damaged / f"{MANIFEST}.damaged", on_nodes / SHARDS]
        for file in files:
            file.fs.pipe(file.path, b"{}")
        with patch.object(S3FileSystem, "_call_s3", autospec=True, side_effect=S3FileSystem._call_s3) as requests:
            assert catalog.find_checkpoints(home) == [*reversed(many), whole]
            assert catalog.find_on_nodes(home, [*reversed(many), whole]) == [on_nodes]
            catalog.remove_unfinished(home)
        assert requests.call_count < 4 * len(many)
        left = {folder.name for folder in home.glob("step-*")}
        assert left == {folder.name for folder in (whole, damaged, on_nodes, *many)}
