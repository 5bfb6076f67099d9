"""The interface of a snapshot tier in a node's agent. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.node.guard import Guard
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.messages import Round


class Tier:
    """Keeps the snapshots of a node's ranks; snapshots outlive ranks."""

    environment: dict[str, str]  # variables for ranks
    port: int  # on which other nodes' snapshots arrive
    newest_term: int  # of the snapshots found at the start; 0: none

    @classmethod
    def of_node(cls, config: JobConfig, run: RunDir, attempt: int, node: int) -> Self | None:
        """Return the tier of a node, None if this job does not use it."""
        raise NotImplementedError

    def start(self, guards: Sequence[Guard]) -> None:
        """Start its threads. Guards get the checksums of tensors that replicas share."""

    def begin_round(self, round_: Round) -> None:
        """Handle the snapshots of this round from now on."""

    def close(self, is_over: bool) -> None:
        """Stop; if the job is over, remove all snapshots."""
