"""Checkpoints that are not what they were: the run says so and goes on from the newest good one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsdp_jobs.checkpoints import catalog
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.verdict import Verdict
from fsdp_jobs.submit.submit import overrides_again
from tests.jobs import Watched, cli, environment, fill, job, killed_at, signal_all
from tests.world import PACED, TINY, events_of, flip_byte, losses_of, undisturbed_losses

pytestmark = pytest.mark.integration

SMALL = (*TINY, "nodes=1", "nproc_per_node=2", "fsdp=full_shard", "checkpoint.every_steps=2", "checkpoint.keep=0")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 14 steps, each second of them saved."""
    folder = tmp_path_factory.mktemp("trained")
    done = cli(folder, "name=short", *SMALL, "steps=14", "optim.decay_steps=14")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def _flip(newest: Path) -> None:
    flip_byte(next(newest.glob("__0_0.distcp")))


def _truncate(newest: Path) -> None:
    shard = next(newest.glob("__1_0.distcp"))
    os.truncate(shard, shard.stat().st_size // 2)


def _no_manifest(newest: Path) -> None:
    (newest / "manifest.json").unlink()


def _no_shard(newest: Path) -> None:
    next(newest.glob("__0_0.distcp")).unlink()


def _flip_metadata(newest: Path) -> None:
    flip_byte(newest / ".metadata")


def _garbage_manifest(newest: Path) -> None:
    (newest / "manifest.json").write_text('{"step": ')


DAMAGE: dict[int, tuple[Callable[[Path], None], str]] = {  # by step
    14: (_flip, "__0_0.distcp differs from its checksum"),
    12: (_truncate, "__1_0.distcp has"),
    10: (_no_manifest, "manifest.json is missing"),
    8: (_no_shard, "__0_0.distcp is missing"),
    6: (_flip_metadata, ".metadata differs from its checksum"),
    4: (_garbage_manifest, "manifest.json is damaged"),
}


def test_damaged_checkpoints_are_named_and_passed_over(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "runs", tmp_path / "runs")
    run = RunDir(tmp_path / "runs" / "short")
    undamaged = losses_of(run)
    for step, (damage, _) in DAMAGE.items():
        damage(run.checkpoints / f"step-{step:08d}")
    done = cli(tmp_path, "resume", "short", "steps=16")
    assert done.returncode == 0, done.stdout + done.stderr
    for step, (_, said) in DAMAGE.items():
        lines = [line for line in done.stdout.splitlines() if f"step-{step:08d} cannot be used" in line]
        assert lines and said in lines[0], done.stdout
        assert (run.checkpoints / f"step-{step:08d}.damaged").is_dir()
    assert events_of(run, "resumed")[-1]["step"] == 2
    assert [m["step"] for m in Watched(run).metrics()] == [*range(1, 15), *range(3, 17)]
    assert losses_of(run)[:14] == undamaged
    assert all(not catalog.verify(f) for f in catalog.find_checkpoints(run.checkpoints))


def test_nothing_good_left_begins_again_only_when_told_so(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "runs", tmp_path / "runs")
    run = RunDir(tmp_path / "runs" / "short")
    undamaged = losses_of(run)
    for folder in catalog.find_checkpoints(run.checkpoints):
        _flip(folder)
    for found in ("step-00000002: __0_0.distcp differs from its checksum", "step-00000014.damaged"):
        done = cli(tmp_path, "resume", "short", "steps=14")
        assert done.returncode == 1 and "user_error" in done.stdout, done.stdout + done.stderr
        assert "this run had a checkpoint of step 14" in done.stdout and found in done.stdout
        assert "checkpoint.restart_from_zero=true" in done.stdout
    assert len(list(run.checkpoints.glob("*.damaged"))) == 7
    done = cli(tmp_path, "resume", "short", "steps=14", "checkpoint.restart_from_zero=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(run.checkpoints.glob("*.damaged"))) == 7
    skipped = [e["checkpoint"] for e in events_of(run, "checkpoint_skipped")]
    assert skipped == [f"step-{step:08d}" for step in range(14, 0, -2)]
    assert [m["step"] for m in Watched(run).metrics()] == [*range(1, 15), *range(1, 15)]
    assert losses_of(run) == undamaged
    assert not [o for o in overrides_again(run, []) if "restart_from_zero" in o], "it was allowed once"


def test_a_folder_for_checkpoints_belongs_to_the_run_that_made_it(tmp_path: Path) -> None:
    ours = ("name=short", *SMALL, "steps=2", f"checkpoint.dir={tmp_path}/new/folder")
    assert cli(tmp_path, "runs_dir=a", *ours).returncode == 0
    for overrides in (("seed=5",), ()):  # of another training, and of the same while the first is there
        other = cli(tmp_path, "runs_dir=b", *ours, *overrides)
        assert other.returncode == 2 and f"belongs to a run of {Path.owner(tmp_path)} on " in other.stderr, other
    shutil.rmtree(tmp_path / "a")
    assert cli(tmp_path, "runs_dir=b", *ours, "steps=4").returncode == 0
    run = RunDir(tmp_path / "b" / "short")
    assert [m["step"] for m in Watched(run).metrics()] == [3, 4]


def caught(run: RunDir, committer: psutil.Process) -> bool:
    """Stop rank 0, without which nothing is committed; whether a save is under way then. If not, it goes on."""
    committer.suspend()
    is_caught = any(run.checkpoints.glob("*.tmp"))
    if not is_caught:
        committer.resume()
    return is_caught


def test_killed_in_the_middle_of_a_save(tmp_path: Path) -> None:
    overrides = ["checkpoint.every_steps=3", "steps=30", "model.vocab_size=20000", "model.dim=128"]  # 60 MB a save
    with job(tmp_path, "cut", *overrides, nodes="1") as cut:
        cut.until(lambda: bool(cut.events("checkpoint")), "a first checkpoint")
        (committer,) = cut.ranks(0)[:1]
        while not caught(cut.run, committer):
            cut.until(lambda: any(cut.run.checkpoints.glob("*.tmp")), "a save under way")
        cut.kill()
        committed = [int(f.name[5:]) for f in catalog.find_checkpoints(cut.run.checkpoints)]
        cut.resume()
        assert cut.wait().verdict == "done"
        assert cut.events("resumed")[0]["step"] == max(committed)
        assert not any(cut.run.checkpoints.glob("*.tmp"))
        assert len(cut.losses()) == 30


def test_a_checkpoint_of_another_model(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "runs", tmp_path / "runs")
    done = cli(tmp_path, "resume", "short", "steps=16", "model.dim=128", "allow_config_change=true")
    assert done.returncode == 1
    assert "is of another model" in done.stdout and "tok_embeddings" in done.stdout
    assert "user_error" in done.stdout
    assert catalog.find_checkpoints(tmp_path / "runs" / "short" / "checkpoints")[0].name == "step-00000014"


def test_export_gives_the_weights_that_were_trained(trained: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    shutil.copytree(trained / "runs", tmp_path / "runs")
    out = tmp_path / "runs" / "short" / "export"
    out.mkdir()
    command = [*killed_at(1, ".model.safetensors"), "export", "short"]
    killed = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path))
    assert killed.returncode == -9 and any(out.glob(".model*"))
    for file_format in ("safetensors", "pt"):
        done = cli(tmp_path, "export", "short", "--format", file_format)
        assert done.returncode == 0, done.stdout + done.stderr
    assert not any(out.glob(".model*"))
    hf, pt = load_file(out / "model.safetensors"), torch.load(out / "model.pt", weights_only=True)
    assert len(hf) == len(pt) == 2 * 9 + 3
    assert torch.equal(hf["model.layers.1.self_attn.q_proj.weight"], pt["layers.1.attention.wq.weight"])
    assert (out / "config.json").exists()

    from fsdp_jobs.config.schema import load_config
    from fsdp_jobs.models.build import build_model

    model = build_model(load_config(RunDir(tmp_path / "runs" / "short").config).model)
    model.load_state_dict(pt)

    run = RunDir(tmp_path / "runs" / "short")
    newest, before, *_ = map(catalog.step_of, catalog.find_checkpoints(run.checkpoints))
    catalog.mark_agreed(run.checkpoints, lambda step: step != newest)
    done = cli(tmp_path, "export", "short", "--format", "pt")
    assert done.returncode == 0 and f"WARNING step-{newest:08d}: one of the replicas" in done.stderr, done.stderr
    older = torch.load(out / "model.pt", weights_only=True)
    assert not torch.equal(older["norm.weight"], pt["norm.weight"]), f"not the weights of step {before}"


def test_a_checkpoint_that_its_job_removes_during_an_export_is_named(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fsdp_jobs.cli.main import main
    from fsdp_jobs.hub import export

    shutil.copytree(trained / "runs", tmp_path / "runs")
    load = export.load_alone

    def removed(folder: Path, *args: Any) -> None:
        shutil.rmtree(folder)
        load(folder, *args)

    monkeypatch.setattr(export, "load_alone", removed)
    assert main(["export", "short", f"runs_dir={tmp_path}/runs"]) == 1
    error = capsys.readouterr().err
    assert "checkpoints/step-00000014" in error and "Traceback" not in error
    assert "checkpoint.keep" in error, "the job may have removed it"


def test_a_full_disk_leaves_nothing_half_written(small_disk: Path, tmp_path: Path) -> None:
    done = cli(tmp_path, "name=full", *SMALL, f"runs_dir={small_disk}", "steps=6", "model.vocab_size=10000")
    assert done.returncode == 1, done.stdout
    assert "No space left on device" in done.stdout and "Free space" in done.stdout
    run = RunDir(small_disk / "full")
    assert not any(run.checkpoints.glob("step-*"))
    assert len(losses_of(run)) == 6  # it trained on: the disk might have been freed in time
    fill(small_disk)
    refused = cli(tmp_path, "resume", "full", f"runs_dir={small_disk}")
    assert refused.returncode == 2 and "make room there, then repeat the command" in refused.stderr, refused.stdout
    assert len(refused.stderr.splitlines()) < 6, refused.stderr


def test_a_job_outlives_a_disk_without_a_free_byte_and_saves_as_soon_as_there_is_room(small_disk: Path) -> None:
    """TensorBoard's writer, the claim of the next round and the verdict need room too: none of them may end the job."""
    task = (*PACED, "steps=100000", "optim.schedule=constant", "checkpoint.every_steps=10")
    with job(small_disk, "full", *task, nodes="1") as full:
        full.until(lambda: bool(full.events("checkpoint")), "a checkpoint")
        fill(small_disk)
        full.until(lambda: len(full.events("checkpoint_failed")) >= 2, "saves that fail")
        assert [e["attempt"] for e in full.events("round_started")] == [0] and not full.events("round_broken")
        coordinator, ranks = full.process("fsdp_jobs.control.server"), full.ranks(0)
        ranks[0].kill()
        full.until(lambda: len({*full.ranks(0)} - {*ranks}) == 2, "ranks of a second round")
        full.agent(0).send_signal(signal.SIGTERM)
        full.until(lambda: not full.ranks(0), "their end")
        time.sleep(2)  # many tries to write the verdict
        assert coordinator.is_running() and Verdict.read(full.run, 0) is None and full.agent(0).is_running()

        subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
        full.until(lambda: full.run.last_attempt() == 1, "the next attempt")
        verdict = Verdict.read(full.run, 0)
        assert verdict is not None and verdict.verdict == "preempted"
        saved = max(e["step"] for e in full.events("checkpoint"))
        full.until(lambda: any(e["step"] > saved for e in full.events("checkpoint")), "a checkpoint again")
        assert full.events("resumed")[-1]["step"] == saved
        cancelled = cli(small_disk, "cancel", "full").stdout
        assert f"saved at step {full.step()}" in cancelled


@pytest.fixture
def freezing_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 file system in a file, which `fsfreeze` can make stand still: writes to it hang, and then go on."""
    mount, image = tmp_path / "disk", tmp_path / "disk.img"
    mount.mkdir()
    image.touch()
    os.truncate(image, 64 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    made = subprocess.run(["mount", "-o", "loop", image, mount], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"needs root and loop devices: {made.stderr}")
    yield mount
    subprocess.run(["fsfreeze", "--unfreeze", mount], capture_output=True)
    subprocess.run(["umount", "-l", mount], check=True)


def _has_saved(run: Watched, times: int) -> bool:
    return len(run.events("checkpoint")) >= times


def test_training_goes_on_while_the_disk_stands_still(freezing_disk: Path, tmp_path: Path) -> None:
    often = "checkpoint.every_steps=10"
    calm = undisturbed_losses(tmp_path, 1, 2, "steps=80")
    with job(tmp_path, "slow", "steps=80", often, f"checkpoint.dir={freezing_disk}", nodes="1") as slow:
        for freeze_at in (5, 35):
            slow.until_step(freeze_at)
            # A save that is not over yet would be waited for by the next one.
            slow.until(partial(_has_saved, slow, freeze_at // 10), "the save before")
            subprocess.run(["fsfreeze", "--freeze", freezing_disk], check=True)
            slow.until_step(freeze_at + 12)  # the save between these steps hangs, and nobody waits for it
            time.sleep(1)
            subprocess.run(["fsfreeze", "--unfreeze", freezing_disk], check=True)
        assert slow.wait().verdict == "done", slow.story()
        assert slow.losses() == calm and len(slow.metrics()) == 80
        assert not slow.events("round_broken") and not slow.events("checkpoint_failed")
        assert sum(e["seconds"] >= 1 for e in slow.events("checkpoint")) >= 2, slow.events("checkpoint")
        assert all(not catalog.verify(f) for f in catalog.find_checkpoints(freezing_disk / "slow"))


def test_training_goes_on_while_the_disk_is_read_only(freezing_disk: Path) -> None:
    task = (*PACED, "steps=100000", "optim.schedule=constant", "checkpoint.every_steps=10")
    with job(freezing_disk, "read", *task, nodes="1") as read:
        read.until(lambda: bool(read.events("checkpoint")), "a checkpoint")
        ranks, at = read.ranks(0), read.step()
        subprocess.run(["mount", "-o", "remount,abort", freezing_disk], check=True)
        _, alive = psutil.wait_procs(ranks, timeout=6)  # two saves fail, and their lines cannot be printed
        assert len(alive) == 2 and read.step() <= at + 10, read.story()


def test_no_save_outlives_its_ranks(freezing_disk: Path, tmp_path: Path) -> None:
    given = ("steps=4000", "checkpoint.every_steps=5", "checkpoint.async_mode=process", "model.dim=128")
    with job(tmp_path, "gone", *given, f"checkpoint.dir={freezing_disk}", nodes="1") as gone:
        home = freezing_disk / "gone"
        gone.until(lambda: bool(gone.events("checkpoint")), "a first checkpoint")
        gone.until(lambda: any(home.glob("*.tmp")), "a save under way")
        subprocess.run(["fsfreeze", "--freeze", freezing_disk], check=True)
        ranks = gone.ranks(0)
        savers = [process for rank in ranks for process in rank.children()]
        assert len(savers) >= len(ranks), "each rank has a process that saves"
        before = {f.name for f in catalog.find_checkpoints(home)}
        supervisor = gone.supervisor()
        assert supervisor is not None
        signal_all([supervisor, *supervisor.children(), *ranks])
        time.sleep(1)
        subprocess.run(["fsfreeze", "--unfreeze", freezing_disk], check=True)
        _, alive = psutil.wait_procs(savers, timeout=20)
        assert not alive, [process.cmdline() for process in alive]
        assert {f.name for f in catalog.find_checkpoints(home)} == before


def test_what_is_in_a_checkpoint_is_never_executed(tmp_path: Path) -> None:
    import pickle

    from fsdp_jobs.checkpoints.storage import SafeReader

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, (f"touch {tmp_path}/executed",)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(pickle.UnpicklingError, match="is not allowed in a checkpoint's metadata"):
        SafeReader(tmp_path).read_metadata()
    assert not (tmp_path / "executed").exists()
