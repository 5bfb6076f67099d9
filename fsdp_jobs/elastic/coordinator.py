"""The job's control process on the network. No torch.

Ranks that train do not need it: when this process dies they continue, and a new one adopts the round from the
agents' hellos.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import os
import signal
import sys
import time
from contextlib import suppress

from fsdp_jobs.config.schema import load_config
from fsdp_jobs.elastic.placement import ConnectedAgent
from fsdp_jobs.elastic.protocol import Message
from fsdp_jobs.elastic.rounds import Coordinator
from fsdp_jobs.run import log
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import ATTEMPT_ENV, COORDINATOR_ENV

_TICK_S = 0.1


class Server:
    """The coordinator on the network."""

    def __init__(self, coordinator: Coordinator, token: str):
        self.coordinator, self.token = coordinator, token

    async def serve(self, host: str, port: int) -> int:
        """Serve until the attempt is over. Returns its exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            loop.add_signal_handler(number, self._on_signal, f"{signal.Signals(number).name} received")
        async with await asyncio.start_server(self._agent, host, port):
            while True:
                await asyncio.sleep(_TICK_S)
                now = time.monotonic()
                self.coordinator.tick(now)
                verdict = self.coordinator.verdict
                everyone_left = not self.coordinator.agents or now - self.coordinator.closed_at > 30
                if verdict is not None and everyone_left:
                    return verdict.exit_code_of_attempt

    def _on_signal(self, why: str) -> None:
        self.coordinator.on_stop(why, time.monotonic())

    async def _agent(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def send(message: Message) -> None:
            if not writer.is_closing():
                writer.write((json.dumps(message) + "\n").encode())

        agent: ConnectedAgent | None = None
        with suppress(ConnectionError, ValueError, KeyError, asyncio.IncompleteReadError):
            hello = json.loads(await asyncio.wait_for(reader.readline(), 10) or b"{}")
            if not hmac.compare_digest(str(hello.get("token", "")), self.token):
                writer.close()
                return
            agent = ConnectedAgent(
                **{k: hello[k] for k in ("node", "host", "address", "nproc", "switches")},
                send=send,
                drop=writer.close,
                heard=time.monotonic(),
                id=hello["agent"],
                ended=hello.get("ended", False),
            )
            running = hello["round"], hello["size"], hello["shard_group"]
            self.coordinator.on_hello(agent, *running, time.monotonic())
            if hello["ready"]:
                self.coordinator.on_ready(agent, [], time.monotonic())
            while line := await reader.readline():
                self._dispatch(agent, json.loads(line))
        if agent is not None:
            why = f"node {agent.node} ({agent.host}) closed its connection: its agent is gone"
            self.coordinator.on_gone(agent, why, time.monotonic())
        writer.close()

    def _dispatch(self, agent: ConnectedAgent, message: Message) -> None:
        now, kind = time.monotonic(), message["kind"]
        if kind == "beat":
            self.coordinator.on_beat(agent, message["ranks"], now)
            agent.send({"kind": "alive"})
        elif kind == "failed":
            self.coordinator.on_failed(agent, message["failures"], now)
        elif kind == "ready":
            self.coordinator.on_ready(agent, message["failures"], now)
        elif kind == "master":
            self.coordinator.on_master(agent, message)
        elif kind == "notice":
            self.coordinator.on_stop(f"node {agent.node} received {message['signal']}", now)
        elif kind == "stacks":
            self.coordinator.on_stacks(message)
        elif kind == "ended":
            self.coordinator.on_ended(agent, now)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The control process of one attempt.")
    parser.add_argument("run_dir")
    args = parser.parse_args(argv)
    log.configure()
    run = RunDir(args.run_dir)
    coordinator = Coordinator(load_config(run.config), run, int(os.environ[ATTEMPT_ENV]), time.monotonic())
    server = Server(coordinator, run.token.read_text())
    port = os.environ[COORDINATOR_ENV].rpartition(":")[2]
    return asyncio.run(server.serve("0.0.0.0", int(port)))


if __name__ == "__main__":
    sys.exit(main())
