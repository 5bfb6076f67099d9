"""The interface of a guard in a node's agent. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from fsdp_jobs.run.messages import Message, Round

if TYPE_CHECKING:
    from fsdp_jobs.node.rendezvous import CoordinatorRendezvous


class Guard:
    """Watches the ranks of this node, and answers the coordinator."""

    takes: ClassVar[tuple[type[Message], ...]] = ()  # messages from the coordinator

    def __init__(self, node: CoordinatorRendezvous):
        self.node = node
        self.start()

    def start(self) -> None:
        """Set up the state; called once."""

    def begin_round(self, round_: Round) -> None:
        """Reset for a new round, before its ranks start."""

    def beat(self) -> dict[str, float]:
        """Return values for the next heartbeat, which become part of its `measured`."""
        return {}

    def on_message(self, message: Any) -> None:
        """Handle a message of a class in `takes`, without blocking."""

    def take(self, term: int, step: int, rank: int, sums: dict[str, str]) -> None:
        """Receive the checksums of a rank's tensors after a step, by name; only tensors that replicas share."""

    def may_follow(self, step: int) -> bool:
        """Whether ranks may take another snapshot after the one of `step`."""
        return True
