"""Checkpoints in an object store. The store is simulated: moto's S3 server, on this machine, with the real client."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_jobs.checkpoints import catalog
from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.run.directory import RunDir, checkpoints_of
from tests.jobs import cli, job
from tests.store import simulated_store
from tests.world import TINY, events_of

pytestmark = pytest.mark.integration


def test_a_run_is_killed_and_resumed_from_a_simulated_object_store(tmp_path: Path) -> None:
    with simulated_store() as bucket:
        place = f"checkpoint.dir=s3://{bucket}/mine"
        with job(
            tmp_path, "cloud", place, "steps=12", "checkpoint.every_steps=4", "checkpoint.keep=2", nodes="1"
        ) as first:
            first.until(lambda: bool(first.events("checkpoint")), "a checkpoint")
            first.ranks(0)[1].kill()
            assert first.wait().verdict == "done", first.story()
            assert first.events("resumed"), first.story()
        run = RunDir(tmp_path / "runs" / "cloud")
        home = checkpoints_of(compose_job([place]).checkpoint, run)
        found = catalog.find_checkpoints(home)
        assert [catalog.step_of(f) for f in found] == [12, 8]
        assert all(catalog.verify(f) == [] for f in found)
        assert not any(run.checkpoints.iterdir())

        shard = next(f for f in found[0].iterdir() if f.name.endswith(".distcp"))
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(bytes(content))
        assert cli(tmp_path, "resume", "cloud", "steps=14").returncode == 0
        (skipped,) = events_of(run, "checkpoint_skipped")
        assert skipped["checkpoint"] == found[0].name and "differs from its checksum" in skipped["why"][0]
        assert events_of(run, "resumed")[-1]["step"] == 8
        exported = cli(tmp_path, "export", "cloud")
        assert exported.returncode == 0 and (run.path / "export" / "model.safetensors").exists(), exported.stderr


def test_a_url_that_cannot_be_used_is_named_before_anything_starts(tmp_path: Path) -> None:
    done = cli(tmp_path, *TINY, "checkpoint.dir=s5://bucket/x", "name=nowhere")
    assert done.returncode == 2 and "checkpoint.dir=s5://bucket/x" in done.stderr
    assert not (tmp_path / "runs").exists()
