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
from fsdp_jobs.run import messages
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import ATTEMPT_ENV, COORDINATOR_ENV
from fsdp_jobs.run.events import Adopted, RoundStarted, read_events
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.messages import NO_ROUND, Message
from fsdp_jobs.run.processes import free_port, raise_file_limit
from fsdp_jobs.run.protocol import AGENT, proof
from fsdp_jobs.run.rank_state import Report, Times

_RETRY_S = 0.2  # as the agents' own link
_AT_ONCE = 100  # connections that prove themselves; the coordinator drops the oldest of more than 256
_READ = messages.reader(messages.FROM_COORDINATOR)


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
            with suppress(OSError, ValueError):
                async with Agent.proving:
                    reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                    await self._prove(reader, writer)
                try:
                    await self._talk(reader, writer)
                finally:
                    writer.close()
            await asyncio.sleep(_RETRY_S)

    async def _prove(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        challenge = messages.Challenge.read(await reader.readline()).nonce
        writer.write(messages.Answer("mine", proof("token", AGENT, challenge, "mine")).line())
        messages.Welcome.read(await reader.readline())

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def send_and_wait(message: Message) -> None:
            self._sent.append(time.monotonic())
            writer.write(message.line())

        async def beat() -> None:
            for step in range(1, 1 << 30):
                await asyncio.sleep(1.0)
                rank = Report(time.time(), step, 0, 1), Times()
                ranks = [] if self.is_ready else [rank] * self.ranks
                send_and_wait(messages.Beat(ranks, {"silent": 0.0}, time.monotonic()))

        name, switches = f"node{self.node}", (f"block{self.node // 128}", f"leaf{self.node // 16}")
        agent = messages.Agent(0, self.node, name, name, self.ranks, switches, copies=0, id=name)
        state = (self.in_round, self.is_ready, False, "")
        local = writer.get_extra_info("sockname")[:2]
        self._sent.clear()
        send_and_wait(messages.Hello(agent, self.term, *state, local, time.monotonic()))
        beating, is_first = asyncio.create_task(beat()), True
        try:
            while line := await reader.readline():
                try:
                    message = _READ(line)
                except ValueError:
                    continue  # a guard's
                match message:
                    case messages.Alive():
                        Agent.waits = max(Agent.waits, time.monotonic() - self._sent.popleft())
                        self.adopted += is_first and message.at is not None
                        is_first = False
                    case messages.Round():
                        self.in_round, self.is_ready, self.term = message, False, message.term
                        if message.rank == 0:
                            writer.write(messages.Master(message.number, name, 1).line())
                    case messages.Break():
                        self.in_round, self.is_ready = NO_ROUND, True
                        self.broken += 1
                        send_and_wait(messages.Ready(message.round, time.monotonic()))
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
