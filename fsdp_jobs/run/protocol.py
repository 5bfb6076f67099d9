"""The handshake of connections between agents and the coordinator, and their time limits. No torch.

Both ends first prove that they have the job's token (`enter`, `welcome`), as two agents do to exchange snapshots.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from typing import IO

from fsdp_jobs.config.schema import ElasticConfig
from fsdp_jobs.run.messages import Answer, Challenge, Welcome

AGENT, COORDINATOR, PARTNER = "agent", "coordinator", "partner"  # the sides that prove
CONNECTION = "connection to the coordinator"  # in each line of an agent's log about it
LOG_AGAIN_S = 60.0  # between two such lines
LINE = 4096  # most bytes to read before the other side has proved that it has the token


def proof(token: str, side: str, challenge: str, answer: str) -> str:
    """Return one side's proof that it has the token, over the accepting side's and the agent's nonce."""
    return hmac.new(token.encode(), f"{side} {challenge} {answer}".encode(), "sha256").hexdigest()


class Impostor(ValueError):
    """The other end of a connection does not have this job's token."""


def _check(given: str, token: str, side: str, challenge: str, answer: str) -> None:
    if not hmac.compare_digest(given.encode(), proof(token, side, challenge, answer).encode()):
        raise Impostor(f"the {side} there does not have this job's token")


def enter(connection: socket.socket, lines: IO[bytes], token: str, whom: str) -> None:
    """Prove on a new connection that this is an agent of the job, and check the proof of the other end.

    Raises:
        ValueError: the other end sent no proof, or a wrong one (Impostor).
    """
    challenge, nonce = Challenge.read(lines.readline(LINE)).nonce, secrets.token_hex()
    connection.sendall(Answer(nonce, proof(token, AGENT, challenge, nonce)).line())
    _check(Welcome.read(lines.readline(LINE)).proof, token, whom, challenge, nonce)


def welcome(token: str, side: str, challenge: Challenge, received: bytes) -> Welcome:
    """Check an agent's proof, and return this side's proof for it.

    Raises:
        ValueError: the agent sent no proof, or a wrong one (Impostor).
    """
    answer = Answer.read(received)
    _check(answer.proof, token, AGENT, challenge.nonce, answer.nonce)
    return Welcome(proof(token, side, challenge.nonce, answer.nonce))


def lease_s(elastic: ElasticConfig) -> float:
    """Return how many seconds ranks may run after an answer: `elastic.lease_s` or its default."""
    return elastic.lease_s or 2 * elastic.heartbeat_timeout_s


def unreachable_s(elastic: ElasticConfig) -> float:
    """Return how long a machine may acknowledge no packets, and a rank write without checking its term."""
    return max(0.3 * elastic.heartbeat_timeout_s, 2 * elastic.heartbeat_interval_s)
