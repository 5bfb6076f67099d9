"""Jobs are submitted all or none, and a run's files say what was submitted last, not what was refused."""

from __future__ import annotations

import copy
import errno
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from fsdp_jobs.cli.follow import LiveView
from fsdp_jobs.cli.main import main
from fsdp_jobs.config.errors import BadInput, JobFailed
from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.schema import dump_config
from fsdp_jobs.control.placement import known_places
from fsdp_jobs.launchers.base import Description
from fsdp_jobs.launchers.local import LocalLauncher
from fsdp_jobs.plan.shapes import ModelShape
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir, runs_in
from fsdp_jobs.run.files import write_atomic, write_json
from fsdp_jobs.run.state import State
from fsdp_jobs.run.verdict import WITHDRAWN, judge
from fsdp_jobs.submit import submit as submission
from fsdp_jobs.submit import submitted
from tests.recorded import recorded_run


class _Launcher:
    """Records what it is asked; without an id it refuses."""

    def __init__(self, name: str, app_id: str = ""):
        self.name, self.app_id, self.cancelled = name, app_id, list[str]()

    def find(self, runs: Sequence[RunDir]) -> list[None]:
        return [None] * len(runs)

    def run_of(self, app_id: str, cluster: str) -> None:
        return None

    def relink(self, app_id: str, cluster: str, run: RunDir) -> None:
        """Nothing was moved."""

    def describe(self, app_ids: Sequence[str]) -> list[None]:
        return [None] * len(app_ids)

    def cluster_of(self, app_id: str) -> str:
        return "here"

    def submit(self, requests: Sequence[Any], parallelism: int, folder: Path | None) -> list[str]:
        if not self.app_id:
            raise JobFailed("no more jobs")
        return [self.app_id] * len(requests)

    def cancel(self, app_ids: Sequence[str]) -> None:
        self.cancelled += app_ids


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """These launchers are as good as installed."""
    known = submission.launcher_of
    for module in (submission, submitted):
        monkeypatch.setattr(module, "launcher_of", lambda name: known(name) if "_" in name else _Launcher(name))


def test_a_refused_submission_leaves_the_record_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [compose_job([f"runs_dir={tmp_path}", f"name={name}", "nodes=1", "nproc_per_node=1"]) for name in "ab"]
    first, second = submission.prepare(configs)
    taking, refusing = _Launcher("taking", "7"), _Launcher("refusing")
    submission.submit([replace(first, launcher=taking)], [["steps=1"]])  # type: ignore[arg-type]
    before = {file: file.read_text() for file in (first.run.job, first.run.config, first.run.token)}
    assert first.run.read_job()["handle"] == "taking://here/7" and first.run.first_attempt() == 0
    first.run.attempt(0).mkdir(parents=True)
    longer = replace(first.config, steps=first.config.steps + 1)
    jobs = [replace(first, config=longer, launcher=taking), replace(second, launcher=refusing)]  # type: ignore[arg-type]
    with monkeypatch.context() as patch, pytest.raises(JobFailed):
        patch.setattr(Path, "exists", lambda _: False)  # as of Python 3.14 where storage does not answer
        submission.submit(jobs, [["steps=2"], ["steps=2"]])
    assert taking.cancelled == ["7"], "all or none"
    assert {file: file.read_text() for file in before} == before and not second.run.is_submitted
    assert not second.run.job.exists() and not second.run.config.exists(), "it may be submitted with other values"
    submission.submit([jobs[0]], [["steps=2"]])
    assert first.run.first_attempt() == 1


def test_jobs_of_one_submission_are_listed_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their records are written at once, and the last one first here."""
    names = [f"run-{i}" for i in range(6)]
    configs = [compose_job([f"runs_dir={tmp_path}", f"name={name}", "nodes=1", "nproc_per_node=1"]) for name in names]
    taking = _Launcher("taking", "7")
    jobs = [replace(job, launcher=taking) for job in submission.prepare(configs)]  # type: ignore[arg-type]
    record = submission.record

    def slowly(run: RunDir, *of: Any) -> str:
        time.sleep(0.05 * (6 - names.index(run.name)))
        return record(run, *of)

    monkeypatch.setattr(submission, "record", slowly)
    submission.submit(jobs, [["steps=1"]] * 6)
    assert [run.name for run in runs_in(str(tmp_path))] == names


def test_checkpoints_in_a_relative_folder_are_found_from_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [f"runs_dir={tmp_path}/runs", "name=a", "nodes=1", "nproc_per_node=1", "checkpoint.dir=saved"]
    (job,) = submission.prepare([compose_job(given)])
    submission.submit([replace(job, launcher=_Launcher("taking", "7"))], [given])  # type: ignore[arg-type]
    monkeypatch.chdir("/")
    (again,) = submission.prepare([compose_job(submission.overrides_again(job.run, []))])
    assert job.config.checkpoint.dir == again.config.checkpoint.dir == f"{tmp_path}/saved"


def test_an_unfinished_submission_that_cannot_be_locked_is_left_alone(tmp_path: Path) -> None:
    """It is another user's, for example."""
    run = RunDir(tmp_path / "theirs")
    (run.submit / "lock").mkdir(parents=True)
    write_json(run.job, {"pending": "local_fsdp"})
    submitted.settle([run])
    assert run.pending_launcher == "local_fsdp"


def test_a_submission_that_is_recorded_late_keeps_its_time(tmp_path: Path) -> None:
    """What a cluster's pods have recorded is older than the record of a command that found the job later."""
    run = RunDir(tmp_path / "a")
    write_json(run.job, {"pending": "taking", "submission": "s", "first_attempt": 0})
    os.utime(run.job, (50.0, 50.0))
    submitted.record(run, _Launcher("taking", "7"), "7")  # type: ignore[arg-type]
    (event,) = events.read_events(run)
    assert event.time == run.read_job()["submitted"] == 50.0


def test_a_submission_is_not_recorded_in_the_future(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, now = RunDir(tmp_path / "a"), time.time
    write_json(run.job, {"pending": "taking", "submission": "s", "first_attempt": 0})
    monkeypatch.setattr(time, "time", lambda: now() - 3600)  # the file server is ahead
    submitted.record(run, _Launcher("taking", "7"), "7")  # type: ignore[arg-type]
    (event,) = events.read_events(run)
    assert event.time == pytest.approx(now() - 3600, abs=10)


def test_a_dry_run_away_from_its_cluster_asks_once_and_leaves_the_configuration_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(LocalLauncher, "offline_notes", lambda self, config: asked.append(config) or ["nobody answers"])
    keys = [
        f"runs_dir={tmp_path}",
        "nodes=1",
        "nproc_per_node=1",
        "data=tokens",
        "data.path=on-the-cluster.bin",
        "data.vocab_size=256",
    ]
    configs = [compose_job([*keys, "dry_run=true", f"name={name}"]) for name in "abc"]
    before = copy.deepcopy(configs)
    jobs = submission.prepare(configs)
    assert [job.offline_notes for job in jobs] == [["nobody answers"]] * 3 and len(asked) == 1
    assert submission.artefact_of(jobs[0], []) and configs == before
    with pytest.raises(BadInput, match=r"data\.path=on-the-cluster\.bin"):
        submission.prepare([replace(configs[0], dry_run=False)])


def test_a_submission_leaves_neither_topology_nor_shape_of_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "switches.yaml").write_text("switches: {leaf: 'n[1-2]'}\n")
    keys = [f"runs_dir={tmp_path}", "name=a", "nodes=1", "nproc_per_node=1"]
    with_file = submission.prepare([compose_job([*keys, f"cluster.topology={tmp_path}/switches.yaml"])])[0]
    without = submission.prepare([compose_job(keys)])[0]
    taking = _Launcher("taking", "7")
    submission.submit([replace(with_file, launcher=taking)], [keys])  # type: ignore[arg-type]
    assert set(known_places(with_file.run)) == {"n1", "n2"}
    with_file.run.shape.write_text("of another model")
    submission.submit([replace(without, launcher=taking)], [keys])  # type: ignore[arg-type]
    assert known_places(without.run) == {} and ModelShape.from_file(without.run.shape) == without.shape


def test_a_job_that_was_killed_is_said_to_have_ended_when_this_cannot_be_written_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Full(_Launcher):
        def cancel(self, app_ids: Sequence[str]) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", "runs/a/attempts/0/verdict.json")

    monkeypatch.setattr(submitted, "launcher_of", Full)
    with pytest.raises(JobFailed, match=r"ended, but .*verdict.json: No space left on device"):
        submitted.kill(["full://here/7"])


def test_of_a_job_whose_launcher_does_not_answer_nothing_is_said_that_has_not_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Silent(_Launcher):
        def describe(self, app_ids: Sequence[str]) -> list[None]:
            raise JobFailed("scontrol did not answer within 60 s")

        def cancel(self, app_ids: Sequence[str]) -> None:
            self.describe(app_ids)

    monkeypatch.setattr(submitted, "launcher_of", Silent)
    monkeypatch.setattr("fsdp_jobs.submit.stop._LEAVES_S", 0.0)
    run = recorded_run(tmp_path, "mute")
    write_json(run.job, {**run.read_job(), "handle": "silent://here/7"})
    write_atomic(run.config, dump_config(compose_job(["elastic.stop_grace_s=0"])))
    asked = "mute: asked to save a checkpoint and stop, even if this command ends\n"
    for flags, told in ((["--now"], ""), ([], f"{asked}mute has not stopped in time: its launcher does ")):
        run.stop_request.unlink(missing_ok=True)
        assert main(["cancel", "mute", *flags, f"runs_dir={tmp_path}"]) == 1
        said = capsys.readouterr()
        assert (said.out.partition("not answer")[0], said.err) == (told, "scontrol did not answer within 60 s\n")
        assert run.stop_request.exists() is not bool(flags), "it is still asked to save and stop"


@pytest.mark.timeout(60)
def test_ctrl_c_cancels_an_attached_job_that_still_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, states, pressed = RunDir(tmp_path / "a"), [Description(State.QUEUED, "waits for nodes")], list[str]()

    def press(*_: Any) -> None:
        if not pressed:
            pressed.append("Ctrl-C")
            raise KeyboardInterrupt

    def cancel(*_: Any) -> None:
        states[0] = Description(State.STOPPED)
        judge(run, WITHDRAWN)

    monkeypatch.setattr(LocalLauncher, "submit", lambda *_: ["a-1"])
    monkeypatch.setattr(LocalLauncher, "describe", lambda _, ids: states * len(ids))
    monkeypatch.setattr(LocalLauncher, "cancel", cancel)
    monkeypatch.setattr(LiveView, "show", press)
    assert main(["name=a", f"runs_dir={tmp_path}", "nodes=1", "nproc_per_node=1"]) == 0
    said = capsys.readouterr().out
    assert "Ctrl-C again stops at once" in said and "a: stopped - cancelled while it waited" in said
    assert "asked to save" not in said and not run.stop_request.exists()


def test_ctrl_c_at_a_submission_says_that_it_is_withdrawn_and_where_to_see_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalLauncher, "submit", interrupt)
    assert main(["name=a", f"runs_dir={tmp_path}", "nodes=1", "nproc_per_node=1"]) == 130
    assert "withdrawing what was submitted; after another Ctrl-C fsdp-jobs list" in capsys.readouterr().out
    assert not RunDir(tmp_path / "a").is_submitted


def test_a_job_that_a_cluster_may_have_taken_before_it_fell_silent_is_found_once_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = _Launcher("silent")

    def find(runs: Sequence[RunDir]) -> list[str]:
        if not silent.app_id:
            raise JobFailed("squeue did not answer within 60 s")
        return [silent.app_id] * len(runs)

    monkeypatch.setattr(silent, "find", find)
    monkeypatch.setattr(submitted, "launcher_of", lambda name: silent)
    config = compose_job([f"runs_dir={tmp_path}", "name=a", "nodes=1", "nproc_per_node=1"])
    (job,) = submission.prepare([config])
    with pytest.raises(JobFailed, match="no more jobs"):
        submission.submit([replace(job, launcher=silent)], [[]])  # type: ignore[arg-type]
    assert "a: may have been submitted: fsdp-jobs list shows it" in capsys.readouterr().out
    assert job.run.config.exists(), "the job may read it"
    silent.app_id = "7"
    submitted.settle([job.run])
    assert job.run.handle == "silent://here/7" and not silent.cancelled


def test_a_run_that_is_removed_meanwhile_does_not_begin_anew_without_a_word(tmp_path: Path) -> None:
    config = compose_job([f"runs_dir={tmp_path}", "name=a", "nodes=1", "nproc_per_node=1"])
    taking = _Launcher("taking", "7")
    submission.submit([replace(submission.prepare([config])[0], launcher=taking)], [[]])  # type: ignore[arg-type]
    (again,) = submission.prepare([config])
    shutil.rmtree(again.run.path)
    with pytest.raises(BadInput, match="has just removed it"):
        submission.submit([replace(again, launcher=taking)], [[]])  # type: ignore[arg-type]
    assert not again.run.config.exists()


def test_a_job_that_is_submitted_is_not_said_to_be_nothing_when_this_cannot_be_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(run: RunDir, *_: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", str(run.job))

    config = compose_job([f"runs_dir={tmp_path}", "name=a", "nodes=1", "nproc_per_node=1"])
    (job,), taking = submission.prepare([config]), _Launcher("taking", "7")
    monkeypatch.setattr(submission, "record", full)
    with pytest.raises(JobFailed, match=r"submitted, but .*job.json: No space left on device"):
        submission.submit([replace(job, launcher=taking)], [[]])  # type: ignore[arg-type]
    assert job.run.pending_launcher == "taking" and not taking.cancelled, "list finds it"


@pytest.mark.parametrize("home", ["none", "closed"])
def test_a_user_whose_home_is_missing_or_closed_is_told_of_another_place(
    tmp_path: Path, home: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a container with a user of one's own."""

    def homeless(*_: Any) -> Path:
        raise RuntimeError("Could not determine home directory.")

    (tmp_path / "home").write_text("no folder can be made in it")
    if home == "none":
        monkeypatch.delenv("XDG_STATE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", homeless)
    else:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    assert main(["name=a", f"runs_dir={tmp_path / 'runs'}", "nodes=1", "nproc_per_node=1", "attach=false"]) == 2
    assert "XDG_STATE_HOME=FOLDER" in capsys.readouterr().err
    assert not RunDir(tmp_path / "runs" / "a").is_submitted


def test_an_attempt_that_begins_while_its_submission_is_recorded_follows_that_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, mkdir = RunDir(tmp_path), Path.mkdir
    write_json(run.job, {"first_attempt": 0, "pending": "taking"})

    def made(folder: Path, *args: Any, **how: Any) -> None:
        mkdir(folder, *args, **how)
        if folder == run.attempt(0):  # the command sees it
            submitted.record(run, _Launcher("taking"), "7")  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", made)
    events.begin_attempt(run, 0, events.AttemptStarted(1))
    assert [event.kind for event in events.read_events(run)] == ["submitted", "attempt_started"]


def test_a_submission_is_not_recorded_behind_the_attempt_that_has_begun_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that trained read as submitted, until its round ended."""
    run, locked = RunDir(tmp_path), events._locked
    write_json(run.job, {"first_attempt": 0, "pending": "taking"})

    def late(path: Path) -> int:
        with monkeypatch.context() as patch:
            patch.setattr(events, "_locked", locked)
            events.begin_attempt(run, 0, events.AttemptStarted(1))
        return locked(path)

    monkeypatch.setattr(events, "_locked", late)
    submitted.record(run, _Launcher("taking"), "7")  # type: ignore[arg-type]
    assert [event.kind for event in events.read_events(run)] == ["submitted", "attempt_started"]
    assert run.handle == "taking://here/7"


def test_a_command_that_was_killed_while_it_checked_links_leaves_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    launcher = LocalLauncher()
    launcher.remember("7", RunDir(tmp_path))

    def killed(_: Path) -> NoReturn:
        raise SystemExit(137)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Path, "unlink", lambda link, **how: None if how else killed(link))
        launcher.check_links(RunDir(tmp_path))
    assert launcher.known() == ["7"]
