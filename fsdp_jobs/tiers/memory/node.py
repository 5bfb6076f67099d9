"""The agent's part in snapshots: keep their folder, seal what ranks write, copy it to a partner node.

If no other node holds a replica of a shard, the agent sends it to a partner node. Agents connect directly, so neither
ranks nor collectives wait. After both have proved that they know the job's token, the sender sends a `Copy` and its
data, and the receiver answers with `Kept`.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import socketserver
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.node import tier
from fsdp_jobs.node.guard import Guard
from fsdp_jobs.run import events
from fsdp_jobs.run.checksum import fill
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import MEMORY_ENV
from fsdp_jobs.run.messages import Challenge, Message, Round
from fsdp_jobs.run.processes import wildcards
from fsdp_jobs.run.protocol import LINE, PARTNER, enter, welcome
from fsdp_jobs.run.threads import start_thread
from fsdp_jobs.tiers.memory.slots import (
    COPIES,
    Slot,
    Snapshot,
    adopt_folder,
    newest_in,
    remove_left,
    restore_folder,
    slots_in,
)

_THREADS = min(8, max(1, len(os.sched_getaffinity(0)) // 8))  # to seal with; the other cores are for the ranks
_LOOK_S = 0.01  # between two checks for a new snapshot
_LOOKS = 5  # after a change, because the next one may have the same time stamp
_CONNECT_S = 3.0  # to wait for a connection: a dead machine does not refuse, and the next round's partner waits
_PATIENCE_S = 30.0  # to wait for a partner's answer
_STRANGERS = 16  # most connections without proof at a time
_REPEAT_S = 5.0  # most between two tries: less after few failures, or when a round begins

Partner = tuple[str, int]  # address and port of the agent that receives the copies


class Copy(Message):
    """An agent sends a snapshot to its partner."""

    snapshot: Snapshot  # its data follows
    sums: dict[str, str]  # checksums by tensor


class Kept(Message):
    """The partner has the snapshot, with the checksums of `Copy`."""


class Tier(tier.Tier):
    """A node's folder of snapshots, with the threads that seal, send and receive."""

    def __init__(self, memory: Path, run: RunDir, attempt: int, node: int):
        """Adopt or make the folder and bind a port; `start` starts the threads.

        Raises:
            OSError: the folder cannot be used.
        """
        self.run, self.attempt, self.node = run, attempt, node
        self.folder, self._lock = adopt_folder(memory, run)
        self._term = 0  # of the current round
        self._partner: Partner | None = None
        self._kept: dict[int, tuple[int, int]] = {}  # rank -> term and step of its newest sealed and copied snapshot
        self._token = run.token.read_text()
        self._connection: tuple[Partner, socket.socket, IO[bytes]] | None = None
        self._over = False
        self._news = threading.Event()  # a new round, or the end
        self._server = _Server(self.folder / COPIES, self._token)
        self.port = int(self._server.server_address[1])
        self.newest_term, _ = max(newest_in(self.folder), (0, 0))
        self.environment = {MEMORY_ENV: str(self.folder)}

    @classmethod
    def of_node(cls, config: JobConfig, run: RunDir, attempt: int, node: int) -> Self | None:
        """Return the tier of a node; None, after removing leftovers, if the job takes no snapshots."""
        memory = Path(config.checkpoint.memory.dir)
        if config.checkpoint.memory.every_steps:
            return cls(memory, run, attempt, node)
        remove_left(memory, run)
        return None

    def start(self, guards: Sequence[Guard]) -> None:
        """Start to seal, send and receive."""
        self._guards = guards
        start_thread(self._server.serve_forever, "copies")
        self._keeper = start_thread(self._keep, "snapshots")

    def begin_round(self, round_: Round) -> None:
        """Handle the snapshots of this round from now on, and send copies to its partner."""
        with suppress(OSError):  # the ranks then report that they cannot take snapshots
            self._lock = restore_folder(self.folder, self.run) or self._lock
        before, self._term, self._partner = self._connection, round_.term, round_.partner
        self._news.set()
        if before is not None and before[0] != self._partner:
            with suppress(OSError):
                before[1].shutdown(socket.SHUT_RDWR)  # the old partner may be dead while the sender waits

    def _keep(self) -> None:
        """Seal and send snapshots until the end."""
        failures = seen_at = looks = 0  # failures in a row; checks since the folder last changed
        while not self._over:
            if self._news.wait(min(_REPEAT_S, 0.1 * 2 ** min(failures, 6)) if failures else _LOOK_S):
                self._news.clear()
            try:
                seen_at, before = self.folder.stat().st_mtime_ns, seen_at
                looks = looks + 1 if seen_at == before and not failures else 0
                if looks >= _LOOKS:
                    continue
                for slot in slots_in(self.folder):
                    snapshot = None if slot.copied.exists() else slot.snapshot()
                    if snapshot is not None and snapshot.term == self._term:
                        looks = -1  # check an uncopied snapshot again
                        self._take_care(slot, snapshot)
                failures = 0
            except Exception as e:  # whatever it is, the next try may succeed
                self._disconnect()
                failures += 1
                if failures == 6:  # after 6 s or more: not because the partner is lost, which would end the round
                    self._tell(f"node {self.node}'s snapshot is not with {self._partner}: {type(e).__name__}: {e}")

    def _tell(self, why: str) -> None:
        """Record a failure to keep snapshots."""
        events.record(self.run, self.attempt, events.CheckpointFailed(newest_in(self.folder)[1], f"in memory: {why}"))

    def _take_care(self, slot: Slot, snapshot: Snapshot) -> None:
        """Seal and copy one snapshot. Raises: OSError, ValueError or KeyError if that fails."""
        if self._kept.get(snapshot.rank) != (snapshot.term, snapshot.step):
            sums = json.loads(slot.sums.read_text()) if slot.sums.exists() else slot.seal(snapshot, _THREADS)
            if sums is None:
                return
            is_whole = self._copy(slot, snapshot, sums)
            self._kept[snapshot.rank] = (snapshot.term, snapshot.step)
            same = {entry.name: sums[entry.name] for entry in snapshot.entries if entry.is_replicated}
            for guard in self._guards:
                guard.take(snapshot.term, snapshot.step, snapshot.rank, same)
            if not is_whole:
                slot.copied.touch()  # tells its rank not to wait: nothing is left to copy
                return
        if all(guard.may_follow(snapshot.step) for guard in self._guards):
            slot.copied.touch()

    def _copy(self, slot: Slot, snapshot: Snapshot, sums: dict[str, str]) -> bool:
        """Copy shards without a replica to the partner. Returns False if the snapshot had changed.

        Raises: OSError, ValueError or KeyError if the copy fails otherwise.
        """
        copy, partner = snapshot.alone(), self._partner
        if partner is not None and copy.entries:
            try:
                self._send(partner, slot, snapshot, copy, sums)
            except ValueError:
                if not (wrong := slot.verify()):
                    raise
                slot.withdraw()  # it changed after it was sealed; wait for the next one
                self._tell(f"node {self.node}'s snapshot of step {snapshot.step} has changed: {wrong[:3]}")
                self._disconnect()
                return False
        return True

    def _send(self, partner: Partner, slot: Slot, snapshot: Snapshot, copy: Snapshot, sums: dict[str, str]) -> None:
        """Send a copy. Raises: OSError, ValueError or KeyError if the partner does not confirm it."""
        connection, lines = self._connected(partner)
        connection.sendall(Copy(copy, {entry.name: sums[entry.name] for entry in copy.entries}).line())
        begins = {entry.name: entry.begin for entry in snapshot.entries}
        with slot.data.open("rb") as data:
            for entry in copy.entries:
                if entry.bytes:
                    connection.sendfile(data, begins[entry.name], entry.bytes)  # in the kernel, without a copy
        if not (answer := lines.readline()):
            raise ValueError("the partner has not received all of it")
        Kept.read(answer)

    def _connected(self, partner: Partner) -> tuple[socket.socket, IO[bytes]]:
        """Return a connection to the partner, which has proved that it is an agent of the job."""
        if self._connection is not None and self._connection[0] == partner:
            return self._connection[1:]
        self._disconnect()
        connection = socket.create_connection(partner, timeout=_CONNECT_S)
        connection.settimeout(_PATIENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        lines = connection.makefile("rb")
        self._connection = partner, connection, lines
        enter(connection, lines, self._token, PARTNER)
        return connection, lines

    def _disconnect(self) -> None:
        if self._connection is not None:
            for end in reversed(self._connection[1:]):
                with suppress(OSError):
                    end.close()
            self._connection = None

    def close(self, is_over: bool) -> None:
        """Stop; if the job is over, remove the folder."""
        self._over = True
        self._news.set()
        self._server.shutdown()
        self._server.server_close()
        self._disconnect()
        self._keeper.join(_PATIENCE_S)
        if is_over:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


class _Server(socketserver.ThreadingTCPServer):
    """Receives the copies that other agents send."""

    daemon_threads = True

    def __init__(self, folder: Path, token: str):
        if "::" in wildcards():
            self.address_family = socket.AF_INET6
        super().__init__(("", 0), _Receiver)
        self.folder, self.token = folder, token
        self.strangers = threading.BoundedSemaphore(_STRANGERS)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # IPv4 too
        super().server_bind()


class _Receiver(socketserver.StreamRequestHandler):
    """Handles the connection of one agent."""

    timeout = _PATIENCE_S  # until it has proved that it knows the token
    server: _Server

    def handle(self) -> None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            self._challenge()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self.connection.settimeout(None)  # until the next snapshot
            while received := self.rfile.readline():
                self.connection.settimeout(_PATIENCE_S)
                self._receive(Copy.read(received))
                self.wfile.write(Kept().line())
                self.connection.settimeout(None)

    def _challenge(self) -> None:
        """Challenge the other end and prove to it that this is an agent of the job.

        Raises: ValueError if the other end is none, or too many connections are unproven.
        """
        if not self.server.strangers.acquire(blocking=False):
            raise ValueError("too many strangers")
        try:
            challenge = Challenge(secrets.token_hex())
            self.wfile.write(challenge.line())
            self.wfile.write(welcome(self.server.token, PARTNER, challenge, self.rfile.readline(LINE)).line())
        finally:
            self.server.strangers.release()

    def _receive(self, copy: Copy) -> None:
        """Receive a copy and seal it. Raises: ValueError if its checksums differ from the sender's."""
        snapshot = copy.snapshot
        slot = Slot(self.server.folder / snapshot.name)
        slot.withdraw()
        with memoryview(slot.map(snapshot.size)) as data:
            for entry in snapshot.entries:
                if not fill(self.rfile, data[entry.begin :][: entry.bytes]):
                    raise ValueError("cut off")
        slot.publish(snapshot)
        sums = slot.seal(snapshot, _THREADS)
        if sums is None or not copy.sums.items() <= sums.items():
            slot.withdraw()
            raise ValueError("damaged in transit")
