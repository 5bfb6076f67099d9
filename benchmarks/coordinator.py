"""What the coordinator costs at 1,000 ranks: CPU and memory with 125 agents of 8 ranks that beat every second.

    python benchmarks/coordinator.py [--agents 125] [--ranks 8] [--seconds 20]

The coordinator is the real process; the agents are connections of this one, which send what agents send.
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
from pathlib import Path

import psutil

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.schema import dump_config
from fsdp_jobs.elastic.protocol import AGENT, proof
from fsdp_jobs.run.directory import RunDir, write_atomic
from fsdp_jobs.run.env import ATTEMPT_ENV, COORDINATOR_ENV
from fsdp_jobs.run.processes import free_port


async def agent(port: int, token: str, node: int, ranks: int, seconds: float) -> int:
    """One agent's part of a round; returns how many messages it received."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    def send(kind: str, **content: object) -> None:
        writer.write((json.dumps({"kind": kind, **content}) + "\n").encode())

    challenge = json.loads(await reader.readline())["nonce"]
    send("answer", nonce="mine", proof=proof(token, AGENT, challenge, "mine"))
    await reader.readline()  # the coordinator's proof
    identity = {"node": node, "host": f"node{node}", "address": f"node{node}", "nproc": ranks, "switches": []}
    no_round = {"attempt": 0, "round": -1, "epoch": 0, "size": 0, "shard_group": 0, "ended": False, "signal": ""}
    local = writer.get_extra_info("sockname")[:2]
    send("hello", agent=f"agent-{node}", ready=True, at=time.monotonic(), **{"from": local}, **no_round, **identity)
    received, end, step = 0, time.monotonic() + seconds, 0

    async def read() -> None:
        nonlocal received
        while await reader.readline():
            received += 1

    reading = asyncio.create_task(read())
    while time.monotonic() < end:
        await asyncio.sleep(1.0)
        step += 1
        send("beat", ranks=[[step, 0, 1]] * ranks, at=time.monotonic())
    reading.cancel()
    writer.close()
    return received


async def agents(port: int, token: str, count: int, ranks: int, seconds: float) -> list[int]:
    return await asyncio.gather(*(agent(port, token, n, ranks, seconds) for n in range(count)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=125)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run, port = RunDir(Path(folder) / "bench"), free_port()
        overrides = [f"nodes={args.agents}", f"nproc_per_node={args.ranks}", "hardware=h100", "model=llama3_8b"]
        write_atomic(run.config, dump_config(compose_job(overrides)))
        write_atomic(run.token, "token", mode=0o600)
        run.attempt(0).mkdir(parents=True)
        env = {**os.environ, ATTEMPT_ENV: "0", COORDINATOR_ENV: f"127.0.0.1:{port}"}
        command = [sys.executable, "-m", "fsdp_jobs.elastic.coordinator", str(run.path)]
        with subprocess.Popen(command, env=env) as process:
            try:
                watched = psutil.Process(process.pid)
                while not any(c.status == psutil.CONN_LISTEN for c in watched.net_connections()):
                    time.sleep(0.05)
                asyncio.run(agents(port, "token", args.agents, args.ranks, 3.0))  # connect and form once: not counted
                before, began = watched.cpu_times(), time.monotonic()
                received = asyncio.run(agents(port, "token", args.agents, args.ranks, args.seconds))
                after, took = watched.cpu_times(), time.monotonic() - began
                cpu = after.user + after.system - before.user - before.system
                memory = watched.memory_info().rss / 2**20
            finally:
                process.kill()
    print(f"{time.strftime('%Y-%m-%d')}: {args.agents} agents x {args.ranks} ranks for {took:.0f} s")
    print(f"coordinator: {cpu / took:.2%} of a core, {memory:.0f} MiB resident; {sum(received)} messages answered")


if __name__ == "__main__":
    main()
