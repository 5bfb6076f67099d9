"""Sweeps without jobs: names, matching, the list among several writers, bad input, the report."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hydra import compose as hydra_compose
from hydra._internal.config_loader_impl import ConfigLoaderImpl

from fsdp_jobs.cli.main import main
from fsdp_jobs.config.hydra import compose_job, compose_jobs
from fsdp_jobs.config.schema import dump_config
from fsdp_jobs.launchers import queue
from fsdp_jobs.launchers.local import LocalLauncher
from fsdp_jobs.launchers.local_supervisor import LocalRequest
from fsdp_jobs.launchers.supervisor import staged
from fsdp_jobs.observe.report import write_page
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.verdict import Verdict
from fsdp_jobs.sweeps import jobs as sweeps_jobs
from fsdp_jobs.sweeps.identity import canonical, name_for
from fsdp_jobs.sweeps.jobs import last_value
from fsdp_jobs.sweeps.table import Row, Sweep, sweeps_in
from tests.jobs import called, environment
from tests.observe.browser import Watched, browser  # noqa: F401
from tests.observe.test_report import _Page
from tests.recorded import HOSTILE, add_line, of_sweep, recorded_run
from tests.world import TINY

SMALL = (*TINY, "nodes=1", "nproc_per_node=1")


def test_a_job_is_the_same_in_every_spelling_and_order(tmp_path: Path) -> None:
    sweep = Sweep("lr", str(tmp_path))
    first = sweep.rows_for([["optim.lr=1e-4", "fsdp=full_shard"], ["optim.lr=1", "fsdp=full_shard"]])
    again = sweep.rows_for([["fsdp=full_shard", "optim.lr=0.0001"], ["optim.lr=1.0", "fsdp='full_shard'"]])
    assert [row.run for row in again] == [row.run for row in first] == ["lr-000", "lr-001"]
    (new,) = sweep.rows_for([["optim.lr=1e-4", "fsdp=no_shard"]])
    assert new.run == "lr-002" and len(sweep.jobs) == 3
    assert canonical("seed=1") != canonical("seed=true") and canonical("+a=[1, 2]") == canonical("a=[1,2]")


def test_a_sweep_without_a_name_has_one_that_more_values_do_not_change() -> None:
    name = name_for(["optim.lr", "fsdp"], ["nodes=2", "optim.weight_decay=1e-1"])
    assert name == name_for(["optim.lr", "fsdp"], ["optim.weight_decay=0.1", "nodes=2"])
    assert name.startswith("lr-fsdp-")
    others = [(["optim.lr"], ["nodes=2"]), (["optim.lr", "fsdp"], ["nodes=4", "optim.weight_decay=1e-1"])]
    assert len({name, *(name_for(swept, fixed) for swept, fixed in others)}) == 3


_WRITER = """
import json, sys, time
from pathlib import Path
from fsdp_jobs.sweeps.table import Sweep, locked, sweeps_in
for number in range(8):
    with locked(Path("sweeps/many")):
        sweep = sweeps_in("runs").get("many", Sweep("many", "runs"))
        rows = sweep.rows_for([[f"seed={number}"], [f"seed={1000 + 10 * int(sys.argv[1]) + number}"]])
        time.sleep(0.01)
        for row in rows:
            run = sweep.run_of(row)
            run.path.mkdir(parents=True, exist_ok=True)
            run.job.write_text(json.dumps({"sweep": sweep.record(row)}))
"""


def test_several_writers_neither_lose_a_row_nor_write_one_twice(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _WRITER]
    writers = [subprocess.Popen([*command, str(i)], cwd=tmp_path, env=environment(tmp_path)) for i in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    rows = sweeps_in(str(tmp_path / "runs"))["many"].jobs
    assert not (tmp_path / "sweeps").exists()
    assert [row.run for row in rows] == [f"many-{i:03d}" for i in range(8 + 3 * 8)]
    assert len({row.overrides[0] for row in rows}) == len(rows)


def test_composing_many_is_composing_each() -> None:
    jobs = [
        ["fsdp=no_shard", "optim.lr=3e-4", "model=custom", "model._target_=a.b", "model.kwargs={width: 3}"],
        ["nodes=2:4", "model.wrap_classes=[A, B]", "name='a b'"],
        ["experiment=llama3_8b_pretrain", "cluster=slurm", "++optim.lr=3e-4"],
    ]
    assert compose_jobs(jobs) == [compose_job(job) for job in jobs]


def test_a_sweep_takes_keys_of_the_users_own(tmp_path: Path) -> None:
    custom = ("model=custom", "model._target_=tests.models.tiny", "fsdp.wrap=size", "data.seq_len=16")
    whole, single = compose_jobs([[*custom, "model.kwargs={vocab: 128}"], [*custom, "model.kwargs.vocab=128"]])
    assert whole == single
    shown = called(tmp_path, "--multirun", "dry_run=true", *custom, "model.kwargs.vocab=128", "steps=2,3")
    assert shown.returncode == 0 and "steps=3" in shown.stdout, shown.stdout + shown.stderr


def test_commas_in_a_scripts_arguments_make_no_jobs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('here')")
    given = ("dry_run=true", "seed=1,2", "notify.command=echo a,b", "train.py", "--tags", "a,b", "it's")
    shown = called(tmp_path, "--multirun", *given)
    assert shown.returncode == 0 and shown.stdout.count("  submit  ") == 2, shown.stdout + shown.stderr


def test_the_last_value_of_a_key_is_found_however_far_back(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert last_value(metrics, "loss") is None
    lines = [{"step": i, "loss": i / 10, **({"val": 7} if i == 3 else {})} for i in range(4000)]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4000, "lo')
    assert (last_value(metrics, "loss"), last_value(metrics, "val"), last_value(metrics, "no")) == (399.9, 7.0, None)


class _Started(LocalLauncher):
    """Stands in for the local launcher: jobs are alive once they were started."""

    def __init__(self, alive: Sequence[str] = ()):
        self.alive = set(alive)

    def is_alive(self, run: RunDir) -> bool:
        return run.name in self.alive

    def start(self, run: RunDir) -> None:
        if run.name == "broken":
            raise OSError("no such image")
        self.alive.add(run.name)


def test_a_queued_job_is_started_or_withdrawn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "start_detached", lambda *_: None)
    waiting = queue.Queue(tmp_path / "sweeps" / "s")
    names = ("a", "b", "broken", "killed", "gone")
    runs = {name: RunDir(tmp_path / "runs" / name) for name in names}
    jobs = [queue.QueuedJob("local_fsdp", str(run.path), f"{name}-1") for name, run in runs.items()]
    waiting.add(jobs, parallelism=9)
    assert waiting.why_waiting() is None, "no process would start them"
    for name, run in runs.items():
        LocalLauncher().stage(LocalRequest(str(run.path), ["0"], {}, [], [], restart_nodes=True))
        run.job.write_text(json.dumps({"handle": f"local_fsdp://fsdp_jobs/{name}-1", "first_attempt": 0}))
    assert not queue.withdraw(runs["gone"], "gone-0") and queue.withdraw(runs["gone"], "gone-1")
    assert not queue.withdraw(runs["gone"], "gone-1")

    launcher = _Started(alive=["killed"])  # an earlier queue was killed right after it started that one
    monkeypatch.setattr(queue, "_launcher", lambda _: launcher)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    queue.serve(waiting.folder)
    gpus = {name: staged(run)["gpus"] for name, run in runs.items()}
    assert gpus == {"a": ["3"], "b": ["5"], "broken": ["3"], "killed": ["0"], "gone": ["0"]}
    assert launcher.alive == {"killed", "a", "b"} and not any(queue.queue_of(job.run, job.app_id) for job in jobs)
    verdict = Verdict.read(runs["broken"], 0)
    assert verdict is not None and verdict.reason == "could not be started: no such image"


def test_a_queue_outlives_an_error_of_its_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "start_detached", lambda *_: None)
    waiting, run = queue.Queue(tmp_path / "sweeps" / "s"), RunDir(tmp_path / "runs" / "a")
    waiting.add([queue.QueuedJob("local_fsdp", str(run.path), "a-1")], parallelism=1)
    LocalLauncher().stage(LocalRequest(str(run.path), [], {}, [], [], restart_nodes=True))
    launcher, content = _Started(), waiting.read()
    monkeypatch.setattr(queue, "_launcher", lambda _: launcher)
    answers = iter([OSError(errno.EROFS, "Read-only file system"), content, content])
    monkeypatch.setattr(queue.Queue, "read", mock.Mock(side_effect=answers))
    queue.serve(waiting.folder)
    assert launcher.alive == {"a"}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["optim.lr=1e-4,-1", "fsdp=full_shard,fulll_shard", "nodes=0,1"], "3 problems"),
        (["optim.lr=1e-4,fast"], "is not a number"),
        (["optim.lrr=1,2"], "did you mean optim.lr?"),
        (["name=a,b"], "applies to the whole sweep"),
        (["name=a/b", "seed=1,2"], "not a valid run name"),
        (["name=a", "sweep.name=b", "seed=1,2"], "one of the two"),
        (["seed=1,2", "hydra/launcher=basic"], "leave it out"),
        (["seed=1,2", "hydra.sweep.dir=here"], "hydra.sweep.dir=here: has no effect here\n      -> sweep.dir=here"),
        (["seed=1,2", "hydra.job.chdir=true"], "leave it out"),
        (["seed=1,2", "sweep.direction=up"], "allowed: minimize, maximize"),
        (["optim.lr=interval(0.1, 1)"], "optim.lr=interval(0.1, 1): has no values for a grid"),
        (["seed=1,2", "nodes=range(4,1)"], "nodes=range(4,1): has no values for a grid"),
        (["seed=1,2", "hydra.sweeper.max_batch_size=0"], "max_batch_size=0: is not a number of jobs"),
        (["optim.lr=interval(0.1, 1)", "hydra/sweeper=optuna"], "sweep.wait=true"),
        (["seed=1,2", "cluster=kubernetes", "sweep.parallelism=2"], "cluster.queue=NAME"),
    ],
)
def test_a_bad_sweep_is_said_whole_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], overrides: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--multirun", *SMALL, *overrides]) == 2
    assert said in (shown := capsys.readouterr().err), shown
    assert not any(tmp_path.iterdir())


def test_a_programs_arguments_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each in quotes; a comma elsewhere belongs to the arguments."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    for words, jobs in (('"--lr 1e-4","--lr 3e-4"', 2), ("--sizes 1,2", 1)):
        assert main(["--multirun", "script=train.py", f"script_args={words}", "dry_run=true"]) == 0
        assert capsys.readouterr().out.count(" submit ") == jobs


@pytest.mark.parametrize("interrupted", ["submit", "wait"])
def test_ctrl_c_says_that_jobs_continue_only_where_there_are_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], interrupted: str
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweeps_jobs, "submit", lambda *_: None)
    monkeypatch.setattr(sweeps_jobs, interrupted, interrupt)
    has_jobs = interrupted == "wait"
    assert main(["--multirun", *SMALL, "seed=1,2", "sweep.wait=true"]) == (1 if has_jobs else 130)
    said = capsys.readouterr()
    assert ("the jobs continue; the same command waits for them again" in said.err) is has_jobs, said
    assert "the jobs continue" not in said.out


@pytest.mark.timeout(20)
def test_a_job_whose_run_is_removed_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    monkeypatch.setattr(sweeps_jobs, "submit", lambda *_: None)  # and a moment later it is gone
    assert main(["--multirun", *SMALL, "name=lr", "seed=1,2", "sweep.wait=true"]) == 1
    assert "lr-001 new: not submitted, or removed since   seed=2" in capsys.readouterr().out


def test_options_are_swept_by_a_pattern(tmp_path: Path) -> None:
    done = called(tmp_path, "-m", "name=all", "fsdp=glob(*)", *SMALL, "nodes=2", "dry_run=true")
    assert done.returncode == 0 and done.stdout.count("fsdp=") == 6, done


def test_jobs_that_are_done_do_not_answer_for_another_setting_of_the_whole_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = [*SMALL, "steps=20", "optim.lr=1e-4"]
    for seed in (1, 2):
        run = of_sweep(recorded_run(tmp_path / "runs", f"lr-00{seed - 1}"), "lr", [f"seed={seed}"], fixed)
        write_atomic(run.config, dump_config(compose_job([*fixed, f"seed={seed}"])))
    monkeypatch.chdir(tmp_path)
    command = ["--multirun", "name=lr", "seed=1,2", *SMALL, "steps=20"]
    assert main([*command, "optim.lr=0.0001"]) == 0 and "2  done" in capsys.readouterr().out
    assert main([*command, "optim.lr=1e-2"]) == 2
    said = capsys.readouterr()
    assert "done" not in said.out and said.err.count("was trained with 0.0001") == 2, said


def test_commands_that_a_sweep_offers_do_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cancelled job has not failed, so it is not retried; without a checkpoint nothing can be exported."""
    monkeypatch.chdir(tmp_path)
    cancelled = {"event": "attempt_ended", "verdict": "preempted", "decision": "stop", "reason": "cancelled"}
    run = of_sweep(recorded_run(tmp_path / "runs", "lr-000"), "lr", ["seed=1"])
    add_line(run.events, {"time": 131.0, "attempt": 0, **cancelled})
    assert main(["sweep", "retry-failed", "lr"]) == 0
    assert "1 stopped; for these: fsdp-jobs sweep resume lr" in capsys.readouterr().out
    assert main(["sweep", "best", "lr"]) == 0
    assert "export" not in capsys.readouterr().out
    run.metrics.write_text('{"step": 1, "loss": NaN}\n')
    assert main(["sweep", "best", "lr"]) == 2
    assert "no job has a finite loss yet\n      -> fsdp-jobs sweep status lr" in capsys.readouterr().err


def test_a_dry_run_shows_the_jobs_and_leaves_nothing(tmp_path: Path) -> None:
    in_turn = "hydra.sweeper.max_batch_size=1"
    done = called(tmp_path, "-m", "name=lr", "optim.lr=1e-4,1e-3", in_turn, *SMALL, "dry_run=true")
    assert done.returncode == 0 and "lr-001" in done.stdout and "nothing was submitted" in done.stdout
    assert not any(tmp_path.iterdir())


def test_unknown_sweeps_are_named_and_damaged_runs_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(2):
        of_sweep(recorded_run(tmp_path / "runs", f"rates-{number:03d}"), "rates", [f"seed={number}"])
    for command, hint in ((["status", "rate"], "did you mean rates?"), (["statu", "rates"], "did you mean status?")):
        assert main(["sweep", *command]) == 2
        assert hint in capsys.readouterr().err
    shutil.copytree(tmp_path / "runs" / "rates-000", tmp_path / "runs" / "rates-000.copy")
    damaged = RunDir(tmp_path / "runs" / "rates-001").job
    damaged.write_text("{")
    assert main(["sweep", "status", "rates", "--json"]) == 0
    assert [row["run"] for row in json.loads(capsys.readouterr().out)] == ["rates-000"]
    assert main(["--multirun", "name=rates", "seed=1", "dry_run=true", *SMALL]) == 0
    assert "rates-002" in capsys.readouterr().out and damaged.read_text() == "{"


def test_another_job_s_run_is_not_taken_for_one_of_the_sweep(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "lr-000")
    run.path.mkdir(parents=True)
    run.job.write_text(json.dumps({"handle": "local_fsdp://fsdp_jobs/x", "overrides": ["steps=7"]}))
    done = called(tmp_path, "--multirun", "name=lr", "seed=1,2", "dry_run=true", *SMALL)
    assert done.returncode == 0 and "lr-001" in done.stdout and "lr-000" not in done.stdout, done


def test_a_sweep_is_continued_from_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, rate in ((1, "1e-3"), (4, "2e-3")):
        run = RunDir(Path("runs") / f"lr-{number:03d}")
        run.path.mkdir(parents=True)
        job = {"handle": "local_fsdp://fsdp_jobs/x", "overrides": [*SMALL, f"optim.lr={rate}", f"name={run.name}"]}
        job |= {"nodes": "1", "steps": 120}
        run.job.write_text(json.dumps(job))
        of_sweep(run, "lr", [f"optim.lr={rate}"], SMALL)
        with run.config.open("w") as file:
            file.write(dump_config(compose_job(job["overrides"])))
    assert main(["-m", "name=lr", "optim.lr=0.002,0.003,0.001", *SMALL, "dry_run=true"]) == 0
    shown = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("lr-")}
    assert list(shown) == ["lr-004", "lr-005", "lr-001"]
    assert "lr=2e-3" in shown["lr-004"] and "resume" in shown["lr-004"] and "submit" in shown["lr-005"]


@pytest.mark.integration
def test_a_report_of_a_sweep_needs_no_network_and_executes_only_its_own_script(browser: Any, tmp_path: Path) -> None:  # noqa: F811
    losses = [3.0, 2.5, None, float("nan"), 2.7]
    rows = [
        Row(f"lr-{i:03d}", [f"optim.lr=1e-{i + 1}", f"fsdp={HOSTILE if i == 4 else 'auto'}"], "h", "done", 9, loss)
        for i, loss in enumerate(losses)
    ]
    rows[2] = replace(rows[2], state="failed", reason=HOSTILE)
    sweep = Sweep("lr", "runs", [HOSTILE], jobs=rows)
    best = sweep.best()
    assert best is not None and best.run == "lr-001"
    page, file = _Page(), tmp_path / "report.html"
    write_page(file, "sweep/lr", {"api/rows": {}, "api/sweeps/lr": sweep.content()})
    page.feed(file.read_text())
    assert page.tags.count("script") == 3 and "img" not in page.tags and page.links == ["#"]
    watched = Watched(browser)
    watched.page.context.set_offline(True)
    watched.page.goto(file.as_uri())
    watched.page.wait_for_selector("svg")
    watched.page.click("text=Overrides of all jobs")
    text = watched.page.inner_text("main")
    for word in (HOSTILE, "optim.lr (log)", "All keys together", "best: lr-001", "lr-003"):
        assert word in text, word
    labels = watched.page.locator("svg").first.locator("text").all_text_contents()
    assert {"0.1", "0.01", "auto"} <= set(labels) and any(label.startswith("<script>alert") for label in labels)
    assert watched.page.locator("polyline.best title").text_content() == "lr-001: loss 2.5, optim.lr=1e-2 fsdp=auto"
    watched.check()
    watched.keep(tmp_path, "sweep-report")
    sweep.direction = "maximize"
    best = sweep.best()
    assert best is not None and best.run == "lr-000"


@pytest.mark.parametrize("words", [["seed=1"], ["--multirun", "seed=1,2"]])
def test_ctrl_c_while_jobs_are_composed_is_no_problem_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    compose = ConfigLoaderImpl.load_configuration

    def disturbed(*args: Any, **kwargs: Any) -> Any:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise UnboundLocalError("raised in a finally") from None
        return compose(*args, **kwargs)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background ignore it
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", disturbed)
    monkeypatch.setattr("fsdp_jobs.config.hydra.hydra_compose", hydra_compose)  # tests keep what it has composed
    assert main([*words, *SMALL, "dry_run=true"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_sweep_whose_submission_was_killed_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, seed in enumerate([3, 4]):  # of two jobs, and job.json of neither
        config = compose_job([*SMALL, f"seed={seed}", f"name=s-{number:03d}"])
        write_atomic(RunDir(tmp_path / "runs" / f"s-{number:03d}").config, dump_config(config))
    with mock.patch.object(LocalLauncher, "submit", side_effect=InterruptedError) as submitted:
        assert main(["--multirun", "name=s", "seed=1,2,3", *SMALL, "dry_run=true"]) == 0
        with pytest.raises(InterruptedError):
            main(["--multirun", "name=s", "seed=1,2,3", *SMALL])
    assert submitted.called
