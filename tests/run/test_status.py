"""Many runs at a glance: the same as reading everything, for people, for scripts, and while jobs run."""

from __future__ import annotations

import errno
import itertools
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from fsdp_jobs.cli.follow import progress, summary
from fsdp_jobs.cli.main import main
from fsdp_jobs.config.schema import load_config
from fsdp_jobs.launchers.base import Description
from fsdp_jobs.observe.answers import curves
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.identity import identity_of
from fsdp_jobs.run.state import State
from fsdp_jobs.run.status import Break, RunStatus
from fsdp_jobs.submit import submitted
from fsdp_jobs.submit.overview import Overview, RunSummary, story_of
from tests.jobs import called, environment, hear_ctrl_c, job
from tests.recorded import HOSTILE, add_line, recorded_run
from tests.world import PACED


def status_json(folder: Path, *args: str, **env: str) -> list[dict[str, Any]]:
    done = called(folder, "status", "--json", *args, **env)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def test_scripts_get_what_people_see(tmp_path: Path) -> None:
    assert status_json(tmp_path) == []
    recorded_run(tmp_path / "runs", "one")
    recorded_run(tmp_path / "runs", "two")
    rows = status_json(tmp_path)
    assert [row["run"] for row in rows] == ["one", "two"]
    assert rows[0]["state"] == "done" and rows[0]["step"] == rows[0]["steps"] == 20
    assert rows[0]["loss"] == 3.0 and rows[0]["checkpoint_step"] == 10 and rows[0]["eta_s"] is None
    assert rows[0]["goodput"] == pytest.approx(20 / 30)
    shown = called(tmp_path, "list").stdout.splitlines()
    assert shown[1].split()[:5] == ["one", "done", "0", "2/2", "20/20"] and "67%" in shown[1]
    assert called(tmp_path, "list", "two").stdout == called(tmp_path, "status", "two").stdout != ""


def test_the_cost_of_a_failure_is_counted_or_a_dash() -> None:
    costs = {lost: Break(0.0, "node 1 is gone", 20, lost).lost for lost in (None, 0, 1, 2)}
    assert costs == {None: "- steps", 0: "0 steps", 1: "1 step", 2: "2 steps"}


def test_before_the_first_step_no_goodput_is_known(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "runs", "one")
    run.metrics.write_text("")
    said = called(tmp_path, "status", "one").stdout.splitlines()
    row, story = said[1].split(), next(line for line in said if line.startswith("goodput"))
    assert row[said[0].split().index("goodput")] == story.split()[1] == "-", said


def test_commands_that_are_offered_can_be_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded_run(tmp_path / "my runs", "one")
    summary(run, Overview().look([run])[run])
    offered = capsys.readouterr().out.rpartition("fsdp-jobs resume ")[2].rpartition(" steps=")[0]
    assert called(tmp_path, "status", *shlex.split(offered)).returncode == 0, offered


def test_runs_of_one_name_in_two_folders_are_not_confused(tmp_path: Path) -> None:
    here, there = recorded_run(tmp_path / "here", "one"), recorded_run(tmp_path / "there", "one")
    write_atomic(there.events, there.events.read_text().replace('"verdict": "done"', '"verdict": "user_error"'))
    rows = Overview().look([here, there])
    assert [row.state for row in rows.values()] == ["done", "failed"]


def test_steps_that_stand_still_are_not_told_as_training(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "runs")
    lines = run.events.read_text().splitlines(keepends=True)
    write_atomic(run.events, "".join(line for line in lines if "attempt_ended" not in line))
    for ago_s, said in ((30, "training"), (200, "no step for 3m20s")):
        newest = {"loss": 3.0, "step_s": 1.0, "attempt": 0, "time": time.time() - ago_s}
        add_line(run.metrics, {**newest, "step": 19, "time": newest["time"] - 20})
        add_line(run.metrics, {**newest, "step": 20})
        status = RunStatus(run)
        status.update()
        assert dict(story_of(status, "running"))["now"] == said


def test_the_full_stop_of_an_error_is_not_followed_by_a_colon(tmp_path: Path) -> None:
    status = RunStatus(recorded_run(tmp_path))
    status.breaks = [Break(200.0, "rank 0 on node 0 failed: Could not override 'lr'.", 4, 2)]
    (_, said), *_ = story_of(status, "running")
    assert said == "rank 0 on node 0 failed: Could not override 'lr': 2 steps lost, training again after -"


def test_a_glance_sees_what_reading_everything_sees(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    for step in range(21, 3000):
        took_s = 100.0 if step == 21 else 1.0 + step % 3  # the first step compiles
        speed = {"step_s": took_s, "tokens_per_s": 100.0 / took_s}
        values = {"loss": 1 / step, **speed, "checkpoint_stall_s": 0.0, "attempt": 0}
        add_line(run.metrics, {"step": step, "lr": 1e-3, "grad_norm": 1.0, **values, "time": 200.0 + step})
        if step % 2 == 0:
            add_line(run.events, {"time": 200.0 + step, "event": "checkpoint", "attempt": 0, "step": step})
    add_line(run.events, {"time": 4000.0, "event": "round_broken", "attempt": 0, "why": "?", "step": 1, "committed": 0})
    glanced, read = RunStatus(run), RunStatus(run)
    glanced.glance()
    read.update()
    for status in (glanced, read):
        status.update()
    for key in ("state", "attempt", "nodes", "step", "loss", "committed", "committed_at", "reason", "doing"):
        assert getattr(glanced, key) == getattr(read, key), key
    assert glanced.tokens_per_s == read.tokens_per_s == 50.0 and glanced.step_s == read.step_s == 2.0
    assert glanced.goodput == read.goodput and read.goodput.wall_s == 4000.0 - 100.0


def test_a_new_submission_does_not_have_the_speed_and_nodes_of_the_former(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    add_line(run.metrics, {"step": 20, "tokens_per_s": 100.0, "mfu": 0.4, "attempt": 0, "time": 127.0})
    status, glanced = RunStatus(run), RunStatus(run)
    status.update()
    assert (status.tokens_per_s, status.mfu) == (100.0, 0.4), "that of a run that has ended"
    add_line(run.events, {"time": 200.0, "event": "submitted", "attempt": 0})
    status.update()
    glanced.glance()
    for each in (status, glanced):
        assert (each.tokens_per_s, each.mfu, each.eta_s, each.nodes) == (0.0, None, None, [])


def test_a_short_runs_speed_is_not_that_of_its_first_step(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    run.metrics.write_text("")
    for step, took_s in enumerate((30.0, 2.0, 2.5, 1.5, 2.0), start=1):
        values = {"loss": 1.0, "step_s": took_s, "tokens_per_s": 100 / took_s, "attempt": 0, "time": 120.0 + step}
        add_line(run.metrics, {"step": step, **values})
    status = RunStatus(run)
    status.update()
    assert status.tokens_per_s == 50.0 and status.step_s == 2.0


def test_a_glance_sees_a_line_of_any_length(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    own = {f"mine_{i}": 1.0 for i in range(2000)}
    for step in (21, 22):
        add_line(run.metrics, {"step": step, "loss": 0.5, "attempt": 0, "time": 200.0 + step, **own})
    status = RunStatus(run)
    status.glance()
    assert (status.step, status.loss) == (22, 0.5)


PLACED = {"strategy": "full_shard", "shard_group": 2, "world_size": 2, "nodes": [0, 1], "hosts": ["a", "b"]}


def faulty_run(folder: Path, faults: int) -> RunDir:
    """Rounds of 20 s, each broken 12 s after it began and followed by the next one after 5 s, which trains 2 s later.

    The last round is broken, and nothing has followed.
    """
    run = recorded_run(folder, "faulty")
    run.events.write_text("")
    run.metrics.write_text("")
    add_line(run.events, {"time": 0.0, "event": "submitted"})
    add_line(run.events, {"time": 0.0, "event": "attempt_started", "attempt": 0})
    for number in range(faults):
        began = 17.0 * number
        add_line(run.events, {"time": began, "event": "round_started", "attempt": 0, "round": number, **PLACED})
        for step in range(5):
            add_line(run.metrics, {"step": 5 * number + step, "loss": 1.0, "attempt": 0, "time": began + 2.0 + step})
        broken = {"why": f"fault {number}", "step": 1, "committed": 0}
        add_line(run.events, {"time": began + 12.0, "event": "round_broken", "attempt": 0, "round": number, **broken})
    return run


def test_a_run_whose_round_is_broken_does_not_train(tmp_path: Path) -> None:
    run = faulty_run(tmp_path, 2)
    glanced, read = RunStatus(run), RunStatus(run)
    glanced.glance()
    read.update()
    for status in (glanced, read):
        assert (status.state, status.doing, status.reason) == ("recovering", "waiting for nodes", "fault 1")
    late = {"step": 10, "loss": 1.0, "attempt": 0, "time": 29.5}  # by the clock of another machine
    add_line(run.metrics, late)
    read.update()
    assert read.state == "recovering" and read.breaks[-1].recovered_s is None
    add_line(run.events, {"time": 60.0, "event": "round_started", "attempt": 0, "round": 2, **PLACED})
    add_line(run.metrics, {**late, "time": 62.0})
    read.update()
    assert read.state == "running" and read.breaks[-1].recovered_s == 62.0 - 29.0


def test_every_failure_has_its_own_recovery_time(tmp_path: Path) -> None:
    status = RunStatus(faulty_run(tmp_path, 4))
    status.update()
    assert [b.recovered_s for b in status.breaks] == [7.0, 7.0, 7.0, None]


def test_a_node_that_joins_is_no_failure_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = faulty_run(tmp_path, 2)
    run.events.write_text(run.events.read_text().replace('"fault 0"', '"1 more nodes join", "is_planned": true'))
    summary(run, Overview().look([run])[run])
    assert "failures    1: " in capsys.readouterr().out


def test_failures_of_a_program_without_steps_are_only_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = faulty_run(tmp_path, 2)
    run.metrics.write_text("")
    write_atomic(run.job, json.dumps({**run.read_job(), "steps": None}))
    summary(run, Overview().look([run])[run])
    assert "\n  failures    2\n" in capsys.readouterr().out


def test_what_a_round_waited_for_is_over_when_it_starts(tmp_path: Path) -> None:
    run = faulty_run(tmp_path, 1)
    add_line(run.events, {"time": 20.0, "event": "waiting", "attempt": 0, "why": "0/3 machines have GPUs"})
    status = RunStatus(run)
    status.update()
    assert status.reason == "0/3 machines have GPUs"
    add_line(run.events, {"time": 60.0, "event": "round_started", "attempt": 0, "round": 2, **PLACED})
    status.update()
    assert status.reason == ""


def test_steps_of_a_program_that_counts_from_zero_are_not_repeated(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "runs")
    run.metrics.unlink()
    for step in (0, 10, 20, 0, 10):  # a restart without a checkpoint after 20
        add_line(run.metrics, {"step": step, "time": 101.0, **({} if step else {"resumed": 0})})
    status = RunStatus(run)
    status.update()
    assert status.lost_steps == 10 and status.is_read


@pytest.mark.parametrize("every", [1, 5])
def test_steps_are_repeated_from_zero_although_nothing_says_so(tmp_path: Path, every: int) -> None:
    run = recorded_run(tmp_path / "runs")
    run.metrics.unlink()
    for at, step in enumerate([*range(every, 21, every)] * 2):  # the second round has no checkpoint to begin at
        add_line(run.metrics, {"step": step, "tokens_per_s": 1.0, "time": 101.0 + at})
    status = RunStatus(run)
    status.update()
    assert status.lost_steps == 20


def test_a_run_that_cannot_be_read_just_now_is_not_over_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recorded_run(tmp_path)
    add_line(run.events, {"time": 131.0, "event": "attempt_started", "attempt": 1})
    overview = Overview(lambda _: {})
    assert overview.look([run])[run].state == "starting"
    with monkeypatch.context() as patched:
        patched.setattr(RunDir, "read_job", lambda _: (_ for _ in ()).throw(OSError(errno.ESTALE, "Stale file handle")))
        stale = overview.look([run])[run]
    assert stale.state == "unreadable" and "Stale" in stale.reason and not stale.is_over
    assert overview.look([run])[run].state == "starting"


def test_nobody_waits_for_a_run_that_may_not_be_read_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded_run(tmp_path)
    add_line(run.events, {"time": 131.0, "event": "attempt_started", "attempt": 1})
    refused = PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(run.metrics))
    monkeypatch.setattr(RunStatus, "glance", lambda _: (_ for _ in ()).throw(refused))  # root may read everything
    assert main(["wait", run.name, "--timeout", "5", f"runs_dir={tmp_path}"]) == 1
    assert f"Permission denied: '{run.metrics}'" in capsys.readouterr().out


def test_a_record_that_cannot_be_read_hides_only_its_own_job_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def describe(jobs: list[str]) -> list[Description | None]:
        asked.append(jobs)
        if "torn" in jobs:
            raise ValueError("Input data was truncated")
        return [Description(State.RUNNING)] * len(jobs)

    launcher = SimpleNamespace(cluster_of=lambda _: "here", describe=describe)
    monkeypatch.setattr(submitted, "launcher_of", lambda _: launcher)
    jobs = [f"slurm_fsdp://here/{name}" for name in ("a", "b", "torn", "c", "d", "e", "f", "g")]
    answers = submitted.describe(jobs)
    assert [job for job in jobs if answers[job].state is State.RUNNING] == [job for job in jobs if "torn" not in job]
    assert "truncated" in answers[jobs[2]].message and answers[jobs[2]].state is State.SILENT
    assert len(asked) == 7, "not one by one"


def test_a_name_that_is_used_again_is_another_run(tmp_path: Path) -> None:
    overview = Overview(lambda _: {})
    run = recorded_run(tmp_path)
    write_atomic(run.identity, identity_of(run, load_config(run.config)).to_json())
    assert overview.look([run])[run].failures == 1
    shutil.rmtree(run.path)
    again = recorded_run(tmp_path)
    events = [line for line in again.events.read_text().splitlines(keepends=True) if "round_broken" not in line]
    again.events.write_text("".join(events) + "\n" * 1000)
    write_atomic(again.identity, identity_of(again, load_config(again.config)).to_json())
    assert overview.look([again])[again].failures == 0


def test_a_node_that_joins_is_no_failure(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    joins = {"why": "node 2 joins", "step": 20, "committed": 20, "is_planned": True}
    add_line(run.events, {"time": 129.0, "event": "round_broken", "attempt": 0, **joins})
    assert Overview(lambda _: {}).look([run])[run].failures == 1
    status = RunStatus(run)
    status.update()
    assert [b.why for b in status.breaks] == [HOSTILE, "node 2 joins"]
    assert len(curves(run)["faults"]) == 1


def test_a_value_that_a_program_calls_steps_is_not_the_runs(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    add_line(run.metrics, {"step": 21, "loss": 1.0, "tokens_per_s": 1.0, "steps": 7, "resumed": 3, "time": 127.0})
    status = RunStatus(run)
    status.update()
    assert status.steps == 20 and not status.is_read


def test_repeated_steps_are_those_since_the_checkpoint(tmp_path: Path) -> None:
    run = faulty_run(tmp_path, 1)  # with steps up to 4
    for number, (resumed, done) in enumerate(((2, 3), (2, 10)), 1):
        began = 17.0 * number
        add_line(run.events, {"time": began, "event": "round_started", "attempt": 0, "round": number, **PLACED})
        loaded = {"step": resumed, "samples": 0, "world_size": 2}
        add_line(run.events, {"time": began + 1, "event": "resumed", "attempt": 0, "round": number, **loaded})
        line = {"step": done, "tokens_per_s": 1.0, "attempt": 0, "time": began + 2}
        add_line(run.metrics, line)  # of every few steps
    status = RunStatus(run)
    status.update()
    assert status.lost_steps == 1 + 2


def test_steps_that_only_a_program_knows_are_a_dash(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "runs", "own")
    write_atomic(run.job, json.dumps({**run.read_job(), "steps": None}))
    lines = run.events.read_text().splitlines(keepends=True)
    run.events.write_text("".join(lines[:3]))  # until the first round has started
    run.metrics.write_text("")
    status = RunStatus(run)
    status.update()
    assert status.state == "running" and not status.has_steps and status.eta_s is None, "it need not report steps"
    run.events.write_text("".join(lines))
    (row,) = status_json(tmp_path, "own")
    assert row["steps"] is None and row["step"] is None and row["eta_s"] is None
    write_atomic(run.job, json.dumps({**run.read_job(), "steps": 20}))
    waiting = RunStatus(run)
    run.events.write_text("".join(lines[:3]))
    waiting.update()
    assert waiting.state == "starting" and waiting.has_steps


def test_an_unknown_handle_is_said(tmp_path: Path) -> None:
    done = called(tmp_path, "status", "local_fsdp://fsdp_jobs/nobody")
    assert done.returncode == 2 and "is not the newest submission" in done.stderr


def test_a_launcher_that_does_not_answer_does_not_hide_the_others(tmp_path: Path) -> None:
    for name, handle in (("here", "local_fsdp://fsdp_jobs/gone"), ("there", "slurm_fsdp://fsdp_jobs/1")):
        run = recorded_run(tmp_path / "runs", name)
        lines = run.events.read_text().splitlines(keepends=True)
        run.events.write_text("".join(line for line in lines if "attempt_ended" not in line))
        write_atomic(run.job, json.dumps({**run.read_job(), "handle": handle}))
    here, there = status_json(tmp_path, PATH=str(Path(sys.executable).parent))  # no squeue there
    assert here["state"] == "failed" and "has no such job any more" in here["reason"]
    assert there["state"] == "running" and "does not answer" in there["reason"] and there["step"] == 20


def test_who_follows_a_job_is_told_once_that_its_launcher_does_not_answer_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    away = Description(State.SILENT, "its launcher does not answer: no route to host")
    runs = Description(State.RUNNING)
    states = itertools.chain([runs, away, away, away, runs], itertools.repeat(away))
    monkeypatch.setattr(submitted, "job_of", lambda _: next(states))
    monkeypatch.setattr(submitted, "_ASK_EVERY_S", 0)
    ask = submitted.answers_of(RunDir(tmp_path / "far"))
    told: list[bool] = []
    for _ in range(10):
        assert ask(["far"])["far"] in (runs, away)
        time.sleep(0.05)  # for its thread
        told.append("far: its launcher does not answer: no route to host" in capsys.readouterr().err)
    assert told.count(True) == 2, told


def test_logs_of_a_run_that_has_written_none_say_what_it_does(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "runs", "quiet")
    run.rank_log(0, 0, 0).write_text("")  # the trainer's ranks print nothing
    done = called(tmp_path, "logs", "quiet")
    assert done.returncode == 0 and not done.stdout
    assert "nothing is printed there; quiet is done: " in done.stderr


def watch(folder: Path, *args: str, **env: str) -> tuple[subprocess.Popen[bytes], int]:
    """`status --watch` in a terminal of its own; and the terminal."""
    terminal, inside = pty.openpty()
    argv = [sys.executable, "-m", "fsdp_jobs", "status", "--watch", *args]
    in_terminal = {"stdin": inside, "stdout": inside, "stderr": inside, "preexec_fn": hear_ctrl_c}
    watching = subprocess.Popen(argv, cwd=folder, env=environment(folder, **env), **in_terminal)  # type: ignore[call-overload]
    os.close(inside)
    return watching, terminal


def read_all(terminal: int) -> str:
    """What a terminal was shown until whoever wrote there left."""
    shown = b""
    while True:
        try:
            chunk = os.read(terminal, 1 << 16)
        except OSError:
            chunk = b""
        if not chunk:
            os.close(terminal)
            return shown.decode()
        shown += chunk


@pytest.mark.integration
def test_a_job_is_watched_to_its_end(tmp_path: Path) -> None:
    recorded_run(tmp_path / "runs", "old")
    with job(tmp_path, "live", "steps=100000", *PACED, nodes="1", nproc=1) as live:
        live.until_step(3)
        (row,) = status_json(tmp_path, live.run.read_job()["handle"])
        assert row["run"] == "live" and row["state"] == "running" and row["nodes_asked"] == "1" and row["eta_s"] > 0
        assert 3 <= row["step"] <= row["steps"] == 100_000 and 0 < row["goodput"] < 1
        left, terminal = watch(tmp_path, "live")
        shown = ""
        while "running" not in shown:
            shown += os.read(terminal, 1 << 16).decode()
        left.send_signal(signal.SIGINT)
        shown = read_all(terminal)  # nobody ends who cannot say the last of it
        assert left.wait(30) == 0, shown
        dumb, of_dumb = watch(tmp_path, TERM="dumb")
        watching, terminal = watch(tmp_path)
        now = live.step()
        live.until_step(now + 20)
        assert called(tmp_path, "cancel", "live").returncode == 0
        shown = read_all(terminal)
        assert watching.wait(30) == 0, shown
        lines = read_all(of_dumb)  # of a terminal in which nothing can be redrawn
        assert dumb.wait(30) == 0 and "\x1b" not in lines and lines.count("live  running  step") > 0, lines
    steps = [int(step.replace(",", "")) for step in re.findall(r"step ([\d,]+)/100,000", shown)]
    assert len(steps) > 1 and steps == sorted(steps) and steps[-1] >= now + 20
    assert "stopped" in shown
    assert "old" not in shown
    assert "all runs have ended" in called(tmp_path, "status", "--watch").stdout


def test_a_step_whose_line_a_failure_cut_off_counts_as_lost_everywhere(tmp_path: Path) -> None:
    run = faulty_run(tmp_path, 1)  # with steps up to 4
    broken = {"why": "node 1 is gone", "step": 5, "committed": 2}
    add_line(run.events, {"time": 17.0, "event": "round_broken", "attempt": 0, **broken})
    add_line(run.events, {"time": 18.0, "event": "round_started", "attempt": 0, "round": 1, **PLACED})
    loaded = {"step": 2, "samples": 0, "world_size": 2}
    add_line(run.events, {"time": 19.0, "event": "resumed", "attempt": 0, "round": 1, **loaded})
    for step in range(3, 8):
        add_line(run.metrics, {"step": step, "tokens_per_s": 1.0, "attempt": 0, "time": 20.0 + step})
    status = RunStatus(run)
    status.update()
    assert status.breaks[-1].lost_steps == status.lost_steps == 3


@pytest.mark.parametrize("columns", [60, 100])
def test_a_narrow_terminal_shortens_the_bar_and_not_the_time_left(columns: int) -> None:
    row = RunSummary("llama-first", "", "running", step=12345, steps=100000, eta_s=24300.0)
    terminal = Console(width=columns, force_terminal=True, color_system=None)
    with terminal.capture() as drawn:
        terminal.print(progress(row))
    assert drawn.get().split("step ")[1].strip() == "12,345/100,000  eta 6h45m"
