"""Ranks that live and do not advance."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from fsdp_jobs.run.threads import wait_until
from tests.jobs import job
from tests.programs import EXAMPLES
from tests.world import TINY_TASK

pytestmark = pytest.mark.integration


def test_a_hanging_rank_is_found_named_and_restarted(tmp_path: Path) -> None:
    overrides = ["model=custom", "model._target_=tests.models.hangs_at_step_6", "model.wrap_classes=[Block]"]
    overrides += [*TINY_TASK, "data.micro_batch=4", "steps=12", "elastic.stall_timeout_s=3", "fsdp=full_shard"]
    with job(tmp_path, "hang", *overrides, nodes="1", nproc=2, tiny=False) as hang:
        assert hang.wait().verdict == "done"
        stalled = hang.events("stalled")
        assert len(stalled) == 1
        assert "no rank has done a step" in stalled[0]["why"]
        stacks = sorted(hang.run.path.glob("attempts/0/node-*/stacks-rank-*.txt"))
        assert len(stacks) == 2
        assert "in forward" in stacks[1].read_text() and "models.py" in stacks[1].read_text()
        assert len(hang.losses()) == 12


def test_a_stopped_rank_is_the_culprit(tmp_path: Path) -> None:
    keys = ("steps=40", "elastic.stall_timeout_s=3", "checkpoint.every_steps=10")
    with job(tmp_path, "frozen", *keys, nproc=1) as frozen:
        frozen.until_step(12)
        frozen.ranks(1)[0].send_signal(signal.SIGSTOP)
        frozen.until(lambda: bool(frozen.events("stalled")), "the stall is noticed", 30)
        why = frozen.events("stalled")[0]["why"]
        assert "on node 1 (stopped) does not respond" in why
        assert frozen.wait().verdict == "done"
        assert len(frozen.losses()) == 40


def test_a_rank_that_cannot_be_killed_has_no_successor_beside_it(tmp_path: Path) -> None:
    freezer = Path("/sys/fs/cgroup/freezer") / f"fsdp-jobs-{tmp_path.parent.name}-{os.getpid()}"
    try:
        freezer.mkdir()
    except OSError:
        pytest.skip("needs root and the freezer of cgroup v1, whose processes SIGKILL does not end")
    try:
        keys = ("steps=30", "elastic.stall_timeout_s=3", "checkpoint.every_steps=10")
        with job(tmp_path, "stuck", *keys, nproc=1) as stuck:
            stuck.until_step(12)
            (freezer / "cgroup.procs").write_text(str(stuck.ranks(1)[0].pid))
            (freezer / "freezer.state").write_text("FROZEN")
            log = stuck.run.process_log(0, "node-1")
            stuck.until(lambda: "did not exit after SIGKILL" in log.read_text(), "torch gives it up", 60)
            time.sleep(3)
            assert len(stuck.events("round_started")) == 1, "it still holds its GPU's memory"
            (freezer / "freezer.state").write_text("THAWED")
            assert stuck.wait().verdict == "done"
            assert len(stuck.losses()) == 30
    finally:
        (freezer / "freezer.state").write_text("THAWED")
        wait_until(lambda: not (freezer / "cgroup.procs").read_text(), 10)
        freezer.rmdir()


_DEADLOCK = """
import os, time
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

def save(model):
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "model.pt")  # which gathers, and the others do not come
    dist.barrier()

dist.init_process_group("gloo")
model = FSDP(nn.Linear(8, 8), device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", flush=True)
began = time.monotonic()
while time.monotonic() - began < 9 and "COMPUTE" in os.environ:  # longer than the timeout, silent, on rank 0 alone
    if dist.get_rank() == 0:
        sum(range(1000000))
    else:
        dist.barrier()
        break
if "COMPUTE" in os.environ:
    if dist.get_rank() == 0:
        dist.barrier()
    print("computed", flush=True)
else:
    save(model)
"""
_RECORDER = """
import os, threading, time

def record():
    while True:
        time.sleep(1)
        if os.read(pipe, 1):
            time.sleep(0.5)
            with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + os.environ["RANK"], "w") as file:
                file.write("collectives")

name = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + os.environ["RANK"] + ".pipe"
if os.path.exists(name):
    os.unlink(name)  # as NCCL does
os.mkfifo(name)
pipe = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
threading.Thread(target=record, daemon=True).start()
"""
_DEADLOCKS = ("script=deadlock.py", "elastic.stall_timeout_s=4", "elastic.join_window_s=5")


def test_a_program_in_which_one_rank_saves_is_found_and_the_rank_named_with_a_mock_of_nccls_recorder(
    tmp_path: Path,
) -> None:
    (tmp_path / "deadlock.py").write_text(_DEADLOCK.replace("\n\ndef save", f"\n{_RECORDER}\ndef save", 1))
    keys = (*_DEADLOCKS, "elastic.max_failures_without_progress=1")
    with job(tmp_path, "deadlock", *keys, nodes="2", nproc=2, tiny=False) as hang:
        hang.until(lambda: bool(hang.events("stalled")), "the stall is noticed", 120)
        log = hang.run.rank_log(0, 0, 0)
        assert time.time() - log.stat().st_mtime < 4 + 12, "within the timeout, and what a busy machine needs"
        verdict = hang.wait()
        assert (verdict.verdict, verdict.decision) == ("stalled", "stop"), hang.story()
        why = hang.events("stalled")[0]["why"]
        first, others = why.partition(": ")[2].split("; ")
        assert first.startswith("rank 0 on node 0 in save (deadlock.py:27), all_gather"), why
        assert others == "rank 1 on node 0, rank 2 on node 1, rank 3 on node 1 in save (deadlock.py:28), barrier", why
        assert len([*hang.run.path.glob("attempts/0/node-*/nccl-trace-rank-*")]) == 4
        assert not hang.run.excluded_hosts() and hang.events("round_broken")[0].get("blamed") is None
        assert "in save" in hang.run.stacks(0, 0, 0).read_text()


def test_a_program_that_computes_in_silence_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "deadlock.py").write_text(_DEADLOCK)
    with job(tmp_path, "computes", *_DEADLOCKS, nodes="1", nproc=2, tiny=False, COMPUTE="yes") as busy:
        assert busy.wait().verdict == "done", busy.story()
        assert not busy.events("stalled") and "computed" in busy.run.rank_log(0, 0, 0).read_text()


_SLOW_DISK = f"""
import os, sys, time
sys.path[:0] = [{str(EXAMPLES)!r}]
import small_library

fsync = os.fsync
def slow(file):
    number = file if isinstance(file, int) else file.fileno()
    time.sleep(4 if "step-" in os.readlink(f"/proc/self/fd/{{number}}") else 0)
    fsync(file)

os.fsync = slow
small_library.main()
"""


def test_saves_that_take_longer_than_steps_may_are_waited_for(tmp_path: Path) -> None:
    (tmp_path / "slow_disk.py").write_text(_SLOW_DISK)
    keys = ("script=slow_disk.py", "script_args=--steps=7", "checkpoint.every_steps=5", "elastic.stall_timeout_s=3")
    with job(tmp_path, "slow", *keys, nodes="1", nproc=2, tiny=False) as slow:
        assert slow.wait(150).verdict == "done", slow.story()
        assert [e["step"] for e in slow.events("checkpoint")] == [5, 7]
        assert all(e["seconds"] > 4 for e in slow.events("checkpoint"))
        assert not slow.events("round_broken"), slow.story()
