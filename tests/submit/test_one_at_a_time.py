"""One job per name, however many commands submit it at once and wherever one of them is killed. Real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.events import AttemptStarted, read_events
from fsdp_jobs.run.status import ENDED
from tests.jobs import cli, environment

pytestmark = pytest.mark.integration

SLEEPS = "import time; time.sleep(600)"
ONE = ["name=one", "script=sleeps.py", "nodes=1", "nproc_per_node=1", "attach=false", "cluster.restart_nodes=false"]

# Kills itself before the n-th change it makes to files, and before or after each process that it starts.
KILLER = """
import os, signal, sys
left, counts = int(sys.argv[1]), False
def watch(event, args):
    global left
    changes = event in ("os.rename", "os.remove", "os.mkdir", "os.symlink", "subprocess.Popen", "fcntl.flock")
    if changes and not any(str(a).endswith((".pyc", "__pycache__")) for a in args):
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


def test_a_submission_that_is_killed_anywhere_leaves_one_job_or_none(folder: Path) -> None:
    """Whatever was killed: `status` tells what is there, and the same command leads to exactly one job."""
    run = RunDir(folder / "runs" / "one")
    fates = []
    for number in range(1, 200):
        killed = subprocess.run(
            [sys.executable, "-c", KILLER, str(number), *ONE], cwd=folder, env=environment(folder), capture_output=True
        )
        shown = json.loads(cli(folder, "status", "--json").stdout)
        running = supervisors(folder)
        fates.append((killed.returncode, len(running), bool(shown)))
        assert len(running) == len(shown), fates
        again = cli(folder, *ONE)
        assert again.returncode == (2 if running else 0), again.stdout + again.stderr
        assert len(supervisors(folder)) == 1, fates
        (row,) = json.loads(cli(folder, "status", "--json").stdout)
        assert row["handle"].endswith(run.submission) and row["state"] not in ENDED, row
        assert len(attempts(run)) <= 1, fates
        end_supervisors(folder)
        subprocess.run(["rm", "-rf", run.path], check=True)
        if killed.returncode == 0:
            break
    assert killed.returncode == 0 and len({fate[1:] for fate in fates}) == 2, fates
