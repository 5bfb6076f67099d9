"""The attempt loop of containers, as processes: a requeue, a dead coordinator, and a command that never works."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.launchers import supervisor
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import ADDRESS_ENV
from fsdp_jobs.run.files import write_json
from fsdp_jobs.run.processes import free_port, has_signal, this_machine, wildcards
from fsdp_jobs.run.verdict import EXIT_REQUEUE, Verdict
from fsdp_jobs.submit import submit as submission
from tests.jobs import ROOT, Job, Nobody, Watched, job
from tests.world import PACED, tiny_for

pytestmark = pytest.mark.integration


class Containers(Watched):
    """A job whose containers are processes of this machine."""

    host = "127.0.0.1"

    def __init__(self, folder: Path, *overrides: str):
        config = compose_job(
            [f"runs_dir={folder}", "name=loop", "nodes=2", "nproc_per_node=1", *tiny_for(overrides), *overrides]
        )
        (prepared,) = submission.prepare([config])
        super().__init__(prepared.run)
        submission.submit([replace(prepared, launcher=Nobody())], [[]])  # type: ignore[arg-type]
        self.port = free_port()
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *command: str) -> None:
        run_dir = str(self.run.path)
        address = str(self.port) if name == "coordinator" else f"{self.host}:{self.port}"
        if not command:
            own = ("control.server", run_dir) if name == "coordinator" else ("node.agent", run_dir, "--node", name[-1])
            command = (sys.executable, "-m", f"fsdp_jobs.{own[0]}", *own[1:])
            command += () if name == "coordinator" else ("--nproc", "1")
        role = name.partition("-")[0]
        self.started[name] = subprocess.Popen(
            [sys.executable, "-m", "fsdp_jobs.launchers.attempts", role, run_dir, address, "--", *command],
            env={**os.environ, "PYTHONPATH": str(ROOT), ADDRESS_ENV: self.host},
            stdout=subprocess.DEVNULL,
        )

    def command(self, name: str) -> psutil.Process:
        (child,) = psutil.Process(self.started[name].pid).children()
        return child


@pytest.fixture
def containers(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Containers]:
    made = Containers(tmp_path, *getattr(request, "param", ()))
    yield made
    for process in made.started.values():
        process.kill()  # their commands die with them
        process.wait()


@pytest.mark.skipif("::" not in wildcards(), reason="this machine has no IPv6")
@pytest.mark.parametrize("containers", [("steps=10", "checkpoint.memory.every_steps=1")], indirect=True)
def test_a_job_whose_nodes_have_only_ipv6_addresses(containers: Containers) -> None:
    """As in pods of a cluster that has no IPv4."""
    containers.host = "::1"
    for name in ("coordinator", "node-0", "node-1"):
        containers.start(name)
    containers.until(lambda: containers.started["coordinator"].poll() is not None, "its end")
    assert Verdict.read(containers.run, 0).verdict == "done"  # type: ignore[union-attr]


@pytest.mark.parametrize("containers", [("steps=100", *PACED)], indirect=True)
def test_containers_outlive_attempts_and_deaths(containers: Containers) -> None:
    for name in ("coordinator", "node-0", "node-1"):
        containers.start(name)
    containers.until_step(10)
    containers.command("coordinator").kill()
    containers.until(lambda: bool(containers.events("adopted")), "the new coordinator adopts the round")
    containers.until_step(containers.step() + 10)
    containers.started["node-1"].send_signal(signal.SIGUSR1)
    containers.until(lambda: containers.run.last_attempt() == 1, "the next attempt")
    containers.until(lambda: len(containers.events("resumed")) > 0, "its checkpoint is taken up")
    containers.started["coordinator"].kill()  # the whole container, as a machine's death would
    containers.started["coordinator"].wait()
    containers.start("coordinator")
    for name, process in containers.started.items():
        assert process.wait(120) == 0, f"{name}\n{containers.story()}"
    assert containers.run.last_attempt() == 1
    assert sorted(containers.losses()) == list(range(1, 101))
    again = containers.started["node-0"].args
    assert subprocess.run(again, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60).returncode == 0


def test_an_attempt_follows_the_record_of_its_submission(containers: Containers) -> None:
    """`status` counted all of its time as the queue's, and after a resume also the time between the submissions."""
    recorded = containers.run.read_job()
    write_json(containers.run.job, {**recorded, "pending": "docker_fsdp"})
    containers.start("coordinator")
    time.sleep(2)
    assert containers.run.last_attempt() == -1
    write_json(containers.run.job, recorded)
    containers.until(lambda: containers.run.last_attempt() == 0, "its attempt")


def test_what_never_works_ends_the_job_with_its_last_words(containers: Containers) -> None:
    containers.start("coordinator")
    containers.start("node-0", sys.executable, "-c", "import no_such_thing", "--node", "0")
    assert containers.started["node-0"].wait(60) == 1
    verdict = Verdict.read(containers.run, 0)
    assert verdict is not None
    assert (verdict.verdict, verdict.decision) == ("infrastructure", "stop")
    assert "No module named 'no_such_thing'" in verdict.last_lines
    assert containers.started["coordinator"].wait(60) == 1


def test_an_excluded_machine_is_left_and_ends_no_job(containers: Containers) -> None:
    write_json(containers.run.excluded, {this_machine(): {"until": 1e12, "why": "3 failures"}})
    containers.start("coordinator")
    containers.start("node-0")
    assert containers.started["node-0"].wait(60) == EXIT_REQUEUE
    assert not containers.events("process_restarted") and Verdict.read(containers.run, 0) is None


def test_storage_that_is_away_for_a_while_ends_no_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the processes of an attempt, nor what restarts them."""
    monkeypatch.setattr(supervisor.Attempt, "poll_s", 0.01)
    answers = iter([OSError(errno.ESTALE, "Stale file handle"), OSError(errno.EIO, "Input/output error")])

    class Sick(supervisor.Attempt):
        @property
        def verdict(self) -> Verdict | None:
            if (error := next(answers, None)) is not None:
                raise error
            return super().verdict

    run = RunDir(tmp_path)
    attempt = Sick(run, 0)
    process = attempt.start("coordinator", ["sleep", "60"], {**os.environ})
    Verdict("done", "stop", "all steps are done").write(run, 0)
    verdict = attempt.supervise()
    assert verdict is not None and verdict.verdict == "done" and next(answers, None) is None
    assert not process.has_ended
    attempt.finish(0)


def test_a_signal_to_an_agent_that_still_imports_torch_stops_the_job(tmp_path: Path) -> None:
    with job(tmp_path, "early", "steps=100000", *PACED, nodes="1", nproc=1) as started:
        started.until(lambda: has_handlers(started), "the agent")
        started.agent(0).terminate()
        started.until(lambda: started.run.verdict(0).exists(), "the end of the attempt")
        (asked,) = started.events("stop_requested")
        assert asked["why"] == "node 0 received SIGTERM" and not started.metrics(), started.story()


def has_handlers(started: Job) -> bool:
    with suppress(AssertionError, psutil.NoSuchProcess):
        return has_signal(started.agent(0).pid, "SigCgt", signal.SIGTERM)
    return False
