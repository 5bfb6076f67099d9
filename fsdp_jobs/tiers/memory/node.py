"""The agent's part in snapshots: keep the folder, seal what ranks capture, and copy it to a partner node.

Shards that no replica on another node holds are sent to one other node, over connections between the agents, so that
neither ranks nor collectives wait. After both have proved that they know the job's token (`proof`):
    sender      capture, sums   its description and checksums, followed by its data
    receiver    is              "whole": it is kept, and its checksums are these
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
from typing import IO, Any, Self

from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.node import tier
from fsdp_jobs.node.guard import Guard
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import MEMORY_ENV
from fsdp_jobs.run.protocol import PARTNER, Message, enter, line, welcome
from fsdp_jobs.tiers.memory.slots import (
    COPIES,
    Capture,
    Slot,
    adopt_folder,
    newest_in,
    remove_left,
    restore_folder,
    slots_in,
)

_THREADS = min(8, max(1, len(os.sched_getaffinity(0)) // 8))  # that seal; the other cores are the ranks'
_LOOK_S = 0.01  # between two looks for a new capture
_LOOKS = 5  # after a change: the next one may have the same time stamp
_CHUNK = 1 << 22  # bytes sent at once
_PATIENCE_S = 30.0  # with a partner that does not answer
_STRANGERS = 16  # connections at once that have not proved themselves
_REPEAT_S = 5.0  # until it is tried again, at most: sooner after few failures, and when a round begins


class Tier(tier.Tier):
    """A node's folder of captures, with the threads that seal, send and receive."""

    def __init__(self, memory: Path, run: RunDir, attempt: int, node: int):
        """Adopt or make the folder, and take a port; `start` begins.

        Raises:
            OSError: nothing can be kept there.
        """
        self.run, self.attempt, self.node = run, attempt, node
        self.folder, self._lock = adopt_folder(memory, run)
        self._term = 0  # of this round
        self._partner: list[Any] | None = None
        self._kept: dict[int, tuple[int, int]] = {}  # rank -> term and step of what is sealed and copied
        self._token = run.token.read_text()
        self._connection: tuple[list[Any], socket.socket, IO[bytes]] | None = None
        self._over = False
        self._news = threading.Event()  # there is another round, or an end
        self._server = _Server(("", 0), self.folder / COPIES, self._token)
        self.port = int(self._server.server_address[1])
        term, _ = max(newest_in(self.folder), (0, 0))
        self.environment, self.hello = {MEMORY_ENV: str(self.folder)}, {"copies": self.port, "term": term}
        self._keeper = threading.Thread(target=self._keep, name="captures", daemon=True)

    @classmethod
    def of_node(cls, config: JobConfig, run: RunDir, attempt: int, node: int) -> Self | None:
        """Return a node's; None for a job that captures nothing: then what others have left here is removed."""
        memory = Path(config.checkpoint.memory.dir)
        if config.checkpoint.memory.every_steps:
            return cls(memory, run, attempt, node)
        remove_left(memory, run)
        return None

    def start(self, guards: Sequence[Guard]) -> None:
        """Begin to seal, send and receive."""
        self._guards = guards
        threading.Thread(target=self._server.serve_forever, name="copies", daemon=True).start()
        self._keeper.start()

    def begin_round(self, round_: Message) -> None:
        """Take care of a round's captures from now on; its `partner` is the host and port that gets copies, or None."""
        with suppress(OSError):  # then ranks tell that they cannot capture
            self._lock = restore_folder(self.folder, self.run) or self._lock
        before, self._term, self._partner = self._connection, round_["term"], round_["partner"]
        self._news.set()
        if before is not None and before[0] != self._partner:
            with suppress(OSError):
                before[1].shutdown(socket.SHUT_RDWR)  # it may be dead, and its sender wait

    def _keep(self) -> None:
        """Seal and send what is captured, until the end."""
        failures = seen_at = looks = 0  # failures in a row; looks at a folder in which nothing has changed
        while not self._over:
            if self._news.wait(min(_REPEAT_S, 0.1 * 2 ** min(failures, 6)) if failures else _LOOK_S):
                self._news.clear()
            try:
                seen_at, before = self.folder.stat().st_mtime_ns, seen_at
                looks = looks + 1 if seen_at == before and not failures else 0
                if looks >= _LOOKS:
                    continue
                for slot in slots_in(self.folder):
                    capture = None if slot.copied.exists() else slot.capture()
                    if capture is not None and capture.term == self._term:
                        looks = -1  # what is not copied is looked at again
                        self._take_care(slot, capture)
                failures = 0
            except Exception as e:  # whatever it is, the next look may be better
                self._disconnect()
                failures += 1
                if failures == 6:  # for some 6 s: it is not the loss of that node, which ends the round
                    self._tell(f"node {self.node}'s capture is not with {self._partner}: {type(e).__name__}: {e}")

    def _tell(self, why: str) -> None:
        """Record that no step is captured any more, or that one is lost."""
        events.record(self.run, self.attempt, events.CheckpointFailed(newest_in(self.folder)[1], f"in memory: {why}"))

    def _take_care(self, slot: Slot, capture: Capture) -> None:
        """Raises: OSError, ValueError or KeyError when it is not sealed and copied."""
        if self._kept.get(capture.rank) != (capture.term, capture.step):
            sums = json.loads(slot.sums.read_text()) if slot.sums.exists() else slot.seal(capture, _THREADS)
            if sums is None:
                return
            is_whole = self._copy(slot, capture, sums)
            self._kept[capture.rank] = (capture.term, capture.step)
            same = {entry.name: sums[entry.name] for entry in capture.entries if entry.is_replicated}
            for guard in self._guards:
                guard.take(capture.term, capture.step, capture.rank, same)
            if not is_whole:
                slot.copied.touch()  # nothing is left here to wait for, which its rank sees
                return
        if all(guard.may_follow(capture.step) for guard in self._guards):
            slot.copied.touch()

    def _copy(self, slot: Slot, capture: Capture, sums: dict[str, str]) -> bool:
        """Return whether the partner has what no replica has, False for a capture that has changed.

        Raises: OSError, ValueError or KeyError when neither is so.
        """
        copy, partner = capture.alone(), self._partner
        if partner is not None and copy.entries:
            try:
                self._send(partner, slot, capture, copy, sums)
            except ValueError:
                if not (wrong := slot.verify()):
                    raise
                slot.withdraw()  # it has changed since it was sealed; the next capture will do
                self._tell(f"node {self.node}'s capture of step {capture.step} has changed: {wrong[:3]}")
                self._disconnect()
                return False
        return True

    def _send(self, partner: list[Any], slot: Slot, capture: Capture, copy: Capture, sums: dict[str, str]) -> None:
        """Raises: OSError, ValueError or KeyError when the partner does not have it."""
        connection, lines = self._connected(partner)
        about = {"capture": vars(copy), "sums": {entry.name: sums[entry.name] for entry in copy.entries}}
        connection.sendall(line(about))
        begins = {entry.name: entry.begin for entry in capture.entries}
        with slot.data.open("rb") as data:
            for entry in copy.entries:
                if entry.bytes:
                    connection.sendfile(data, begins[entry.name], entry.bytes)  # from page to page, without a copy
        if json.loads(lines.readline() or b"{}") != {"is": "whole"}:
            raise ValueError("it has not come there whole")

    def _connected(self, partner: list[Any]) -> tuple[socket.socket, IO[bytes]]:
        """Return a connection to a partner that has proved to be an agent of the job."""
        if self._connection is not None and self._connection[0] == partner:
            return self._connection[1:]
        self._disconnect()
        connection = socket.create_connection(tuple(partner), timeout=_PATIENCE_S)
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
        """Stop; when the job is over, remove the folder."""
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
    """Takes what other agents send."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], folder: Path, token: str):
        super().__init__(address, _Receiver)
        self.folder, self.token = folder, token
        self.strangers = threading.BoundedSemaphore(_STRANGERS)


class _Receiver(socketserver.StreamRequestHandler):
    """One agent's connection."""

    timeout = _PATIENCE_S  # until it has proved itself
    server: _Server

    def handle(self) -> None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            if self._is_authentic():
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                self.connection.settimeout(None)  # until the next capture
                while received := self.rfile.readline():
                    self.connection.settimeout(_PATIENCE_S)
                    self._receive(json.loads(received))
                    self.wfile.write(line({"is": "whole"}))
                    self.connection.settimeout(None)

    def _is_authentic(self) -> bool:
        """Challenge the other end, and prove to it that this is an agent of the job."""
        if not self.server.strangers.acquire(blocking=False):
            return False
        try:
            challenge = secrets.token_hex()
            self.wfile.write(line({"nonce": challenge}))
            answer = welcome(self.server.token, PARTNER, challenge, self.rfile.readline(4096))
            if answer is not None:
                self.wfile.write(line(answer))
            return answer is not None
        finally:
            self.server.strangers.release()

    def _receive(self, about: Message) -> None:
        """Raises: ValueError for what is not what its sender sealed."""
        capture = Capture.from_json(json.dumps(about["capture"]))
        slot = Slot.of(self.server.folder, capture)
        slot.withdraw()
        with memoryview(slot.map(capture.size)) as data:
            for entry in capture.entries:
                at, end = entry.begin, entry.begin + entry.bytes
                while at < end:
                    count = self.rfile.readinto(data[at : min(end, at + _CHUNK)])
                    if not count:
                        raise ValueError("cut off")
                    at += count
        slot.publish(capture)
        sums = slot.seal(capture, _THREADS)
        if sums is None or not about["sums"].items() <= sums.items():
            slot.withdraw()
            raise ValueError("damaged on its way")
