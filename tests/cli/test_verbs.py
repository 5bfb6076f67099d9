"""Verbs as scripts and users of other tools use them."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from fsdp_jobs.cli import follow, jobs
from fsdp_jobs.cli.follow import Follower, progress
from fsdp_jobs.cli.main import VERBS, main
from fsdp_jobs.config import terminal
from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.schema import dump_config
from fsdp_jobs.config.terminal import say
from fsdp_jobs.launchers.base import Description
from fsdp_jobs.run.directory import RunDir, runs_in
from fsdp_jobs.run.files import write_atomic, write_json
from fsdp_jobs.run.identity import identity_of
from fsdp_jobs.run.state import State
from fsdp_jobs.run.verdict import KILLED
from fsdp_jobs.submit import submitted
from fsdp_jobs.submit.overview import RunSummary
from tests.jobs import ROOT, called, cli, environment
from tests.nfs import away
from tests.recorded import recorded_run

_PROGRAM = """
import sys, time
print("arguments", sys.argv[1:], flush=True)
time.sleep(float(sys.argv[2]))
sys.exit(int(sys.argv[1]))
"""
_HERE = ("nodes=1", "nproc_per_node=1", "attach=false", "elastic.join_window_s=0", "elastic.stop_grace_s=2")


def _json(folder: Path, *args: str) -> Any:
    done = called(folder, *args, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["run", "train.py"], "fsdp-jobs submit"),
        (["stop", "mine"], "fsdp-jobs cancel"),
        (["--nnodes=2", "script=train.py"], "-> nodes=2"),
        (["--nproc-per-node", "4", "train.py"], "-> nproc_per_node="),
        (["--rdzv-backend=c10d", "train.py"], "leave it out: the launcher sets it"),
        (["--config_file", "a.yaml", "train.py"], "-> fsdp-jobs import-accelerate FILE, which"),
        (["gpus=4"], "-> nproc_per_node=4"),
        (["time=60"], "-> cluster.time=60"),
        (["precision=bf16"], "-> fsdp.param_dtype=bf16"),
        (["hardware=v100"], "with its own hardware.memory_gib="),
        (["model=gpt2"], "model=hf model.name_or_path=NAME"),
        (["elastic.max_restarts=3"], "-> elastic.max_failures_without_progress=3"),
        (["train.py", "--lr", "1", "nodes=4"], "nodes=4: follows train.py"),
        (["-m", "pkg.train", "--lr", "1", "nodes=4"], "put it in front: nodes=4 -m pkg.train --lr 1; if"),
        (["seed=1", "train.py", "model=b"], "if the program reads it: seed=1 script=train.py script_args=model=b\n"),
        (["--nnodes", "2", "-m", "pkg.train", "--lr", "1"], "1 problem.\n  1. --nnodes"),
        (["resume", "mine", "-m", "pkg.train"], "-> module=..."),
        (["logs"], "there are no runs under runs/"),
        (["wait"], "fsdp-jobs wait"),
        (["wait", "nobody"], "there is no such run"),
    ],
)
def test_habits_of_other_tools_get_the_key_that_is_meant(tmp_path: Path, args: list[str], said: str) -> None:
    (tmp_path / "train.py").write_text(_PROGRAM)
    done = called(tmp_path, *args)
    assert done.returncode == 2 and said in done.stderr and "Nothing was done: " in done.stderr, done.stderr
    assert not (tmp_path / "runs").exists()


def _without_an_end(folder: Path, name: str) -> RunDir:
    """Record a run up to its end, whose launcher knows it as NAME-1."""
    run = recorded_run(folder, name)
    *begun, _ = run.events.read_text().splitlines(keepends=True)
    run.events.write_text("".join(begun))
    write_json(run.job, run.read_job() | {"handle": f"local_fsdp://here/{name}-1"})
    return run


def test_a_job_that_another_command_kills_is_followed_until_that_has_recorded_it(tmp_path: Path) -> None:
    run = _without_an_end(tmp_path / "runs", "killed")
    Timer(0.5, KILLED.close, (run, 0)).start()
    row = Follower(run).follow(lambda handles: dict.fromkeys(handles, Description(State.FAILED)))
    assert (row.state, row.reason) == ("stopped", KILLED.reason)


def test_whoever_follows_a_job_reads_its_end_as_slurm_told_it_before_it_forgot_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _without_an_end(tmp_path / "runs", "lost")
    answers = itertools.chain(
        [Description(State.FAILED, "7 is NODE_FAIL")], itertools.repeat(Description(State.UNKNOWN))
    )
    monkeypatch.setattr(submitted, "_described", lambda _, handles: dict.fromkeys(handles, next(answers)))
    monkeypatch.setattr(submitted, "_ASK_EVERY_S", 0)
    monkeypatch.setattr(follow, "VERDICT_S", 0.5)
    row = Follower(run).follow(submitted.answers_of(run))
    assert (row.state, row.reason) == ("failed", "7 is NODE_FAIL")


def test_whoever_follows_a_job_is_not_left_by_storage_that_fails_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _without_an_end(tmp_path / "runs", "killed")
    running = Description(State.RUNNING)
    monkeypatch.setattr(submitted, "_described", lambda _, handles: dict.fromkeys(handles, running))
    monkeypatch.setattr(submitted, "_ASK_EVERY_S", 0)

    def fail_for_a_moment() -> None:
        with away(run.path):
            time.sleep(1)
        KILLED.close(run, 0)

    ask = submitted.answers_of(run)
    Timer(0.5, fail_for_a_moment).start()
    assert Follower(run).follow(ask).reason == KILLED.reason


@pytest.mark.parametrize(("args", "code"), [(["wait"], 75), (["status", "--watch"], 0)])
def test_a_job_that_another_command_kills_is_waited_for_until_that_has_recorded_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    code: int,
) -> None:
    run = _without_an_end(tmp_path, "killed")
    gone = Description(State.FAILED)
    monkeypatch.setattr(submitted, "_described", lambda _, handles: dict.fromkeys(handles, gone))
    Timer(0.5, KILLED.close, (run, 0)).start()
    assert main([*args, "killed", f"runs_dir={tmp_path}"]) == code
    shown = capsys.readouterr().out
    assert "stopped" in shown and "failed" not in shown


@pytest.mark.integration
def test_scripts_submit_wait_and_are_told_what_became_of_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_PROGRAM)
    good = json.loads(called(tmp_path, *_HERE, "name=good", "--json", "train.py", "0", "1", "--lr", "3e-4").stdout)
    bad = called(tmp_path, *_HERE, "name=bad", "--json", "train.py", "3", "1")
    assert bad.returncode == 0, bad.stderr
    long = called(tmp_path, *_HERE, "--json", "train.py", "0", "600")
    (last,) = [run for run in runs_in(str(tmp_path / "runs")) if run.name not in ("good", "bad")]
    assert last.name.startswith("train-"), "a script's run is called after it"
    assert json.loads(long.stdout)["run"] == last.name and json.loads(bad.stdout)["handle"].startswith("local_fsdp://")
    assert called(tmp_path, "wait", last.name, "--timeout", "0.1").returncode == 124
    done = called(tmp_path, "wait", "good")
    assert (done.returncode, done.stdout) == (0, "good done: the program has ended\n")
    done = called(tmp_path, "wait", "good", "bad")
    assert done.returncode == 1 and "bad failed: " in done.stdout
    waiting = subprocess.Popen(
        [sys.executable, "-m", "fsdp_jobs", "wait", last.name], cwd=tmp_path, env=environment(tmp_path)
    )
    cancelled = _json(tmp_path, "cancel", last.name)
    assert (cancelled["run"], cancelled["state"], cancelled["version"]) == (last.name, "stopped", 1)
    assert waiting.wait(60) == 75
    lines = [json.loads(line) for line in called(tmp_path, "logs", "good", "--json").stdout.splitlines()]
    assert {"version": 1, "attempt": 0, "node": 0, "rank": 0, "line": "arguments ['0', '1', '--lr', '3e-4']"} in lines
    assert [row["run"] for row in _json(tmp_path, "status", "--state", "failed")] == ["bad"]
    assert [row["run"] for row in _json(tmp_path, "status", "--last", "1")] == [last.name]
    assert {row["run"] for row in _json(tmp_path, "status", "g*", "b*")} == {"good", "bad"}
    again = called(tmp_path, "resume", "good", "elastic.exclude_after=4")
    assert again.returncode == 0 and "good is done" not in again.stdout, "it was asked for a change"
    assert called(tmp_path, "wait", "good").returncode == 0
    again = called(tmp_path, "resume", "good")
    assert "good is done: the program has ended; its script is started once more" in again.stdout, again.stderr
    assert called(tmp_path, "wait", "good").returncode == 0
    own = tmp_path / "own" / "experiment" / "patient.yaml"
    write_atomic(own, "# @package _global_\nelastic:\n  exclude_after: 9\n")
    again = called(tmp_path, "resume", "good", "--config-dir", "own", "experiment=patient", "dry_run=true")
    assert again.returncode == 0 and "dry run" in again.stdout, again.stderr
    assert "keeps its own checkpoints" in called(tmp_path, "export", "good").stderr
    assert "the newest run, good" in called(tmp_path, "logs").stderr
    (report,) = _json(tmp_path, "report", "good")["files"]
    assert Path(tmp_path, report).exists()
    assert good["directory"] == "runs/good" and good["version"] == 1


def test_a_resume_that_is_not_allowed_or_a_dry_run_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, replaced = recorded_run(tmp_path / "runs", "shared"), list[str]()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs, "another_runs", lambda _: "")
    monkeypatch.setattr(jobs, "replace_lost", lambda handle: replaced.append(handle) or "a node is replaced")
    for dry in ("dry_run=true", "dry_run=True"):
        assert main(["resume", "shared", dry]) == 2 and not replaced, "its overrides cannot be read"
    capsys.readouterr()
    assert main(["resume", "shared"]) == 2 and not replaced
    refused = " ".join(capsys.readouterr().err.split())
    assert "no step is left to do -> fsdp-jobs resume shared steps=40" in refused
    assert main(["resume", "shared", "steps=40"]) == 0 and len(replaced) == 1
    write_atomic(run.identity, replace(identity_of(run, compose_job([])), uid=4242, user="ada").to_json())
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert main(["resume", "shared"]) == 2 and len(replaced) == 1
    assert "belongs to ada" in capsys.readouterr().err


@pytest.mark.parametrize("args", [*([verb, "--help"] for verb in VERBS), ["help", "cancel"], ["help"]], ids=" ".join)
def test_every_verb_shows_its_arguments(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(args)
    except SystemExit as e:
        code = e.code
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert args == ["help"] or f"fsdp-jobs {args[args[0] == 'help']}" in shown.out or "\nverbs " in shown.out


@pytest.mark.parametrize("columns", ["40", "60"])
@pytest.mark.parametrize(("verb", "word"), [("--help", "fsdp-jobs [key=value ...] train.py --lr"), ("plan", "MiB")])
def test_no_word_is_cut_in_a_narrow_terminal(columns: str, verb: str, word: str) -> None:
    command = [sys.executable, "-m", "fsdp_jobs", verb]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "COLUMNS": columns})
    assert shown.returncode == 0 and word in shown.stdout and "…" not in shown.stdout


@pytest.mark.parametrize("flag", ["--help", "--info", "--cfg=job", "--version"])
def test_what_is_printed_ends_when_its_reader_has_read_enough(flag: str) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "fsdp_jobs", flag]
    shown = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(write)
    assert shown.returncode == 0 and not shown.stderr


@pytest.mark.parametrize("args", [["--version"], ["plan"], ["--cfg", "job"]])
def test_a_full_disk_behind_the_output_is_said(tmp_path: Path, args: list[str]) -> None:
    command = [sys.executable, "-m", "fsdp_jobs", *args]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment(tmp_path), timeout=60
        )
    said = "the output cannot be written: No space left on device; what is submitted continues\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_what_nobody_can_read_is_no_error(tmp_path: Path) -> None:
    for verb in ("schema", "dry_run=true"):
        command = ["sh", "-c", f"exec {sys.executable} -m fsdp_jobs {verb} >&-"]
        done = subprocess.run(command, stderr=subprocess.PIPE, cwd=tmp_path, env=environment(tmp_path), timeout=60)
        assert (done.returncode, done.stderr) == (0, b"")


def test_a_version_is_told() -> None:
    done = subprocess.run([sys.executable, "-m", "fsdp_jobs", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("fsdp_jobs 0.") and done.returncode == 0


def test_a_command_for_scripts_moves_only_its_own_text_to_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--json", f"runs_dir={tmp_path}"]) == 0
    say("the next command's")
    assert capsys.readouterr().out.endswith("the next command's\n")


def test_status_takes_conditions_on_what_was_configured_and_names_other_owners(tmp_path: Path) -> None:
    for name, rate in (("slow", "1e-4"), ("fast", "3e-3")):
        run = recorded_run(tmp_path / "runs", name)
        write_atomic(run.config, dump_config(compose_job([f"optim.lr={rate}", "nodes=2", "fsdp=hybrid_shard"])))
    for words, found in (
        (["optim.lr>1e-3"], {"fast"}),
        (["optim.lr<=0.0001"], {"slow"}),
        (["fsdp.strategy=hybrid_shard", "s*"], {"slow"}),
        (["nodes=2", "optim.lr!=3e-3"], {"slow"}),
        (["optim.lrr>0"], set[str]()),
        (["optim.lrr!=0"], set[str]()),
        (["--last", "1"], {"fast"}),
    ):
        assert {row["run"] for row in _json(tmp_path, "status", *words)} == found, words
    unknown = called(tmp_path, "list", "optim.lrr=0", "nodes=2")
    assert unknown.stdout == "no runs of that kind under runs/\n" and unknown.returncode == 0
    assert unknown.stderr == "no run here is configured with optim.lrr; did you mean optim.lr?\n"
    assert {row["run"] for row in _json(tmp_path, "list", "--last", "1", "--state", "done")} == {"fast"}
    for none in ("0", "-1", "all"):
        refused = called(tmp_path, "status", "--last", none)
        assert refused.returncode == 2 and "not a number of at least 1" in refused.stderr, refused
    theirs = RunDir(tmp_path / "runs" / "slow")
    of_me = identity_of(theirs, compose_job([]))
    assert "owner" not in called(tmp_path, "status").stdout
    write_atomic(theirs.identity, replace(of_me, uid=4242, user="ada").to_json())
    lines = called(tmp_path, "status").stdout.splitlines()
    assert lines[0].split()[:2] == ["owner", "run"] and ["ada", "slow"] in [line.split()[:2] for line in lines]
    assert {row["run"]: row["owner"] for row in _json(tmp_path, "status")} == {"slow": "ada", "fast": None}


def test_a_rank_that_never_began_is_not_a_silent_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded_run(tmp_path)
    write_atomic(run.rank_log(0, 0, 1), "")
    for rank, said in (("1", "nothing is printed there"), ("99", "no such rank has begun")):
        assert main(["logs", run.name, "--rank", rank, f"runs_dir={tmp_path}"]) == 0
        assert said in capsys.readouterr().err


def test_of_a_progress_bar_logs_shows_the_newest_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded_run(tmp_path)
    write_atomic(run.rank_log(0, 0, 1), "\rsteps: 1/9\rsteps: 2/9\x1b[A\n\r\x1b[32msteps: 3/9\x1b[0m\x1b[K\n")
    assert main(["logs", run.name, "--rank", "1", f"runs_dir={tmp_path}"]) == 0
    told = "[node-0/rank-1] steps: 2/9\n[node-0/rank-1] \x1b[32msteps: 3/9\x1b[0m\n"
    assert capsys.readouterr().out == told, "no cursor that moves over the lines before"


def test_a_report_of_a_run_that_one_may_only_read_is_written_elsewhere(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "runs")
    (tmp_path / "runs").chmod(0o755)
    run.path.chmod(0o555)
    own = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    refused = cli(tmp_path, "report", run.name, under=own)
    assert refused.returncode == 2
    assert "report.html: Permission denied\n      -> only its owner may do that; report" in refused.stderr
    assert cli(tmp_path, "report", run.name, "--out", "mine", under=own).stdout == "mine/report.html\n"
    assert (tmp_path / "mine" / "report.html").stat().st_size > 10_000


def test_colours_are_those_of_the_stream_that_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of `submit --json 2> FILE` in a terminal."""
    screen, file = io.StringIO(), io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    console = type(terminal.console)()
    console.write_to(stderr=True)
    console.print("submitted", style="red")
    console.write_to(stderr=False)
    console.print("submitted", style="red")
    assert file.getvalue() == "submitted\n"
    assert screen.getvalue() == "\x1b[31msubmitted\x1b[0m\n"


def test_hydras_flags_may_stand_between_overrides_and_a_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fsdp-jobs"])
    assert main(["nodes=2", "--cfg", "job", "seed=3", "train.py", "--lr", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"nodes: 2", "seed: 3", "script: train.py", "script_args: --lr 1"} <= {*lines}


@pytest.mark.parametrize("verb", ["plan", "resume", "doctor", "rehearse"])
def test_the_help_of_a_verb_that_composes_a_job_says_that_it_takes_overrides(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([verb, "-h"])
    shown = capsys.readouterr().out
    assert f"usage: fsdp-jobs {verb}" in shown and "key=value" in shown


def test_a_full_bar_differs_from_an_empty_one_in_16_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "screen")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    console = type(terminal.console)()
    for step in (0, 4):
        console.print(progress(RunSummary("first", "", "running", step=step, steps=4)))
    empty, full = (line[: line.rindex("\u2501")] for line in screen.getvalue().splitlines())
    assert empty != full
