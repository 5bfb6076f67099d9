"""The messages between an attempt's agents and its coordinator, one class each. No torch.

Each is sent as a line of JSON that names its class as `kind`. All processes of an attempt run the same code, so a line
that does not match a class exactly ends the connection. Guards and tiers define more classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Self

import msgspec

from fsdp_jobs.run import rank_state
from fsdp_jobs.run.failure import Failure


class Message(msgspec.Struct, forbid_unknown_fields=True, tag_field="kind", tag=str.lower):
    """The base of all messages."""

    def line(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"

    @classmethod
    def read(cls, line: bytes) -> Self:
        """Parse a line. Raises: ValueError if it is not a message of this class."""
        return msgspec.json.decode(line, type=cls)


def reader(classes: Iterable[type[Message]]) -> Callable[[bytes], Message]:
    """Return a function that parses a line, and raises a ValueError if it is of none of these classes."""
    return msgspec.json.Decoder[Message](reduce(or_, classes)).decode


# First on a new connection


class Challenge(Message):
    """The first message on a connection, from the side that accepted it."""

    nonce: str


class Answer(Message):
    """The agent proves that it has the job's token, without sending the token."""

    nonce: str
    proof: str  # of both nonces


class Welcome(Message):
    """The accepting side proves that it has the token."""

    proof: str  # of both nonces


# Agent to coordinator


@dataclass
class Agent:
    """An agent and its node; equal on all connections of the agent."""

    attempt: int
    node: int
    host: str
    address: str
    nproc: int
    switches: tuple[str, ...]  # outermost first; empty when unknown
    copies: int  # port that receives other nodes' snapshots; 0: keeps none
    id: str  # of its process


class Hello(Message):
    """The first message of an agent on every connection."""

    agent: Agent
    term: int  # the newest of this node's rounds and snapshots
    running: Round  # of the ranks that run here; `NO_ROUND` if none run
    ready: bool  # no ranks run here, and the node wants to be in the next round
    ended: bool  # the ranks here have finished
    signal: str  # a stop signal that came while there was no connection; empty: none
    local: tuple[str, int]  # the agent's end of the connection
    at: float  # when it was sent, by the agent's clock


class Beat(Message):
    """The heartbeat: sent every `elastic.heartbeat_interval_s`, and before `Failed`, `Ready` and `Ended`."""

    ranks: list[tuple[rank_state.Report, rank_state.Times]] = []  # by local rank
    measured: dict[str, float] = {}  # values from guards, described in their modules `node`
    at: float = 0.0  # when it was sent, by the agent's clock
    memory: float = 0.0  # share of its memory limit that is in use; 0 without a limit


class Failed(Message):
    """Ranks of this node have failed, and the agent is stopping the others."""

    failures: list[Failure]


class Ready(Message):
    """No ranks run on this node, and it wants to be in the next round."""

    after: int  # the newest round that the agent knows, -1 for none
    at: float  # when it was sent, by the agent's clock


class Master(Message):
    """The master address of a round, from its first node; the coordinator forwards it to the others."""

    round: int
    host: str
    port: int


class Notice(Message):
    """A node has received a stop signal."""

    signal: str


class Ended(Message):
    """All ranks of a node have finished."""


class Away(Message):
    """The agent closes this connection, but does not exit."""


# Coordinator to agent


class Alive(Message):
    """The answer to `Hello`, `Beat` and `Ready`."""

    at: float | None  # when the answered message was sent; the node's lease starts then; None: no lease
    time: float  # seconds since 1970 by the coordinator's clock
    is_in_charge: bool  # no other coordinator has begun a round; False: unknown, because storage does not answer


class Round(Message):
    """A new round, and the node's place in it."""

    number: int
    term: int  # the round's number over all attempts
    size: int  # nodes
    shard_group: int
    rank: int  # of the node
    layout: str  # JSON of a `Layout`
    last: int  # the node with the last ranks
    partner: tuple[str, int] | None  # address and port of the agent that receives its snapshots
    hosts: str = ""  # on SLURM the machines of the nodes, by rank, as a hostlist


NO_ROUND = Round(-1, 0, 0, 0, -1, "", -1, None)


class Break(Message):
    """The round is over: the agent stops its ranks and sends `Ready`."""

    round: int


class Request(Message):
    """A request to the ranks."""

    request: rank_state.Request


class End(Message):
    """The attempt is over for the agent, which exits."""

    exit_code: int
    why: str


FROM_COORDINATOR = (Alive, Round, Master, Break, Request, End)
