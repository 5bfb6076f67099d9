"""What the coordinator costs, and how long agents wait for it, at 1,000 ranks and at any other size.

    python benchmarks/coordinator.py [--agents 125] [--ranks 8] [--lose 1] [--seconds 20]
    python benchmarks/coordinator.py --agents 5000 --lose 50

The coordinator is the real process; the agents are connections of this one, which send what agents send: a heartbeat
every second, and what follows from its messages. They form a round, train, lose some of them at once, form the next
round, train, and adopt a new coordinator after the first was killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.schema import dump_config
from fsdp_jobs.run.directory import RunDir, write_atomic
from fsdp_jobs.run.env import ATTEMPT_ENV, COORDINATOR_ENV
from fsdp_jobs.run.events import Adopted, RoundStarted, read_events
from fsdp_jobs.run.processes import free_port, raise_file_limit
from fsdp_jobs.run.protocol import AGENT, NO_ROUND, proof

_RETRY_S = 0.2  # as the agents' own link
_AT_ONCE = 100  # connections that prove themselves; the coordinator drops the oldest of more than 256


class Agent:
    """One simulated agent, whose ranks do a step a second."""

    proving: asyncio.Semaphore  # one process cannot answer as many challenges at once as the agents of so many machines
    waits: float = 0.0  # the longest that any has waited for an answer since it was set to 0

    def __init__(self, port: int, node: int, ranks: int):
        self.port, self.node, self.ranks = port, node, ranks
        self.in_round, self.term = NO_ROUND, 0
        self.is_ready = True
        self.broken = 0  # rounds
        self.adopted = 0  # connections in which the coordinator has let its ranks run
        self._sent: deque[float] = deque()  # when, of messages that are not answered yet
        self.running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            with suppress(OSError, ValueError, KeyError):
                async with Agent.proving:
                    reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                    await self._prove(reader, writer)
                try:
                    await self._talk(reader, writer)
                finally:
                    writer.close()
            await asyncio.sleep(_RETRY_S)

    async def _prove(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        challenge = json.loads(await reader.readline())["nonce"]
        answer = {"kind": "answer", "nonce": "mine", "proof": proof("token", AGENT, challenge, "mine")}
        writer.write((json.dumps(answer) + "\n").encode())
        json.loads(await reader.readline())  # the coordinator's proof

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def send(kind: str, **content: object) -> None:
            writer.write((json.dumps({"kind": kind, **content}) + "\n").encode())

        def send_and_wait(kind: str, **content: object) -> None:
            self._sent.append(time.monotonic())
            send(kind, at=self._sent[-1], **content)

        async def beat() -> None:
            for step in range(1, 1 << 30):
                await asyncio.sleep(1.0)
                send_and_wait("beat", silent=0.0, ranks=[] if self.is_ready else [[step, 0, 1]] * self.ranks)

        name = f"node{self.node}"
        hello = {"attempt": 0, "node": self.node, "host": name, "address": name, "nproc": self.ranks, "agent": name}
        hello |= {
            "switches": [f"block{self.node // 128}", f"leaf{self.node // 16}"],
            "ended": False,
            "signal": "",
            "copies": 0,
            "term": self.term,
        }
        self._sent.clear()
        local = writer.get_extra_info("sockname")[:2]
        send_and_wait("hello", ready=self.is_ready, **{"from": local}, **hello, **self.in_round)
        beating, is_first = asyncio.create_task(beat()), True
        try:
            while line := await reader.readline():
                message = json.loads(line)
                match message["kind"]:
                    case "alive":
                        Agent.waits = max(Agent.waits, time.monotonic() - self._sent.popleft())
                        self.adopted += is_first and message["at"] is not None
                        is_first = False
                    case "round":
                        self.in_round, self.is_ready = {key: message[key] for key in NO_ROUND}, False
                        self.term = message["term"]
                        if message["rank"] == 0:
                            send("master", round=message["round"], port=1)
                    case "break":
                        self.in_round, self.is_ready = NO_ROUND, True
                        self.broken += 1
                        send_and_wait("ready", failures=[], after=message["round"])
        finally:
            beating.cancel()


class Bench:
    """A coordinator and its agents, and a table of what happens to them."""

    def __init__(self, folder: Path, args: argparse.Namespace):
        self.run, self.port = RunDir(folder / "bench"), free_port()
        overrides = [f"nodes={args.agents - args.lose}:{args.agents}", f"nproc_per_node={args.ranks}", "hardware=h100"]
        overrides += ["model=llama3_8b", "data=synthetic", f"data.global_batch={64 * args.agents * args.ranks}"]
        overrides += ["data.micro_batch=1", "elastic.wait_for_nodes_s=600"]
        write_atomic(self.run.config, dump_config(compose_job(overrides)))
        write_atomic(self.run.token, "token", mode=0o600)
        self.run.attempt(0).mkdir(parents=True)
        print(f"{'':<34} {'seconds':>8} {'CPU s':>8} {'MiB':>6} {'longest wait for an answer':>27}", flush=True)

    def start(self) -> None:
        env = {**os.environ, ATTEMPT_ENV: "0", COORDINATOR_ENV: f"127.0.0.1:{self.port}"}
        command = [sys.executable, "-m", "fsdp_jobs.control.server", str(self.run.path)]
        log = self.run.process_log(0, "coordinator").open("a")
        self.process = subprocess.Popen(command, env=env, stderr=log)
        self.watched = psutil.Process(self.process.pid)

    @contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Print what the coordinator takes for something; a process that was not there before counts from its start."""
        before, began, Agent.waits = (self.process.pid, self._cpu()), time.monotonic(), 0.0
        yield
        cpu = self._cpu() - (before[1] if before[0] == self.process.pid else 0.0)
        seconds, mib = time.monotonic() - began, self.watched.memory_info().rss / 2**20
        print(f"{what:<34} {seconds:>8.2f} {cpu:>8.2f} {mib:>6.0f} {Agent.waits:>25.3f} s", flush=True)

    def nodes_of_round(self, number: int) -> int | None:
        """Return how many nodes form a round; None before it has begun."""
        started = (e for e in read_events(self.run) if isinstance(e, RoundStarted) and e.round == number)
        return next((len(e.nodes) for e in started), None)

    def _cpu(self) -> float:
        times = self.watched.cpu_times()
        return times.user + times.system


async def until(true: Callable[[], Any], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError("it does not get there")
        await asyncio.sleep(0.02)


async def measure(bench: Bench, args: argparse.Namespace) -> None:
    Agent.proving = asyncio.Semaphore(_AT_ONCE)
    bench.start()
    with bench.phase(f"{args.agents} agents form a round"):
        agents = [Agent(bench.port, node, args.ranks) for node in range(args.agents)]
        await until(lambda: all(not agent.is_ready for agent in agents))
    with bench.phase("train"):
        await asyncio.sleep(args.seconds)
    lost = agents[args.agents // 3 :][: args.lose]
    left = [agent for agent in agents if agent not in lost]
    with bench.phase(f"lose {args.lose} at once, all stop"):
        for agent in lost:
            agent.running.cancel()
        await until(lambda: all(agent.broken for agent in left))
    with bench.phase(f"the {len(left)} left form the next round"):
        await until(lambda: sum(not agent.is_ready for agent in left) == bench.nodes_of_round(1))
    left = [agent for agent in left if not agent.is_ready]  # the others are spares
    with bench.phase("train"):
        await asyncio.sleep(args.seconds)
    before = [agent.adopted for agent in left]
    with bench.phase("adopt a new coordinator"):
        bench.process.kill()
        bench.process.wait()
        bench.start()
        await until(lambda: all(agent.adopted > was for agent, was in zip(left, before, strict=True)))
    with bench.phase("train"):
        await asyncio.sleep(args.seconds)
    assert all(agent.broken == 1 for agent in left), "the round was broken again"
    assert any(isinstance(event, Adopted) for event in read_events(bench.run))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=125)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--lose", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0, help="to train between events")
    args = parser.parse_args()
    raise_file_limit()
    print(f"{time.strftime('%Y-%m-%d')}: {args.agents} agents of {args.ranks} ranks")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), args)
        try:
            asyncio.run(measure(bench, args))
        finally:
            bench.process.kill()


if __name__ == "__main__":
    main()
