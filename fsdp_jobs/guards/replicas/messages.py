"""Messages between coordinator and agents about the tensors that replicas share."""

from __future__ import annotations

from fsdp_jobs.run.messages import Message


class Limits(Message):
    """From the coordinator, before a new round: the results of earlier comparisons."""

    limit: int  # newest step that a restart may use, unless replicas are known to agree at a later one
    replayed: int  # a step that is repeated and compared again; -1: none
    holds: bool  # the next snapshot waits for the comparison of the last


class Digests(Message):
    """From an agent: a digest of each rank's shared tensors after a step."""

    round: int
    step: int
    digests: dict[int, str]  # by rank


class Compared(Message):
    """From the coordinator: the result of comparing replicas after a step."""

    agreed: int  # the newest step at which they agreed
    compared: int
    differ: bool


class Ask(Message):
    """From the coordinator: a request for the checksums of single tensors of these ranks."""

    step: int
    ranks: list[int]


class Tensors(Message):
    """An agent's answer to `Ask`, with some of a rank's tensors per message."""

    step: int
    rank: int
    of: int  # tensors in all such messages
    sums: dict[str, str]  # by name
