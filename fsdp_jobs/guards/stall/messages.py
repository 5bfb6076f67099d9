"""Messages between coordinator and agents when no rank advances."""

from __future__ import annotations

from typing import NamedTuple

from fsdp_jobs.run.messages import Message


class Dump(Message):
    """From the coordinator: agents of the round make their ranks write stacks."""


class RankStack(NamedTuple):
    """State of one rank."""

    rank: int
    status: str  # of its process, as psutil names it, or "gone"
    dumped: bool  # it has written its stacks
    step: int  # steps done, -1 before its first report
    ended: bool
    place: str  # its innermost frames
    waits: bool  # for other ranks, in a collective


class Stacks(Message):
    """An agent's answer to `Dump`."""

    ranks: list[RankStack]
