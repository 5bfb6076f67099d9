"""What a tier is to a node's agent: snapshots of ranks outlive them. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.node.guard import Guard
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.protocol import Message


class Tier:
    """Keeps what the ranks of a node take."""

    environment: dict[str, str]  # of ranks
    hello: dict[str, Any]  # what the coordinator gets to know

    @classmethod
    def of_node(cls, config: JobConfig, run: RunDir, attempt: int, node: int) -> Self | None:
        """Return a node's, if this job has it."""
        raise NotImplementedError

    def start(self, guards: Sequence[Guard]) -> None:
        """Begin, in threads; the guards get to know the sums of what replicas hold, too."""

    def begin_round(self, round_: Message) -> None:
        """Take care of a round's snapshots from now on."""

    def close(self, is_over: bool) -> None:
        """Stop; when the job is over, remove everything."""
