"""The job's control process: the coordinator behind a TCP server. No torch.

    python -m fsdp_jobs.control.server RUN_DIR

The launcher starts one per attempt. If it dies, ranks continue until their leases expire; a new one adopts the round
from the agents' `Hello`s.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import math
import os
import secrets
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import partial

from fsdp_jobs.config.schema import load_config
from fsdp_jobs.control.coordinator import Coordinator
from fsdp_jobs.control.fencing import CHARGE_S
from fsdp_jobs.control.placement import ConnectedAgent
from fsdp_jobs.control.requests import read_requests
from fsdp_jobs.run import log, messages
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import ATTEMPT_ENV, COORDINATOR_ENV
from fsdp_jobs.run.processes import STOP_SIGNALS, raise_file_limit, wildcards
from fsdp_jobs.run.protocol import COORDINATOR, unreachable_s, welcome
from fsdp_jobs.run.term import Fenced
from fsdp_jobs.run.verdict import EXIT_FAILED, Verdict

_TICK_S = 0.1
_REQUESTS_S = 0.3  # between looks for requests in the run directory
_GIVE_WAY_S = 0.0005  # until the planning thread yields; Python's default, 5 ms, would delay each system call here
_FAREWELL_S = 30.0  # for agents to leave after the verdict
_PROVE_S = 10.0  # for a new connection to prove that it has the token
_STRANGERS = 256  # unproven connections allowed beyond the job's nodes; a new one replaces the oldest
_REPORT_S = 60.0  # between two log lines about refused connections
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_LOOK_S = 4.0  # between two looks whether another coordinator has taken over

logger = logging.getLogger(__name__)


class Server:
    """Connects agents to the coordinator."""

    def __init__(self, coordinator: Coordinator, token: str):
        self.coordinator, self.token = coordinator, token
        self._read = messages.reader(coordinator.handlers)
        self._strangers: dict[asyncio.StreamWriter, None] = {}  # oldest first
        self._most_strangers = _STRANGERS + coordinator.formation.max_nodes  # all agents may come at once
        self._refused = 0
        self._reported = -_REPORT_S

    async def serve(self, hosts: list[str], port: int) -> int:
        """Serve until the attempt is over. Returns its exit code."""
        loop, coordinator = asyncio.get_running_loop(), self.coordinator
        for number in STOP_SIGNALS:
            why = f"{signal.Signals(number).name} received"
            loop.add_signal_handler(number, lambda why: coordinator.on_stop(why, time.monotonic()), why)
        watches = [asyncio.create_task(watch) for watch in (self._keep_charge(), self._watch_requests())]
        server = await asyncio.start_server(self._agent, hosts, port, reuse_port=True)  # see hold_port
        try:  # `async with` would wait for connections since Python 3.12, and answer agents after an error, too
            while (exit_code := self._exit_code()) is None:
                await asyncio.sleep(_TICK_S)
                for watch in watches:
                    if watch.done():
                        watch.result()  # raises its error
                coordinator.tick(time.monotonic())
        finally:
            server.close()
        return exit_code  # `asyncio.run` cancels the watches

    def _exit_code(self) -> int | None:
        """Return the attempt's exit code once nothing is left to do, even if another coordinator took over."""
        coordinator, verdict = self.coordinator, None
        run, attempt, closed_at = coordinator.run, coordinator.number, coordinator.closed_at
        if coordinator.is_superseded:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)  # it has nothing to finish
            with suppress(OSError):  # it looks again: its launcher would start another one in place of the newer
                verdict = Verdict.read(run, attempt)
                if verdict is None and run.last_attempt() > attempt:
                    return EXIT_FAILED
        elif closed_at is not None and not (coordinator.agents and time.monotonic() - closed_at <= _FAREWELL_S):
            verdict = coordinator.verdict
        return verdict.exit_code_of_attempt if verdict is not None else None

    async def _watch_requests(self) -> None:
        """Read the requests in a thread, so agents get answers while the file system hangs."""
        coordinator = self.coordinator
        while True:
            await asyncio.sleep(_REQUESTS_S)
            found = await asyncio.to_thread(read_requests, coordinator.run, coordinator.round.running)
            coordinator.on_requests(found, time.monotonic())

    async def _keep_charge(self) -> None:
        """Take charge of the run, and give up when another coordinator does, of this or a later attempt.

        Coordinators of one attempt claim numbers in its folder. If the run directory does not answer, either no
        coordinator can take over, or only this machine is cut off from it. The job trains on in both cases, and the
        trainer's ranks check their term before they write.
        """
        coordinator, run, terms = self.coordinator, self.coordinator.run, self.coordinator.terms
        coordinator.in_charge_until, has_failed = time.monotonic(), False
        while True:
            began = time.monotonic()
            coordinator.asked_at = min(coordinator.asked_at, began)
            try:
                await asyncio.to_thread(terms.check)
                if not terms.number:
                    await asyncio.to_thread(terms.take_charge, coordinator.term_seen)
                    coordinator.term_seen = max(coordinator.term_seen, terms.number)  # rounds get higher terms than it
                    coordinator.leases.on_charge(time.monotonic())
                if away_s := coordinator.storage_away_s(time.monotonic()):
                    logger.warning("storage has not answered for %.0f s: %s", away_s, run.path)
                coordinator.in_charge_until, coordinator.asked_at = began + CHARGE_S, math.inf
                if has_failed:
                    coordinator.warn("")
                    has_failed = False
            except Fenced:
                break
            except OSError as e:  # an answer, too
                coordinator.asked_at, has_failed = math.inf, True
                coordinator.warn(f"the run directory cannot be used: {run.path}: {e}")
            await asyncio.sleep(_LOOK_S)
        coordinator.on_superseded()

    async def _agent(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        agent, is_direct, is_end = None, False, False
        try:
            self._probe(writer)
            if await self._is_authentic(reader, writer):
                hello = messages.Hello.read(await reader.readline())
                peer, own = (writer.get_extra_info(end)[0] for end in ("peername", "sockname"))
                is_beside = peer == own or ipaddress.ip_address(peer.partition("%")[0]).is_loopback
                send, drop, heard = partial(_send, writer), writer.close, time.monotonic()
                agent = ConnectedAgent(**vars(hello.agent), send=send, drop=drop, heard=heard, is_beside=is_beside)
                is_direct = hello.local == writer.get_extra_info("peername")[:2]  # without a proxy in between
                if not self.coordinator.is_superseded and self.coordinator.on_hello(agent, hello, time.monotonic()):
                    while received := await reader.readline():
                        self.coordinator.on_message(agent, self._read(received), time.monotonic())
                    is_end = is_direct  # then, without `Away`, the agent is dead and its kernel closed the connection
        except OSError as e:
            if agent is not None and e.errno in _UNREACHABLE:
                agent.is_unreachable = True  # `tick` drops it if others can be reached
        except ValueError:
            pass  # an invalid message ends the connection
        writer.close()
        if agent is not None and not (agent.is_unreachable or (agent.is_away and is_direct)):
            why = f"node {agent.node} ({agent.host}) closed its connection: its agent is gone{agent.memory_note}"
            self.coordinator.on_gone(agent, why, time.monotonic(), certain=is_end)

    def _probe(self, writer: asyncio.StreamWriter) -> None:
        """Enable TCP keepalive: the other kernel answers even if its processes are blocked."""
        connection = writer.get_extra_info("socket")
        elastic = self.coordinator.elastic
        with suppress(OSError):  # some sandboxes lack these options; then silence shows that a node is lost
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if sys.platform == "linux":
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
                limit_s = unreachable_s(elastic) + elastic.heartbeat_interval_s  # since the last packet, not the cut
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * limit_s))

    async def _is_authentic(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Challenge a new connection and prove to it that this is the coordinator."""
        if len(self._strangers) >= self._most_strangers:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[writer] = None
        challenge, received = messages.Challenge(secrets.token_hex()), b""
        try:
            _send(writer, challenge)
            with suppress(ConnectionError):  # closed before it was read
                received = await asyncio.wait_for(reader.readline(), _PROVE_S)
            if not received and writer in self._strangers:
                return False  # it only checked whether the port is open, as guard steps on SLURM do
            _send(writer, welcome(self.token, COORDINATOR, challenge, received))
            return True
        except (OSError, ValueError):
            pass
        finally:
            self._strangers.pop(writer, None)
        self._refused += 1
        if time.monotonic() - self._reported >= _REPORT_S:
            peer = writer.get_extra_info("peername")
            logger.warning("%d connections refused, the last from %s: no proof of the token", self._refused, peer)
            self._refused, self._reported = 0, time.monotonic()
        return False


def _send(writer: asyncio.StreamWriter, message: messages.Message) -> None:
    if not writer.is_closing():
        writer.write(message.line())


def main(run_dir: str) -> int:
    log.configure()
    raise_file_limit()
    sys.setswitchinterval(_GIVE_WAY_S)
    run, port = RunDir(run_dir), int(os.environ[COORDINATOR_ENV].rpartition(":")[2])
    coordinator = Coordinator(load_config(run.config), run, int(os.environ[ATTEMPT_ENV]), time.monotonic())
    return asyncio.run(Server(coordinator, run.token.read_text()).serve(wildcards(), port))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
