"""One job per name, however many commands submit it at once and wherever one of them is killed. Real processes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.run.directory import RunDir, pending_in, runs_in
from fsdp_jobs.run.events import AttemptStarted, read_events
from fsdp_jobs.run.status import ENDED
from fsdp_jobs.submit.overview import Overview
from fsdp_jobs.submit.submit import prepare, settle, submit
from fsdp_jobs.submit.validate import composed
from tests.jobs import environment

pytestmark = pytest.mark.integration

SLEEPS = "import time; time.sleep(600)"
ONE = ["name=one", "script=sleeps.py", "nodes=1", "nproc_per_node=1", "attach=false", "cluster.restart_nodes=false"]

# Kills itself before the n-th change it makes to files, and before or after each process that it starts.
KILLER = """
import os, signal, sys
left = int(sys.argv[1])
def watch(event, args):
    global left
    changes = event in ("os.rename", "os.remove", "os.symlink", "subprocess.Popen", "fcntl.flock")
    if changes and not any(".pyc" in str(a) for a in args):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
from fsdp_jobs.cli.main import main
sys.addaudithook(watch)
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with a program; the supervisors of its runs do not outlive the test."""
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    yield tmp_path
    end_supervisors(tmp_path)


def supervisors(folder: Path) -> list[psutil.Process]:
    """Every process that supervises a run under a folder, recorded or not."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if "fsdp_jobs.launchers.local" in words and words[-1].startswith(str(folder)):
            found.append(process)
    return found


def end_supervisors(folder: Path) -> None:
    family = [p for s in supervisors(folder) for p in (s, *s.children(recursive=True))]
    for process in family:
        process.kill()
    psutil.wait_procs(family, timeout=10)


def attempts(run: RunDir) -> list[AttemptStarted]:
    return [event for event in read_events(run) if isinstance(event, AttemptStarted)]


@pytest.mark.parametrize("count", [8, pytest.param(50, marks=pytest.mark.soak)])
def test_of_many_submissions_of_one_name_at_once_exactly_one_is_taken(folder: Path, count: int) -> None:
    command = [sys.executable, "-m", "fsdp_jobs", *ONE]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    commands = [
        subprocess.Popen(command, cwd=folder, env=environment(folder), **piped)  # type: ignore[call-overload]
        for _ in range(count)
    ]
    said = [process.communicate()[0] for process in commands]
    taken = [text for process, text in zip(commands, said, strict=True) if process.returncode == 0]
    assert len(taken) == 1, "\n".join(said)
    for process, text in zip(commands, said, strict=True):
        assert process.returncode == 0 or (process.returncode == 2 and "is in use by the live job" in text), text
    run = RunDir(folder / "runs" / "one")
    assert run.read_job()["handle"] in taken[0]
    assert len(supervisors(folder)) == 1


def test_a_submission_that_is_killed_anywhere_leaves_one_job_or_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was killed, the next command knows what is there, and the same submission again leads to one job."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / ".state"))
    run = RunDir(folder / "runs" / "one")
    fates = []
    for number in range(1, 100):
        killed = subprocess.run(
            [sys.executable, "-c", KILLER, str(number), *ONE], cwd=folder, env=environment(folder), capture_output=True
        )
        settle(pending_in("runs"))
        shown, running = runs_in("runs"), supervisors(folder)
        fates.append((killed.returncode, len(running), len(shown)))
        assert len(running) == len(shown), fates
        try:
            submit(prepare(composed([ONE])), [ONE])
        except BadInput as e:
            assert running and "is in use by the live job" in str(e)
        assert len(supervisors(folder)) == 1, fates
        (row,) = Overview().look(runs_in("runs"))
        assert row.handle.endswith(run.submission) and row.state not in ENDED, row
        assert len(attempts(run)) <= 1, fates
        end_supervisors(folder)
        shutil.rmtree(run.path)
        if killed.returncode == 0:
            break
    assert killed.returncode == 0 and {fate[1:] for fate in fates} == {(0, 0), (1, 1)}, fates
