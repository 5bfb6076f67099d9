"""The interface of a snapshot tier in a node's agent. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.node.guard import Guard
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.protocol import Message


class Tier:
    """Keeps the snapshots of a node's ranks, which outlive them."""

    environment: dict[str, str]  # of ranks
    hello: dict[str, Any]  # what the coordinator gets to know

    @classmethod
    def of_node(cls, config: JobConfig, run: RunDir, attempt: int, node: int) -> Self | None:
        """Return a node's, if this job has it."""
        raise NotImplementedError

    def start(self, guards: Sequence[Guard]) -> None:
        """Begin, in threads. The guards get the checksums of tensors that replicas share."""

    def begin_round(self, round_: Message) -> None:
        """Take care of a round's snapshots from now on."""

    def close(self, is_over: bool) -> None:
        """Stop; when the job is over, remove everything."""
