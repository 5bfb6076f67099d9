"""The main job, whole: submitted by the command line, killed, resumed, cancelled."""

from __future__ import annotations

import math
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from fsdp_jobs.run.directory import RunDir
from tests.jobs import Job, Watched, cli, environment, hear_ctrl_c, job
from tests.world import PACED, TINY, undisturbed_losses

pytestmark = pytest.mark.integration

STEPS = "steps=60"
SAMPLES, BATCH = 63, 8  # an epoch is no whole number of steps


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of 60 steps on 2 nodes x 2 ranks that nobody touched."""
    return undisturbed_losses(tmp_path_factory.mktemp("calm"), 2, 4, STEPS)


def test_everything_killed_and_resumed_on_other_ranks(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    with job(tmp_path, "moved", STEPS, "checkpoint.every_steps=8", "log_every_steps=1", nodes="1", nproc=4) as moved:
        moved.until_step(random.randint(17, 30))
        moved.kill()
        moved.resume("nodes=1", "nproc_per_node=1", "fsdp=full_shard")
        moved.until(lambda: bool(moved.events("resumed")), "resumed")
        moved.until_step(30)
        moved.kill()
        moved.resume("nodes=1", "nproc_per_node=3", "fsdp=shard_grad_op")
        assert moved.wait().verdict == "done"
        worlds = [e["world_size"] for e in moved.events("round_started")]
        assert worlds == [4, 1, 3]
        assert moved.losses() == pytest.approx(undisturbed, rel=1e-5)
        assert all(e["step"] % 8 == 0 for e in moved.events("resumed"))
        for resumed in moved.events("resumed"):
            saved = [e["step"] for e in moved.events("checkpoint") if e["time"] < resumed["time"]]
            assert resumed["step"] >= max(saved), "nothing that was saved is done again"


def test_after_a_killed_coordinator_rank_and_node_the_losses_are_the_same_to_the_bit(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    saving = "checkpoint.async_mode=process"  # as on GPUs: in processes that end with their ranks
    with job(tmp_path, "hurt", STEPS, "checkpoint.every_steps=8", saving) as hurt:
        hurt.until_step(5)
        hurt.process("fsdp_jobs.control.server").kill()
        before = hurt.step()
        hurt.until_step(before + 5)  # nobody needs it to train
        hurt.until(lambda: bool(hurt.events("adopted")), "the new coordinator takes over")
        hurt.until_step(20)
        hurt.ranks(0)[0].kill()
        hurt.until(lambda: len(hurt.events("round_started")) == 2, "a restart")
        hurt.until(lambda: hurt.metrics()[-1]["time"] > hurt.events("round_started")[1]["time"], "training again")
        hurt.until_step(random.randint(33, 50))
        hurt.agent(1).kill()
        assert hurt.wait().verdict == "done"
        assert hurt.losses() == undisturbed
        broken = hurt.events("round_broken")
        assert len(broken) == 2 and "SIGKILL" in broken[0]["why"]
        assert len(hurt.events("round_started")) == 3
    told = cli(tmp_path, "status", "hurt").stdout
    assert re.search(r"was killed by SIGKILL: \d+ steps? lost, training again after [\d.]+ s", told), told
    assert "goodput" in told and "it has ended" in told
    assert cli(tmp_path, "report", "hurt").stdout.strip() == "runs/hurt/report.html"
    assert "was killed by SIGKILL" in (tmp_path / "runs" / "hurt" / "report.html").read_text()


@pytest.mark.soak  # the order itself: tests/train/test_data.py; losses on other ranks: test_everything_killed...
def test_each_epoch_sees_each_sample_once_through_a_kill_and_another_world(tmp_path: Path) -> None:
    tokens = np.repeat(np.arange(SAMPLES, dtype=np.uint16), 8)
    np.append(tokens, np.uint16(0)).tofile(tmp_path / "tokens.bin")
    seen_dir = tmp_path / "seen"
    seen_dir.mkdir()
    overrides = [
        "model=custom",
        "model._target_=tests.models.recorder",
        f"model.kwargs={{vocab: {SAMPLES}}}",
        "model.wrap_classes=[Block]",
        "data=tokens",
        f"data.path={tmp_path}/tokens.bin",
        f"data.vocab_size={SAMPLES}",
        "data.seq_len=8",
        f"data.global_batch={BATCH}",
        "data.micro_batch=2",
        "steps=40",
        "checkpoint.every_steps=5",
        "nodes=1",
        "fsdp=full_shard",
    ]
    done = cli(tmp_path, "name=seen", *overrides, "nproc_per_node=3", "steps=18", SEEN_DIR=str(seen_dir))
    assert done.returncode == 0, done.stdout + done.stderr
    done = cli(tmp_path, "resume", "seen", "nproc_per_node=2", "steps=40", SEEN_DIR=str(seen_dir))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {f.name: [r.split() for r in f.read_text().splitlines()] for f in sorted(seen_dir.iterdir())}
    order: list[int] = []
    for life, world, steps in (("0.0", 3, 18), ("1.0", 2, 22)):
        share = math.ceil(BATCH / world)
        microbatches = math.ceil(share / 2)
        for step in range(steps):
            step_samples: list[int] = []
            for rank in range(world):
                mine = rows[f"{life}.{rank}"][step * microbatches : (step + 1) * microbatches]
                step_samples += [int(t) for row in mine for t in row]
            for _ in range(share * world - BATCH):  # padding: its tokens are 0 and its labels do not count
                step_samples.remove(0)
            order += step_samples
    assert len(order) == 40 * BATCH
    for epoch in range(40 * BATCH // SAMPLES):
        assert sorted(order[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == list(range(SAMPLES)), epoch


def test_a_job_saves_by_the_clock_when_asked_and_when_cancelled_and_torchx_knows_it(tmp_path: Path) -> None:
    torchx = [str(Path(sys.executable).parent / "torchx")]
    env = environment(tmp_path)

    def ask(*args: str) -> str:
        done = subprocess.run([*torchx, *args], capture_output=True, text=True, env=env, cwd=tmp_path, timeout=60)
        return done.stdout + done.stderr

    def handle() -> str:
        return str(asked.run.read_job()["handle"])

    with job(tmp_path, "asked", *PACED, "steps=4000", "checkpoint.every_minutes=0.03", nodes="1", nproc=1) as asked:
        asked.until(lambda: len(asked.events("checkpoint")) >= 2, "checkpoints by the clock")
        taken = len(asked.events("checkpoint"))
        asked.run.save_request.touch()
        asked.until(lambda: not asked.run.save_request.exists(), "the request is taken")
        asked.until(lambda: len(asked.events("checkpoint")) > taken, "the checkpoint asked for")
        assert "RUNNING" in ask("status", handle())
        refused = cli(tmp_path, "resume", "asked")
        assert refused.returncode == 2 and "in use by the live job" in refused.stderr
        done = cli(tmp_path, "cancel", "asked")
        assert "stopped" in done.stdout, done.stdout + done.stderr
        verdict = asked.wait()
        assert (verdict.verdict, verdict.decision) == ("preempted", "stop")
        stopped_at = asked.step()

        asked.resume("checkpoint.every_minutes=0")
        asked.until_step(stopped_at + 5)
        subprocess.run([*torchx, "cancel", handle()], env=env, cwd=tmp_path, timeout=60, check=True)  # ends it at once
        assert asked.wait().verdict == "preempted"
        assert "CANCELLED" in ask("status", handle())
        assert asked.events("resumed")[0]["step"] == stopped_at
        steps = [m["step"] for m in asked.metrics()]
        assert steps == list(range(1, asked.step() + 1)), "no step lost, none done twice"
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = events.EventAccumulator(str(asked.run.tensorboard))
    board.Reload()
    assert [e.step for e in board.Scalars("loss")][:stopped_at] == list(range(1, stopped_at + 1))


def test_ctrl_c_of_an_attached_job_saves_and_stops(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fsdp_jobs", "name=c", *TINY, "steps=4000", "nodes=1", "nproc_per_node=1"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=hear_ctrl_c,
    )
    watched = Job.__new__(Job)
    Watched.__init__(watched, RunDir(tmp_path / "runs" / "c"))
    try:
        watched.until_step(5)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
        assert "asked to save a checkpoint" in output and "c: stopped" in output and "fsdp-jobs resume c" in output
        assert watched.wait().verdict == "preempted"
        newest = watched.events("checkpoint")[-1]["step"]
        assert newest == watched.step()
    finally:
        watched.kill()
        process.kill()


def test_an_error_in_the_users_code_stops_the_job_and_is_shown(tmp_path: Path) -> None:
    done = cli(
        tmp_path,
        "name=bug",
        "nodes=1",
        "nproc_per_node=1",
        "model=custom",
        "model._target_=tests.models.fails_at_step_3",
        "model.wrap_classes=[Block]",
        "data=synthetic",
        "data.seq_len=8",
        "steps=10",
    )
    assert done.returncode == 1, done.stdout
    assert "user_error" in done.stdout and "ZeroDivisionError" in done.stdout
    assert "twice" in done.stdout
    assert "fails_at_step_3" in done.stdout or "models.py" in done.stdout  # the log's last lines


def test_ranks_die_with_their_supervisor(tmp_path: Path) -> None:
    """Or they would go on writing into a run that another attempt has taken over."""
    with job(tmp_path, "orphans", *PACED, "steps=4000", nodes="1", nproc=2) as orphans:
        orphans.until_step(3)
        supervisor = orphans.supervisor()
        assert supervisor is not None
        family = supervisor.children(recursive=True)
        assert len(family) >= 5  # coordinator, agent, fork server, ranks
        supervisor.kill()
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not [p for p in alive if "resource_tracker" not in " ".join(p.cmdline())], alive
