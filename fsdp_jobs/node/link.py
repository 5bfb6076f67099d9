"""The agent's link to the coordinator: lines of `messages` over TCP, reconnecting. No torch."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from fsdp_jobs.config.schema import ElasticConfig
from fsdp_jobs.run.messages import Away, Beat, Hello, Message
from fsdp_jobs.run.protocol import CONNECTION, COORDINATOR, LOG_AGAIN_S, Impostor, enter
from fsdp_jobs.run.threads import start_vital_thread

_RETRY_S = 0.2  # between two tries to connect
_LOG_AFTER_S = 10.0  # without a connection

logger = logging.getLogger(__name__)


class Link:
    """Keeps up a connection in a thread, which also calls `on_line`. Another thread sends the beats."""

    def __init__(
        self,
        address: str,
        token: str,
        hello: Callable[[tuple[str, int]], Hello],
        beat: Callable[[], Beat],
        on_line: Callable[[bytes], None],
        elastic: ElasticConfig,
    ):
        """`hello` gets the local address of a new connection; `on_line` raises ValueError for invalid lines."""
        host, _, port = address.rpartition(":")
        self._address, self._token = (host, int(port)), token
        self._hello, self._beat, self._on_line, self._elastic = hello, beat, on_line, elastic
        self.connections = 0  # made so far
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        start_vital_thread(self._run, "coordinator-link")
        start_vital_thread(self._send_beats, "beats")

    def send(self, message: Message) -> bool:
        """Send one message. Returns False without a connection; the next `Hello` repeats what matters."""
        with self._lock, suppress(OSError):
            if self._socket is not None:
                self._socket.sendall(message.line())
                return True
        return False

    def beat(self) -> None:
        self.send(self._beat())

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
        lost_at, logged_at = time.time(), 0.0
        while not self._closed.is_set():
            try:
                with socket.create_connection(self._address, timeout=5) as link:
                    if logged_at > lost_at:
                        logger.info("again a %s at %s:%d", CONNECTION, *self._address)
                    try:
                        self._talk(link)
                    finally:
                        lost_at = time.time()
            except ValueError:
                pass  # an invalid message ends the connection
            except OSError as e:
                now = time.time()
                if now - lost_at > _LOG_AFTER_S and now - logged_at > LOG_AGAIN_S:
                    logged_at = now
                    since = time.strftime("%H:%M:%S UTC", time.gmtime(lost_at))
                    logger.warning("no %s at %s:%d since %s: %s", CONNECTION, *self._address, since, e)
            self._closed.wait(_RETRY_S)

    def _talk(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as lines:
            connection.settimeout(self._elastic.heartbeat_timeout_s)  # the coordinator answers every beat
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                enter(connection, lines, self._token, COORDINATOR)
            except Impostor as e:
                logger.warning("%s:%d: %s", *self._address, e)
                self._closed.wait(self._elastic.heartbeat_interval_s)
                raise
            with self._lock:
                connection.sendall(self._hello(connection.getsockname()[:2]).line())
                self._socket, self.connections = connection, self.connections + 1
            try:
                for line in lines:
                    self._on_line(line)
            finally:
                self.send(Away())
                with self._lock:
                    self._socket = None
