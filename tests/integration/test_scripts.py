"""Programs that are not our trainer, on two nodes: hurt, gone on with, finished; and those that cannot be run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from fsdp_jobs.run.processes import all_processes, command_of
from fsdp_jobs.run.status import RunStatus
from tests import programs
from tests.jobs import ROOT, Job, cli, job
from tests.programs import EXAMPLES, log_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

QUICK = ("elastic.join_window_s=5", "checkpoint.every_steps=10")


def until_said(job: Job, text: str) -> None:
    job.until(lambda: text in log_of(job), f"rank 0 says {text}")


_WATCHED = f"""
import os, sys, time
from torch import nn
sys.path[:0] = [{str(EXAMPLES)!r}, {str(ROOT)!r}]
import small_library
from tests.models import flips_a_bit

class Layer(nn.Sequential):
    def forward(self, x):
        time.sleep(0.05 if os.environ["RANK"] == "2" else 0.04)
        return super().forward(x)

class Network(small_library.Network):
    def __init__(self):
        super().__init__(depth=1)
        self.layers = nn.ModuleList([Layer(nn.Linear(64, 64), nn.GELU())])

flips_a_bit()
small_library.Network = Network
small_library.main()
"""


@pytest.mark.soak  # the trainer is a program on the library: test_slow.py, test_integrity.py
def test_the_librarys_slow_nodes_and_differing_replicas_are_named_as_the_trainers(tmp_path: Path) -> None:
    (tmp_path / "watched.py").write_text(_WATCHED)
    keys = ("script=watched.py", "script_args=--steps=100000", "fsdp=no_shard", "elastic.heartbeat_interval_s=0.25")
    keys += ("checkpoint.every_steps=0", "checkpoint.memory.every_steps=1", "integrity.action=restart")
    with job(tmp_path, "watched", *keys, nodes="3", nproc=1, tiny=False, FLIP="1:0:12:parameter-1:7:20") as run:
        run.until(lambda: bool(run.events("slow_node")), "a slow node is named", 200)
        (slow,), (corrupt, *_) = run.events("slow_node"), run.events("corruption")
        assert (slow["node"], slow["cause"]) == (2, "compute"), slow
        assert (corrupt["finding"], corrupt["ranks"]) == ("outvoted", [1]) and corrupt["step"] >= 12, corrupt
        (resumed,) = run.events("resumed")
        assert (resumed["place"], resumed["step"]) == ("memory", corrupt["agreed"]), resumed


def test_preempted_recipe_saves_where_it_is_and_is_requeued(tmp_path: Path) -> None:
    example = f"script={EXAMPLES}/llama_recipe.py"
    with job(
        *(tmp_path, "llama", example, "script_args=--steps 200 --width 16"),
        *("fsdp=hybrid_shard", "fsdp.shard_group=2", "checkpoint.every_steps=0", *QUICK[:1]),
        nproc=1,
        tiny=False,
    ) as run:
        run.until_step(4)
        run.agent(1).send_signal(signal.SIGTERM)
        assert run.wait(180).verdict == "done", run.story()
        first = run.events("attempt_ended")[0]
        assert (first["verdict"], first["decision"]) == ("preempted", "requeue")
        (resumed,) = run.events("resumed")
        assert resumed["step"] == first["committed"] >= 4
        assert [m["step"] for m in run.metrics()] == list(range(1, 201)), "no step was done twice"


def test_elastic_program_loses_a_rank_and_goes_on_from_its_snapshot(tmp_path: Path) -> None:
    example, args = f"script={EXAMPLES}/torch_elastic.py", f"script_args=--epochs 30 --snapshot {tmp_path}/snapshot.pt"
    temporaries = tmp_path / "tmp"
    temporaries.mkdir()
    options = [*QUICK, example, args]
    with job(tmp_path, "elastic", *options, nodes="1", nproc=2, tiny=False, TMPDIR=str(temporaries)) as run:
        until_said(run, "epoch 5 ")
        shutil.rmtree(temporaries)  # as SLURM removes a job's private /tmp when it loses a node
        run.ranks(0)[1].kill()
        assert run.wait().verdict == "done", run.story()
        starts = re.findall(r"^epoch (\d+) of 30, 2 ranks, restart (\d)", log_of(run), re.MULTILINE)
        assert starts[0] == ("0", "0") and len(starts) == 2
        assert int(starts[1][0]) >= 5 and starts[1][1] == "1"
        assert "epoch 30 loss" in log_of(run)


def test_trainer_of_transformers_loses_a_rank_and_goes_on_sharded(tmp_path: Path) -> None:
    example = (f"script={EXAMPLES}/transformers_trainer.py", "script_args=--steps 40 --every 5", "fsdp=full_shard")
    with job(tmp_path, "trainer", *example, QUICK[0], nodes="1", nproc=2, tiny=False) as run:
        run.until(lambda: log_of(run).count("'loss'") >= 12, "12 steps")
        run.ranks(0)[1].kill()
        assert run.wait().verdict == "done", run.story()
    begun = re.findall(r"^begins with .*?(None|\d+)$", log_of(run), re.MULTILINE)
    assert len(begun) == 2 and begun[0] == "None" and int(begun[1]) >= 10, begun
    (row,) = json.loads(cli(tmp_path, "status", "trainer", "--json").stdout)
    assert (row["step"], row["steps"]) == (40, 40) and row["loss"] > 0, row
    assert "done: step 40, sharded (Shard(dim=0),)" in log_of(run)


def test_program_that_only_hears_signals_has_the_grace_to_end(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "def leave(*_):\n"
        "    time.sleep(3 * int(os.environ['RANK']))\n"
        "    pathlib.Path('left-' + os.environ['RANK']).touch()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.1)\n"
    )
    with job(tmp_path, "slow", "script=slow.py", *QUICK, nproc=1, tiny=False) as run:
        run.until(lambda: "ready" in log_of(run) and "ready" in log_of(run, 1), "both run")
        assert run.folder.joinpath("left-0").exists() is False
        (run.run.path / "stop").write_text("cancelled")
        verdict = run.wait()
        assert (verdict.verdict, verdict.decision) == ("preempted", "stop"), run.story()
        assert "SIGTERM" in verdict.reason
        assert (tmp_path / "left-0").exists() and (tmp_path / "left-1").exists(), "nobody was killed while saving"


def test_program_that_fails_on_one_node_is_told_within_seconds(tmp_path: Path) -> None:
    seconds = f"1234.{os.getpid()}"
    (tmp_path / "half.py").write_text(
        "import os, signal, subprocess, time\n"
        "if os.environ['GROUP_RANK'] == '1':\n"
        "    signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n"
        "    os.killpg(0, signal.SIGUSR1)  # reaches what the program has started, not the agent\n"
        "    import not_on_this_node\n"
        f"subprocess.Popen(['sleep', '{seconds}'])\n"
        f"subprocess.run(['sh', '-c', 'sleep {seconds} &'])  # an orphan\n"
        "time.sleep(100)\n"
    )
    with job(tmp_path, "half", "script=half.py", *QUICK, nproc=1, tiny=False) as run:
        run.until(lambda: bool(run.events("round_started")), "it runs")
        began = time.monotonic()
        verdict = run.wait()
        assert time.monotonic() - began < 40  # two tries; this machine may be busy
        assert (verdict.verdict, verdict.node, verdict.rank) == ("user_error", 1, 1), run.story()
        assert "No module named 'not_on_this_node'" in verdict.reason
        assert "import not_on_this_node" in verdict.last_lines
        assert "runpy" not in verdict.last_lines, "the traceback is the program's"
    left = [p for p in all_processes() if command_of(p) == ["sleep", seconds]]
    assert not left, "what a rank has started ends with it, as under torchrun"


def test_executable_that_says_much_and_fails(tmp_path: Path) -> None:
    script = tmp_path / "loud.sh"
    script.write_text('#!/bin/sh\nyes "$1 on rank $RANK" | head -c 30000000\necho enough\nexit 3\n')
    script.chmod(0o755)
    with job(
        tmp_path, "loud", "script=loud.sh", "script_args='much noise'", *QUICK, nodes="1", nproc=2, tiny=False
    ) as run:
        verdict = run.wait()
        assert (verdict.verdict, verdict.decision, verdict.exit_code) == ("user_error", "stop", 3), run.story()
        assert verdict.last_lines.splitlines()[-1] == "enough"
        assert "much on rank" in verdict.last_lines


def test_library_loses_a_rank_and_its_node_and_the_figures_are_those_seen_from_outside(tmp_path: Path) -> None:
    example = f"script={EXAMPLES}/small_library.py"
    with job(tmp_path, "figures", example, "script_args=--steps=60", *QUICK, nodes="1", nproc=2, tiny=False) as run:
        seen = []
        for number, victim in enumerate((lambda: run.ranks(0)[1], lambda: run.agent(0))):
            run.until_step(14 + 20 * number)
            killed_at = time.time()
            victim().kill()
            run.until(lambda n=number: len(run.events("resumed")) > n, "it goes on")  # type: ignore[misc]
            resumed = run.events("resumed")[number]
            step = max(m["step"] for m in run.metrics() if m["time"] < resumed["time"])
            run.until(lambda r=resumed: run.metrics()[-1]["time"] > r["time"], "it trains again")  # type: ignore[misc]
            trained = next(m["time"] for m in run.metrics() if m["time"] > resumed["time"])
            seen.append((killed_at, trained - killed_at, step - resumed["step"]))
            broken = run.events("round_broken")[number]
            assert broken["time"] - killed_at < 3, "and not when the node's other rank has ended, too"
        assert run.wait().verdict == "done", run.story()
        assert all(e["step"] >= 10 for e in run.events("resumed"))
        assert run.losses()[60] < run.losses()[1] and run.events("checkpoint")[-1]["step"] == 60
        status = RunStatus(run.run)
        status.update()
        for (killed_at, took_s, lost), b in zip(seen, status.breaks, strict=True):
            assert abs(b.time - killed_at) < 3
            assert b.recovered_s == pytest.approx(took_s, abs=3)
            assert b.lost_steps is not None and lost <= b.lost_steps <= lost + 2, "steps under way when it was killed"


def test_plain_program_finds_its_own_checkpoint_and_what_it_prints_is_told_as_its_steps(tmp_path: Path) -> None:
    """It loses a rank, and then a node."""
    example = programs.PLAIN.overrides(60, f"{tmp_path}/own", f"{EXAMPLES}/")
    with job(tmp_path, "said", *example, *QUICK, nodes="1", nproc=2, tiny=False) as run:
        until_said(run, "step 14 ")
        killed_at = time.time()
        run.ranks(0)[1].kill()
        until_said(run, "step 34 ")
        run.agent(0).kill()
        assert run.wait().verdict == "done", run.story()
        programs.PLAIN.check_went_on(run, 60, kills=2)
        (row,) = json.loads(cli(tmp_path, "status", "said", "--json").stdout)
        assert row["step"] == 60 and 0 < row["goodput"] < 1, row
        assert f"step 60 loss {row['loss']:.4f}" in log_of(run)
        status = RunStatus(run.run)
        status.update()
        failure, _ = status.breaks
        assert failure.lost_steps is not None and failure.recovered_s is not None
        assert 3 <= failure.lost_steps <= 10 and 0 < failure.recovered_s < 60
        broken, _ = run.events("round_broken")
        assert 0 <= broken["failed_at"] - killed_at < 3
        goodput = status.goodput
        assert goodput.recover_s > 0 and goodput.useful_s > 0


def test_what_a_program_does_not_tell_is_a_dash(tmp_path: Path) -> None:
    (tmp_path / "mute.py").write_text("import time\nprint('working')\ntime.sleep(6)\n")
    with job(tmp_path, "dash", "script=mute.py", *QUICK, nodes="1", nproc=2, tiny=False) as run:
        until_said(run, "working")
        with (tmp_path / "mute.py").open("a") as script:
            script.write("# edited\n")
        run.ranks(0)[1].kill()
        assert run.wait().verdict == "done", run.story()
        told = cli(tmp_path, "status", "dash").stdout
        assert "SIGKILL: - steps lost, training again after -" in told, told
        assert "\ngoodput " not in told
        assert [e["file"] for e in run.events("code_changed")] == [str(tmp_path / "mute.py")]
        cli(tmp_path, "report", "dash")
        page = (run.run.path / "report.html").read_text()
        assert '"step": "-"' in page and '"goodput": "-"' in page and "of 120" not in page


_SAMPLES = """
import multiprocessing, os, sys, time
import numpy, torch
from fsdp_jobs import job  # which has the fork server import it, and with it NumPy

rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
assert multiprocessing.parent_process() is None and multiprocessing.current_process().name == "MainProcess"
print("draws", torch.randint(1 << 60, ()).item(), numpy.random.randint(1 << 60), flush=True)
time.sleep(1)
if (rank, restart) == ("1", "0"):
    os._exit(3)
if rank == "0" and len(sys.argv) == 1:
    os.execv(sys.executable, [*sys.orig_argv, "again"])
os._exit(0)
"""


def test_ranks_draw_numbers_of_their_own_and_may_leave_as_they_like(tmp_path: Path) -> None:
    (tmp_path / "samples.py").write_text(_SAMPLES)
    with job(tmp_path, "draws", "script=samples.py", *QUICK, nodes="1", nproc=2, tiny=False) as run:
        assert run.wait(60).verdict == "done", run.story()
        said = [log_of(run, rank=rank) for rank in (0, 1)]
        drawn = [words for log in said for words in re.findall(r"^draws (\d+) (\d+)", log, re.MULTILINE)]
        assert len(drawn) == 5, said  # at each of two starts on each of two ranks, and by what rank 0 became
        for column in zip(*drawn, strict=True):
            assert len(set(column)) == 5, drawn


_LEAVES = """
import sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank, one = dist.get_rank(), torch.ones(1)
dist.all_reduce(one)
if rank == 1:
    sys.exit()  # with its process group
try:
    dist.all_reduce(one)
except RuntimeError as e:
    print("its peer has left:", e, flush=True)
"""


def test_a_peer_of_a_rank_that_has_ended_does_not_wait_for_a_timeout(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(_LEAVES)
    with job(tmp_path, "leaves", "script=leaves.py", *QUICK, nodes="1", nproc=2, tiny=False) as run:
        assert run.wait(60).verdict == "done", run.story()
        assert "its peer has left: " in log_of(run), "under torchrun the rank's sockets close when it ends"


_EARLY = """
import os, sys, time
round_ = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if os.environ["RANK"] == "0":
    time.sleep(6 - round_ * 5)
    sys.exit(3 - round_ * 3)
"""


def test_a_node_whose_ranks_have_ended_waits_for_the_others_and_begins_again_with_them(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(_EARLY)
    with job(tmp_path, "early", "script=early.py", "elastic.lease_s=2", nproc=1, tiny=False) as run:
        assert run.wait(60).verdict == "done", run.story()
        assert len(run.events("round_started")) == 2, run.story()
        assert not run.events("process_restarted"), "its agent lives until the attempt is over"


_CARELESS = """
import ctypes, os, signal, sys

rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
rows = open(f"rows-{rank}-{restart}.csv", "w")
rows.write("1,2\\n")
signal.signal(signal.SIGTERM, lambda *_: rows.flush())  # so that something else knows the file, too

ctypes.CDLL(None).printf(b"of a library\\n")
if (rank, restart) == ("1", "0"):
    sys.exit(3)
sys.stdout.close()
"""


def test_files_that_a_program_leaves_open_are_written_as_by_an_interpreter_that_ends(tmp_path: Path) -> None:
    (tmp_path / "careless.py").write_text(_CARELESS)
    with job(tmp_path, "open", "script=careless.py", *QUICK, nodes="1", nproc=2, tiny=False) as run:
        assert run.wait(60).verdict == "done", run.story()
        for end in ("1-0", "0-1", "1-1"):
            assert (tmp_path / f"rows-{end}.csv").read_text() == "1,2\n"
        assert log_of(run, rank=1).count("of a library\n") == 2


def test_the_end_of_a_job_names_the_last_step_that_its_program_printed(tmp_path: Path) -> None:
    (tmp_path / "brief.py").write_text('for i in range(1, 4): print(f"step {i} loss {i}.0")')
    for name in ("one", "two", "three"):
        done = cli(tmp_path, f"name={name}", "nodes=1", "nproc_per_node=1", "elastic.join_window_s=0", "brief.py")
        assert "1.000 -> 3.000 over 3 steps" in done.stdout, done.stdout
