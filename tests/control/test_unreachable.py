"""A machine that is not there is lost soon, an agent that stands still is not: agents without ranks.

Network namespaces as machines; the real coordinator and the agents' real links on them.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.schema import dump_config
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import ATTEMPT_ENV, COORDINATOR_ENV
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.tail import read_json_lines
from tests.jobs import ROOT
from tests.netns import CONTROL, PORT, Fabric, needs_netns

pytestmark = [pytest.mark.integration, needs_netns]

STOPPED_S = 6.0  # an agent; twice as long as a machine may acknowledge nothing
AGENT = """
import sys, time
from fsdp_jobs.config.schema import load_config
from fsdp_jobs.node.link import Link
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.messages import FROM_COORDINATOR, NO_ROUND, Agent, Beat, Break, Hello, Ready, Request, Round, reader
from fsdp_jobs.run.rank_state import Report, Times
from fsdp_jobs.run.term import Lease

run, name, address = RunDir(sys.argv[1]), sys.argv[2], sys.argv[3]
agent = Agent(0, int(name[-1]), host=name, address=name, nproc=1, switches=(), copies=0, id=name)
running, term, phase, read = NO_ROUND, 0, 1, reader(FROM_COORDINATOR)

def hello(local):
    return Hello(agent, term, running, running is NO_ROUND, ended=False, signal="", local=local, at=Lease.now())

def beat():
    return Beat([] if running is NO_ROUND else [(Report(1.0, 1, -1, phase), Times())], at=Lease.now())

def take(line):
    global running, term, phase
    try:
        message = read(line)
    except ValueError:
        return  # a guard's
    if isinstance(message, Round):
        running, term, phase = message, message.term, 1
    elif isinstance(message, Request):
        phase = int(message.request)  # to park
    elif isinstance(message, Break):
        running = NO_ROUND
        link.send(Ready(after=message.round, at=Lease.now()))

link = Link(address, run.token.read_text(), hello, beat, take, load_config(run.config).elastic)
time.sleep(600)
"""


def test_a_cut_machine_is_lost_and_a_stopped_agent_is_not(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    write_atomic(run.config, dump_config(compose_job(["nodes=2:3", "nproc_per_node=1", "fsdp=full_shard"])))
    write_atomic(run.token, "token", mode=0o600)
    run.attempt(0).mkdir(parents=True)

    def events(name: str) -> list[dict[str, Any]]:
        return [e for e in read_json_lines(run.events) if e["event"] == name]

    def until(name: str, count: int) -> dict[str, Any]:
        deadline = time.monotonic() + 120
        while len(events(name)) < count:
            assert time.monotonic() < deadline, run.process_log(0, "coordinator").read_text()
            time.sleep(0.05)
        return events(name)[count - 1]

    with Fabric(["node1", "node2", "node3"]) as fabric:
        address = f"{fabric.addresses[CONTROL]}:{PORT}"
        env = {**os.environ, "PYTHONPATH": str(ROOT), ATTEMPT_ENV: "0", COORDINATOR_ENV: address}
        coordinator = [sys.executable, "-m", "fsdp_jobs.control.server", str(run.path)]
        fabric.run(CONTROL, coordinator, env, run.process_log(0, "coordinator"))
        agents = {
            name: fabric.run(name, [sys.executable, "-c", AGENT, str(run.path), name, address], env, tmp_path / "log")
            for name in fabric.nodes
        }
        assert len(until("round_started", 1)["nodes"]) == 3
        fabric.signal_all("node2", signal.SIGSTOP)
        time.sleep(STOPPED_S)
        fabric.signal_all("node2", signal.SIGCONT)
        agents["node2"].send_signal(signal.SIGCONT)  # nsenter stops when its child does
        time.sleep(1)
        assert not events("node_lost"), "its machine has acknowledged all packets"
        cut_at = time.time()
        fabric.cut("node2")
        lost, begun = until("node_lost", 1), until("round_started", 2)
        print(f"lost after {lost['time'] - cut_at:.1f} s, the next round after {begun['time'] - cut_at:.1f} s")
        assert "cannot be reached for" in lost["why"] and lost["host"] == "node2"
        assert begun["hosts"] == ["node1", "node3"]
        fabric.heal("node2")
        assert len(until("round_broken", 2)) and len(until("round_started", 3)["nodes"]) == 3, "it is taken in again"
