"""One job per name, however many commands submit it at once and wherever one of them is killed. Real processes."""

from __future__ import annotations

import json
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.run.directory import RunDir, pending_in, runs_in
from fsdp_jobs.run.events import AttemptStarted, RoundStarted, read_events
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.processes import all_processes, command_of
from fsdp_jobs.run.status import ENDED
from fsdp_jobs.submit.overview import Overview
from fsdp_jobs.submit.submit import prepare, submit
from fsdp_jobs.submit.submitted import settle
from fsdp_jobs.submit.validate import composed
from tests.jobs import called, cli, environment, family, killed_at, signal_all

pytestmark = pytest.mark.integration

SLEEPS = "import time; time.sleep(600)"
ONE = ["name=one", "script=sleeps.py", "nodes=1", "nproc_per_node=1", "attach=false", "cluster.restart_nodes=false"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with a program; the supervisors of its runs do not outlive the test."""
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    yield tmp_path
    end_supervisors(tmp_path)


def supervisors(folder: Path) -> list[psutil.Process]:
    """Every process that supervises a run under a folder, recorded or not."""
    parents = {}
    for process in all_processes():
        words = command_of(process)
        if "fsdp_jobs.launchers.local_supervisor" in words and words[-1].startswith(str(folder)):
            with suppress(psutil.NoSuchProcess):
                parents[process] = process.ppid()
    own = {process.pid for process in parents}
    return [process for process, parent in parents.items() if parent not in own]  # a fork is still named so


def end_supervisors(folder: Path) -> None:
    killed = family(*supervisors(folder))
    signal_all(killed)
    psutil.wait_procs(killed, timeout=10)


def until(true: Callable[[], bool], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


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
        killed = subprocess.run([*killed_at(number), *ONE], cwd=folder, env=environment(folder), capture_output=True)
        settle(pending_in("runs"))
        shown, running = runs_in("runs"), supervisors(folder)
        fates.append((killed.returncode, len(running), len(shown)))
        assert len(running) == len(shown), fates
        try:
            submit(prepare(composed([ONE])), [ONE])
        except BadInput as e:
            assert running and "is in use by the live job" in str(e)
        assert len(supervisors(folder)) == 1, fates
        (row,) = Overview().look(runs_in("runs")).values()
        assert row.handle.endswith(run.submission) and row.state not in ENDED, row
        assert len(attempts(run)) <= 1, fates
        end_supervisors(folder)
        shutil.rmtree(run.path)
        if killed.returncode == 0:
            break
    assert killed.returncode == 0 and {fate[1:] for fate in fates} == {(0, 0), (1, 1)}, fates


def test_a_job_whose_command_was_killed_and_that_runs_when_it_is_found_is_shown_as_running(folder: Path) -> None:
    """It was shown as submitted for ever: its record came after its round's."""
    command = [*killed_at(1, "supervisor.json"), *ONE]
    assert subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True).returncode == -9
    run = RunDir(folder / "runs" / "one")
    until(lambda: any(isinstance(event, RoundStarted) for event in read_events(run)), "its ranks")
    assert run.pending_launcher == "local_fsdp"
    (row,) = json.loads(called(folder, "status", "--json").stdout)
    assert row["state"] == "running" and row["handle"] == run.handle, row
    assert [event.kind for event in read_events(run)][:2] == ["submitted", "attempt_started"]


@pytest.mark.parametrize("pattern", ["config.yaml", "job.json", "supervisor.json"])
def test_a_submission_that_is_told_to_end_undoes_what_it_has_done(folder: Path, pattern: str) -> None:
    command = [*killed_at(1, pattern, "SIGTERM"), *ONE]
    ended = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True)
    assert ended.returncode == 143, ended.stdout + ended.stderr
    run = RunDir(folder / "runs" / "one")
    assert not run.job.exists() and not [*run.path.rglob("*.tmp")] and not supervisors(folder)


def test_cancel_waits_for_the_end_of_a_job_that_takes_all_of_its_grace(folder: Path) -> None:
    """It was killed a moment before its coordinator gave up, and said to have been killed without waiting."""
    (folder / "sleeps.py").write_text(f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}")
    assert cli(folder, *ONE, "elastic.stop_grace_s=2").returncode == 0
    run = RunDir(folder / "runs" / "one")
    until(lambda: any(isinstance(event, RoundStarted) for event in read_events(run)), "its ranks")
    stopped = called(folder, "cancel", "one")
    assert "one stopped: cancelled; not ended within 2 s" in stopped.stdout, stopped.stdout + stopped.stderr


@pytest.fixture
def users(folder: Path) -> Iterator[tuple[str, str]]:
    """Two users of a group, which may write everything under the folder."""
    if os.getuid():
        pytest.skip("needs root, to make users")
    names = tuple(f"fsdp{secrets.token_hex(3)}" for _ in range(2))
    subprocess.run(["groupadd", names[0]], check=True)
    try:
        for name in names:
            subprocess.run(["useradd", "--no-create-home", "--gid", names[0], name], check=True)
        shutil.chown(folder, group=names[0])
        folder.chmod(0o2777)
        for parent in folder.parents[:2]:
            parent.chmod(0o755)
        yield names  # type: ignore[misc]
    finally:
        for name in names:
            subprocess.run(["userdel", name], check=False)
        subprocess.run(["groupdel", names[0]], check=False)


def as_user(folder: Path, user: str, umask: str, *args: str) -> subprocess.CompletedProcess[str]:
    """`fsdp-jobs ARGS` of an ordinary user, who may read the interpreter wherever it is."""
    may_read = ["--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"]
    under = ["setpriv", f"--reuid={user}", f"--regid={pwd.getpwnam(user).pw_gid}", "--clear-groups", *may_read]
    shell = [*under, "bash", "-c", f'umask {umask}; exec "$@"', "-"]
    home = folder / user
    if not home.exists():
        home.mkdir()
        shutil.chown(home, user)
    return cli(folder, *args, under=shell, XDG_STATE_HOME=str(home), HOME=str(home))


def test_another_user_is_told_whose_run_it_is_and_harms_nothing(folder: Path, users: tuple[str, str]) -> None:
    owner, other = users
    assert as_user(folder, owner, "007", *ONE).returncode == 0
    run = RunDir(folder / "runs" / "one")
    for command in (["cancel", "one"], ["cancel", "one", "--now"], ["resume", "one"], ONE):
        done = as_user(folder, other, "077", *command)
        assert done.returncode == 2 and f"run one: belongs to {owner} on " in done.stderr, done.stdout + done.stderr
    assert not run.stop_request.exists() and len(supervisors(folder)) == 1
    (row,) = json.loads(as_user(folder, other, "077", "status", "--json").stdout)
    assert row["state"] not in ENDED and row["reason"].startswith(f"of {owner} on "), row
    job = run.read_job()
    unanswered = {key: value for key, value in job.items() if key != "handle"} | {"pending": "local_fsdp"}
    write_atomic(run.job, json.dumps(unanswered))  # as if the owner's command had died beside the launcher
    as_user(folder, other, "077", "status")
    (row,) = json.loads(as_user(folder, owner, "077", "status", "--json").stdout)
    assert row["handle"] == job["handle"] and run.job.stat().st_uid == pwd.getpwnam(owner).pw_uid, row
    cancelled = as_user(folder, owner, "077", "cancel", "one", "--now")
    assert "one stopped: killed on request" in cancelled.stdout, cancelled.stdout + cancelled.stderr


def test_a_user_without_a_name_may_submit(folder: Path) -> None:
    """As in many containers; and checkpoints may go where only the nodes can write."""
    if os.getuid():
        pytest.skip("needs root, to become another user")
    folder.chmod(0o777)
    for parent in folder.parents[:2]:
        parent.chmod(0o755)
    may_read = ["--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"]
    nameless = ["env", "--unset=USER", "--unset=LOGNAME", "--unset=LNAME", "--unset=USERNAME"]
    under = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", *may_read, *nameless]
    done = cli(folder, *ONE, "checkpoint.dir=/only/on/nodes", under=under, HOME=str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((folder / "runs" / "one" / "identity.json").read_text())["user"] == "54321"


def test_a_name_of_somebody_else_on_shared_checkpoint_storage_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = [*ONE, f"checkpoint.dir={folder}/shared"]
    (folder / "shared").mkdir()
    assert cli(folder, *shared).returncode == 0
    elsewhere = [*shared[:1], f"script={folder}/sleeps.py", *shared[2:], f"runs_dir={folder}/others"]
    identity = folder / "shared" / "one" / "identity.json"
    whose = json.loads(identity.read_text())
    identity.write_text(json.dumps({**whose, "user": "alice", "host": "login7"}))  # the id is of this run
    assert "is in use by the live job" in called(folder, *shared).stderr
    refused = called(folder, *elsewhere)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert f"belongs to a run of alice on login7 ({folder}/runs/one)" in refused.stderr
    assert "another name=..." in refused.stderr and not (folder / "others" / "one" / "job.json").exists()


def test_a_run_on_another_machine_is_told_from_its_directory_and_not_started_twice(folder: Path) -> None:
    """Its handle names a host that is not this one: two login nodes with one home."""
    assert cli(folder, *ONE).returncode == 0
    run = RunDir(folder / "runs" / "one")
    until(lambda: bool(attempts(run)), "the first attempt")
    job = run.read_job()
    here = f"//{socket.gethostname()}/"
    write_atomic(run.job, json.dumps({**job, "handle": job["handle"].replace(here, "//other/")}))
    (row,) = json.loads(called(folder, "status", "--json").stdout)
    assert row["state"] not in ENDED and "is on other, and this machine asks" in row["reason"], row
    resumed = called(folder, "resume", "one")
    assert resumed.returncode == 2 and "may be in use by the job local_fsdp://other/" in resumed.stderr, resumed.stderr
    killed = called(folder, "cancel", "one", "--now")
    assert killed.returncode == 2 and "is on other" in killed.stderr, killed.stdout + killed.stderr
    assert len(supervisors(folder)) == 1 and len(attempts(run)) == 1
    write_atomic(run.job, json.dumps({**job, "handle": job["handle"].replace(here, "//fsdp_jobs/")}))
    assert "one stopped" in called(folder, "cancel", "one", "--now").stdout, "handles of before named no cluster"


def test_a_sweep_whose_command_is_killed_as_it_records_its_jobs_starts_each_once(folder: Path) -> None:
    (folder / "quick.py").write_text("print('done')")
    sweep = [
        "--multirun",
        "name=g",
        "script=quick.py",
        "nodes=1",
        "nproc_per_node=1",
        "seed=1,2",
        "sweep.parallelism=2",
    ]
    command = [*killed_at(3, "job.json"), *sweep]  # two intents come first
    assert subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True).returncode == -9
    runs = [RunDir(folder / "runs" / f"g-{i:03d}") for i in range(2)]
    assert all(run.pending_launcher == "local_fsdp" for run in runs)
    again = cli(folder, *sweep, "sweep.wait=true")
    assert again.returncode == 0, again.stdout + again.stderr
    assert [len(attempts(run)) for run in runs] == [1, 1] and all(run.pending_launcher is None for run in runs)


def test_a_job_is_known_to_a_shell_that_remembers_elsewhere(folder: Path) -> None:
    """It was said to be gone, and a resume began beside it."""
    assert cli(folder, *ONE).returncode == 0
    run = RunDir(folder / "runs" / "one")
    until(lambda: any(isinstance(event, RoundStarted) for event in read_events(run)), "its ranks")
    (folder / "closed").write_text("no folder can be made in it")
    elsewhere = {"XDG_STATE_HOME": str(folder / "closed")}
    shutil.copytree(run.path, folder / "runs" / "copy")
    of_copy = called(folder, "cancel", "copy", "--now", **elsewhere)
    assert "copy is not running" in of_copy.stdout and len(supervisors(folder)) == 1, of_copy.stdout + of_copy.stderr
    (row,) = json.loads(called(folder, "status", "one", "--json", **elsewhere).stdout)
    assert row["state"] == "running", row
    again = called(folder, "resume", "one", **elsewhere)
    assert again.returncode == 2 and "in use by the live job" in again.stderr, again.stdout + again.stderr
    assert "one stopped: killed" in called(folder, "cancel", "one", "--now", **elsewhere).stdout


def test_the_job_of_a_moved_directory_is_still_its_own(folder: Path) -> None:
    assert cli(folder, *ONE).returncode == 0
    run = RunDir(folder / "runs" / "one")
    until(lambda: any(isinstance(event, RoundStarted) for event in read_events(run)), "its ranks")
    (folder / "others").mkdir()
    run.path.rename(folder / "others" / "one")
    run.path.mkdir()  # by what still writes there
    (row,) = json.loads(called(folder, "status", "runs_dir=others", "--json").stdout)
    assert row["state"] not in ENDED, row
    again = called(folder, "resume", "one", "runs_dir=others")
    assert again.returncode == 2 and "in use by the" in again.stderr, again.stderr
    assert called(folder, "cancel", "one", "--now", "runs_dir=others").returncode == 0
    until(lambda: not supervisors(folder), "the end of its job")
