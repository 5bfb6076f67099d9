"""Processes of an attempt that die."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from fsdp_jobs.launchers import supervisor
from fsdp_jobs.launchers.local_supervisor import LocalRequest, _LocalAttempt
from fsdp_jobs.launchers.supervisor import Attempt
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import write_json
from fsdp_jobs.run.verdict import Verdict
from tests.nfs import nfs_client

_LIVES_ONCE = 'echo >> "$0"; if [ $(wc -l < "$0") = 3 ]; then sleep 1.5; fi; exit 1'


class _Impatient(Attempt):
    early_s = 1.0


def test_a_process_is_given_up_after_three_early_deaths_in_a_row(tmp_path: Path) -> None:
    run, lives = RunDir(tmp_path / "run"), tmp_path / "lives"
    run.attempt(0).mkdir(parents=True)
    attempt = _Impatient(run, 0)
    attempt.start("coordinator", ["sh", "-c", _LIVES_ONCE, str(lives)], {"PATH": "/usr/bin:/bin"})
    verdict = attempt.supervise()
    assert verdict is not None and verdict.verdict == "infrastructure" and "died three times" in verdict.reason
    assert len(lives.read_text().splitlines()) == 2 + 1 + 3, "the one that lived longer begins a new count"


def test_an_agent_that_leaves_after_the_verdict_is_not_started_again_simulated_nfs(tmp_path: Path) -> None:
    """The coordinator, on another machine, has written the verdict, which this machine has looked for before."""
    run, verdict = RunDir(tmp_path / "run"), Verdict("done", "stop", "all steps are done")
    run.attempt(0).mkdir(parents=True)
    ends = 'sleep 0.5; echo "$1" > "$0"; exit 1'
    attempt = Attempt(run, 0)
    with nfs_client():
        attempt.start("node-0", ["sh", "-c", ends, str(run.verdict(0)), verdict.to_json()], {"PATH": "/usr/bin:/bin"})
        assert attempt.supervise() == verdict
    assert not run.events.exists(), run.events.read_text()


def test_storage_that_fails_for_a_moment_costs_no_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    failures, mkdir = [errno.EIO, errno.ESTALE], Path.mkdir

    def fails(folder: Path, *how: Any, **details: Any) -> None:
        mkdir(folder, *how, **details)
        if failures and run.attempt(0) in (folder, folder.parent):  # also where the answer was lost
            raise OSError(failures.pop(), "failed")

    monkeypatch.setattr(Path, "mkdir", fails)
    attempt = Attempt(run, 0)
    attempt.begin(events.AttemptStarted(1))
    assert [type(event) for event in events.read_events(run)] == [events.AttemptStarted] and not failures
    failures.append(errno.EIO)
    agent = attempt.start("node-0", ["true"], {"PATH": "/usr/bin:/bin"})
    assert agent.popen.wait() == 0 and attempt.processes == [agent] and not failures


def test_a_local_job_outlives_storage_that_fails_between_attempts(tmp_path: Path) -> None:
    """Its supervisor ended, before it had given the next attempt its number."""
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    attempts = run.attempt(0).parent
    attempts.write_text("not a folder now")
    threading.Timer(0.5, attempts.unlink).start()
    assert _LocalAttempt(run, LocalRequest(str(run.path), [], {}, [], [], True)).number == 0


def test_a_first_attempt_that_begins_on_its_second_try_still_records_its_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command, which saw the attempt's folder, left the record to it."""
    run = RunDir(tmp_path / "run")
    write_json(run.job, {"pending": "local"})

    def fails(run: RunDir) -> int:
        monkeypatch.undo()
        if run.attempt(0).exists():
            write_json(run.job, {"handle": "local://here/run"})
        raise OSError(errno.EIO, "failed")

    monkeypatch.setattr(RunDir, "first_attempt", fails)
    Attempt(run, 0).begin(events.AttemptStarted(1))
    assert [type(event) for event in events.read_events(run)] == [events.Submitted, events.AttemptStarted]


def test_storage_that_does_not_come_back_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "MOMENT_S", 0.3)
    (tmp_path / "run").write_text("no folder")
    with pytest.raises(NotADirectoryError):
        Attempt(RunDir(tmp_path / "run"), 0).begin(events.AttemptStarted(1))


def test_a_process_whose_log_cannot_be_opened_for_a_moment_has_died_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try counted as an early death, and a process that was to be given up was forgotten instead."""
    run, lives = RunDir(tmp_path / "run"), tmp_path / "lives"
    run.attempt(0).mkdir(parents=True)
    attempt = _Impatient(run, 0)
    attempt.start("coordinator", ["sh", "-c", 'echo >> "$0"; exit 1', str(lives)], {"PATH": "/usr/bin:/bin"})
    failures, opened = [*range(8)], Path.open

    def fails(file: Path, *how: Any, **details: Any) -> Any:
        if failures and file.name == "coordinator.log":
            raise OSError(failures.pop(), "failed")
        return opened(file, *how, **details)

    monkeypatch.setattr(Path, "open", fails)
    written = [*range(2)]

    def fails_to_write(verdict: Verdict, run: RunDir, attempt: int) -> None:
        if written:
            raise OSError(written.pop(), "failed")
        write(verdict, run, attempt)

    write = Verdict.write
    monkeypatch.setattr(Verdict, "write", fails_to_write)
    verdict = attempt.supervise()
    assert verdict is not None and "died three times" in verdict.reason
    assert len(lives.read_text().splitlines()) == 3


def test_a_container_outlives_storage_that_fails_between_attempts(tmp_path: Path) -> None:
    """It ended with 75, with which Docker does not restart it."""
    run, verdict = RunDir(tmp_path / "run"), Verdict("done", "stop", "all steps are done")
    run.path.mkdir()
    attempts = run.attempt(0).parent
    attempts.write_text("not a folder now")
    program = [sys.executable, "-m", "fsdp_jobs.launchers.attempts", "node", str(run.path), "127.0.0.1:1"]
    container = subprocess.Popen([*program, "--", "true", "--node", "0"], stderr=subprocess.PIPE, text=True)
    try:
        assert container.stderr is not None and "Not a directory" in container.stderr.readline()
        attempts.unlink()
        verdict.write(run, 0)
        assert container.wait(10) == verdict.exit_code_of_attempt
    finally:
        container.kill()
        container.communicate()


def test_a_job_that_its_cluster_has_started_elsewhere_is_not_ended_from_here(tmp_path: Path) -> None:
    """Its first node was cut off from the cluster, not from the run directory: its coordinator ended three times."""
    run = RunDir(tmp_path / "run")
    run.attempt(0).mkdir(parents=True)
    attempt = _Impatient(run, 0)
    attempt.start("coordinator", ["false"], {"PATH": "/usr/bin:/bin"})
    run.attempt(1).mkdir()
    with pytest.raises(SystemExit, match="a later attempt"):
        attempt.supervise()
    assert not run.events.exists() and not run.verdicts()
