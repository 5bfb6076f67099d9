"""The agent's link to the coordinator: JSON lines over TCP, reconnecting. No torch.

Agent to coordinator:
    hello   token, node, host, address, nproc, switches, agent, ready, round, size, shard_group, ended
            (agent: id of the process; ready: no ranks run here; round, size, shard_group: what they run in,
            -1, 0, 0 when none do; ended: they have finished)
    beat    ranks: [[step, committed, phase], ...]
    failed  failures: [...]     ranks here have failed, and the others are being stopped
    ready   failures: [...]     no ranks run here; wants to be in the next round (failures: not reported yet)
    master  round, store, port  from the head of a round: where its store is, and a port for rank 0
    notice  signal              this node received a signal to stop
    stacks  node, ranks: [...]          the state of its ranks, after a dump
    ended                       all ranks of this node have finished
Coordinator to agent:
    round   round, rank, size, layout   this node has this rank of `size`
    start   round, host, store, port    the head's answer, to everyone else
    break   round, why                  stop the ranks and send `ready`
    dump                                write the ranks' stacks and answer with `stacks`
    request request                     for the states of the ranks
    end     exit_code, why              the attempt is over: exit
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fsdp_jobs.config.schema import ElasticConfig

Message = dict[str, Any]


class Link:
    """A connection that a thread keeps up; `on_message` is called in that thread. Another thread sends the beats."""

    def __init__(
        self,
        address: str,
        hello: Callable[[], Message],
        ranks: Callable[[], list[list[int]]],
        on_message: Callable[[Message], None],
        elastic: ElasticConfig,
    ):
        host, _, port = address.rpartition(":")
        self._address = (host, int(port))
        self._hello, self._ranks, self._on_message, self._elastic = hello, ranks, on_message, elastic
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="coordinator-link", daemon=True).start()
        threading.Thread(target=self._send_beats, name="beats", daemon=True).start()

    def send(self, kind: str, **content: Any) -> bool:
        """Send one message; False without a connection (the next hello repeats what matters)."""
        line = (json.dumps({"kind": kind, **content}) + "\n").encode()
        with self._lock:
            if self._socket is None:
                return False
            try:
                self._socket.sendall(line)
                return True
            except OSError:
                return False

    def beat(self) -> None:
        self.send("beat", ranks=self._ranks())

    def _send_beats(self) -> None:
        while not self._closed.wait(self._elastic.heartbeat_interval_s):
            self.beat()

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                connection = socket.create_connection(self._address, timeout=5)
            except OSError:
                self._closed.wait(0.2)
                continue
            with connection:
                connection.settimeout(self._elastic.heartbeat_timeout_s)  # the coordinator answers every beat
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._socket = connection
                self.send("hello", **self._hello())
                with suppress(OSError, ValueError), connection.makefile("r") as lines:
                    for line in lines:
                        self._on_message(json.loads(line))
                with self._lock:
                    self._socket = None
            self._closed.wait(0.2)
