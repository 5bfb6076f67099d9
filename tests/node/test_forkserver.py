"""The fork server of a node: ranks may start processes of every kind, and none of them outlives the agent."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil

from fsdp_jobs.run import folders
from fsdp_jobs.run.env import LOG_ENV
from tests.jobs import signal_all

PROGRAM = """
import gc, multiprocessing, os, sys, time
from multiprocessing.util import Finalize
from fsdp_jobs.node import forkserver
from fsdp_jobs.run.processes import die_with_parent

def leaf(found):
    found.put(os.getpid())

def rank(found):
    die_with_parent()
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        inner = context.Queue()
        process = context.Process(target=leaf, args=(inner,))
        process.start()
        assert inner.get(timeout=60) == process.pid
        process.join()
        found.put((method, process.exitcode))
    found.put((gc.isenabled(), sys.modules["colorsys"].__dict__ in gc.get_objects()))
    found.put(os.getpid())
    time.sleep(600)

if __name__ == "__main__":
    for _ in range(16):  # the fork server closes them, and a rank has other files at their numbers
        Finalize(None, print, (open(os.devnull, "w+"),), exitpriority=0)
    forkserver.start(["colorsys", "there_is_no_such_module"])
    context = multiprocessing.get_context("forkserver")
    found = context.Queue()
    context.Process(target=rank, args=(found,)).start()
    for _ in range(5):
        print(found.get(timeout=120), flush=True)
    time.sleep(600)
"""


def test_a_rank_starts_processes_of_every_kind_and_dies_with_its_agent(tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(PROGRAM)
    environment = {"FSDP_JOBS_RUN_DIR": "/runs/demo", "PYTHONPATH": ":".join(sys.path)}
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True, env=environment) as agent:
        assert agent.stdout is not None
        try:
            lines = [agent.stdout.readline().strip() for _ in range(5)]
            assert lines[:3] == ["('fork', 0)", "('spawn', 0)", "('forkserver', 0)"]
            assert lines[3] == "(True, False)", "it collects garbage, but passes over what was imported before it"
            rank = psutil.Process(int(lines[4]))
            server = rank.parent()
            assert server is not None and server.ppid() == agent.pid
            assert "fsdp_jobs: demo fork server" in " ".join(server.cmdline())
        finally:
            agent.send_signal(signal.SIGKILL)
        assert psutil.wait_procs([server, rank], timeout=30)[1] == []


SIGNALLED = """
import multiprocessing, os, signal, time
from fsdp_jobs.node import forkserver, worker

def rank(begun):
    begun.set()
    time.sleep(1)  # on a busy node
    worker.enter()
    time.sleep(60)

if __name__ == "__main__":
    forkserver.start([])
    context = multiprocessing.get_context("forkserver")
    begun = context.Event()
    process = context.Process(target=rank, args=(begun,))
    process.start()
    begun.wait()
    os.kill(process.pid, signal.SIGTERM)
    process.join(30)
    print(process.exitcode)
"""


def test_a_request_to_stop_reaches_a_rank_that_has_just_been_forked(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(SIGNALLED)
    environment = {"FSDP_JOBS_RUN_DIR": "/runs/demo", "PYTHONPATH": ":".join(sys.path), LOG_ENV: f"{tmp_path}/log"}
    done = subprocess.run([sys.executable, str(tmp_path / "agent.py")], capture_output=True, text=True, env=environment)
    assert done.stdout == f"{-signal.SIGTERM}\n", done.stderr


KILLED = """
import multiprocessing, os, subprocess, sys, time
from pathlib import Path
from fsdp_jobs.run import folders
from fsdp_jobs.run.rank_state import RankState
folder, lock = folders.make(Path(sys.argv[1]), folders.RANKS)
lock.close()  # as the fork server does
state, asleep = RankState(folder, 0), ["sleep", "600"]
fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
fork.start()
environment = {**os.environ, "FSDP_JOBS_RANK_STATE": str(folder)}
started = subprocess.Popen(asleep, env=environment)
detached = subprocess.Popen(asleep, env=environment, start_new_session=True)
stranger = subprocess.Popen(asleep)
print(fork.pid, started.pid, detached.pid, stranger.pid, flush=True)
time.sleep(600)
"""


def test_what_a_killed_rank_started_is_ended_with_its_folder_unless_it_left_the_session(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as rank:
        assert rank.stdout is not None
        fork, started, detached, stranger = (psutil.Process(int(pid)) for pid in rank.stdout.readline().split())
        try:
            rank.kill()
            rank.wait()
            folders.remove(tmp_path, folders.RANKS)
            assert psutil.wait_procs([fork, started], timeout=30)[1] == []
            assert detached.is_running() and stranger.is_running()
        finally:
            signal_all([fork, started, detached, stranger])
    assert not list(tmp_path.iterdir())
