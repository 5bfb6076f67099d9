"""The fork server of a node: ranks may start processes of every kind, and none of them outlives the agent."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil

PROGRAM = """
import gc, multiprocessing, os, sys, time
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
