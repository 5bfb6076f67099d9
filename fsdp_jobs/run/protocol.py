"""The agent's link to the coordinator: JSON lines over TCP, reconnecting. No torch.

First both prove that they know the job's token, which does not travel (`proof`):
    coordinator  challenge  nonce
    agent        answer     nonce, proof of both nonces
    coordinator  welcome    proof of both nonces
Agent to coordinator:
    hello   attempt, node, host, address, nproc, switches, copies, agent, ready, round, term, size, shard_group, ended,
            signal, from, at
            (copies: port for other nodes' captures, 0 for none; agent: id of the process; ready: no ranks run here;
            round, size, shard_group: what they run in, `NO_ROUND` when none do; term: the newest that this node
            knows, of its rounds and of snapshots in its memory; ended: they have finished; signal: to stop, that
            came while there was no connection; from: the agent's end of the connection; at: when it was sent, by
            the agent's clock)
    beat    ranks: [[step, committed, phase, *Times], ...], at
    failed  failures: [...]     ranks here have failed, and the others are being stopped
    ready   failures: [...], after, at      no ranks run here; wants to be in the next round
            (failures: not reported yet; after: the newest round that it knows of, -1 for none)
    master  round, port       from the head of a round: the port at which its ranks meet
    notice  signal              this node received a signal to stop
    ended                       all ranks of this node have finished
    away                        this connection will be closed, and not because the agent ends
Coordinator to agent:
    alive   at, time                    answers hello, beat and ready; with `at`, the node's lease runs from then
                                        (time: seconds since 1970 by the coordinator's clock)
    round   round, term, rank, size, shard_group, layout, partner
                                        this node has this rank of `size`, and sends its snapshots to the partner
    start   round, host, port   the head's answer, to everyone else
    break   round, why                  stop the ranks and send `ready`
    request request                     for the states of the ranks
    end     exit_code, why              the attempt is over: exit
Guards have messages of their own, and fields in `beat` and `round`: their modules `node` say which.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

from fsdp_jobs.config.schema import ElasticConfig
from fsdp_jobs.run.term import Lease

Message = dict[str, Any]
AGENT, COORDINATOR, PARTNER = "agent", "coordinator", "partner"  # who proves
_RETRY_S = 0.2  # between two tries to connect
_TELL_S, TELL_AGAIN_S = 10.0, 60.0  # without a connection, until that is logged, and again
CONNECTION = "connection to the coordinator"  # in every line about it in an agent's log
_LINE = 4096  # most bytes that are read before the other side has proved to know the token
NO_ROUND: Message = {"round": -1, "size": 0, "shard_group": 0}  # what `hello` says when no ranks run

logger = logging.getLogger(__name__)


def proof(token: str, side: str, challenge: str, answer: str) -> str:
    """Prove, as one side of a connection, that the token is known; the nonces are the coordinator's and the agent's."""
    return hmac.new(token.encode(), f"{side} {challenge} {answer}".encode(), "sha256").hexdigest()


class Impostor(ValueError):
    """Who answers a connection does not know this job's token."""


def enter(connection: socket.socket, lines: IO[Any], token: str, whom: str) -> None:
    """Prove on a new connection that this is an agent of the job, and have the other end prove who it is.

    Raises:
        ValueError, KeyError: it does not, as Impostor when it tries to.
    """
    challenge, answer = str(json.loads(lines.readline(_LINE))["nonce"]), secrets.token_hex()
    connection.sendall(line({"kind": "answer", "nonce": answer, "proof": proof(token, AGENT, challenge, answer)}))
    theirs = str(json.loads(lines.readline(_LINE))["proof"])
    if not hmac.compare_digest(theirs.encode(), proof(token, whom, challenge, answer).encode()):
        raise Impostor("who answers does not know this job's token")


def welcome(token: str, side: str, challenge: str, received: str | bytes) -> Message | None:
    """Return what proves to an agent that this is the other side; None if its answer does not prove that it is one.

    Raises:
        ValueError, KeyError, TypeError: it is not an answer.
    """
    answer = json.loads(received)
    nonce = str(answer["nonce"])
    if not hmac.compare_digest(str(answer["proof"]).encode(), proof(token, AGENT, challenge, nonce).encode()):
        return None
    return {"kind": "welcome", "proof": proof(token, side, challenge, nonce)}


def lease_s(elastic: ElasticConfig) -> float:
    """Return for how many seconds the coordinator's answer lets ranks run: `elastic.lease_s`, or its default."""
    return elastic.lease_s or 2 * elastic.heartbeat_timeout_s


def unreachable_s(elastic: ElasticConfig) -> float:
    """Return for how long a machine may acknowledge no packet, and a rank write without a look for newer rounds."""
    return max(0.3 * elastic.heartbeat_timeout_s, 2 * elastic.heartbeat_interval_s)


class Link:
    """A connection that a thread keeps up; `on_message` is called in that thread. Another thread sends the beats."""

    def __init__(
        self,
        address: str,
        token: str,
        hello: Callable[[], Message],
        report: Callable[[], Message],
        on_message: Callable[[Message], None],
        elastic: ElasticConfig,
    ):
        host, _, port = address.rpartition(":")
        self._address, self._token = (host, int(port)), token
        self._hello, self._report, self._on_message, self._elastic = hello, report, on_message, elastic
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="coordinator-link", daemon=True).start()
        threading.Thread(target=self._send_beats, name="beats", daemon=True).start()

    def send(self, kind: str, **content: Any) -> bool:
        """Send one message; False without a connection (the next hello repeats what matters)."""
        with self._lock, suppress(OSError):
            if self._socket is not None:
                self._socket.sendall(line({"kind": kind, **content}))
                return True
        return False

    def beat(self) -> None:
        self.send("beat", **self._report(), at=Lease.now())

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
        lost_at, told_at = time.time(), 0.0
        while not self._closed.is_set():
            try:
                with socket.create_connection(self._address, timeout=5) as link:
                    if told_at > lost_at:
                        logger.info("again a %s at %s:%d", CONNECTION, *self._address)
                    try:
                        self._talk(link)
                    finally:
                        lost_at = time.time()
            except (ValueError, KeyError):
                pass  # what is not a message ends the connection
            except OSError as e:
                now = time.time()
                if now - lost_at > _TELL_S and now - told_at > TELL_AGAIN_S:
                    told_at = now
                    since = time.strftime("%H:%M:%S UTC", time.gmtime(lost_at))
                    logger.warning("no %s at %s:%d since %s: %s", CONNECTION, *self._address, since, e)
            self._closed.wait(_RETRY_S)

    def _talk(self, connection: socket.socket) -> None:
        with connection.makefile("r") as lines:
            connection.settimeout(self._elastic.heartbeat_timeout_s)  # the coordinator answers every beat
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                enter(connection, lines, self._token, COORDINATOR)
            except Impostor as e:
                logger.warning("%s:%d: %s", *self._address, e)
                self._closed.wait(self._elastic.heartbeat_interval_s)
                raise
            local = connection.getsockname()[:2]
            with self._lock:
                connection.sendall(line({"kind": "hello", "from": local, "at": Lease.now(), **self._hello()}))
                self._socket = connection
            try:
                for message in lines:
                    self._on_message(json.loads(message))
            finally:
                self.send("away")
                with self._lock:
                    self._socket = None


def line(message: Message) -> bytes:
    """Return a message as it is sent."""
    return (json.dumps(message) + "\n").encode()
