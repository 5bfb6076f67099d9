"""The interface of a guard in a node's agent. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from fsdp_jobs.run.protocol import Message

if TYPE_CHECKING:
    from fsdp_jobs.node.rendezvous import CoordinatorRendezvous


class Guard:
    """Looks at the ranks of this node, and answers the coordinator."""

    kinds: ClassVar[tuple[str, ...]] = ()  # of the coordinator's messages that it takes in

    def __init__(self, node: CoordinatorRendezvous):
        self.node = node

    def begin_round(self, message: Message) -> None:
        """Take note of the coordinator's `round`, before ranks start."""

    def beat(self) -> dict[str, Any]:
        """Return what the next heartbeat tells besides."""
        return {}

    def on_message(self, message: Message) -> None:
        """Take in a message of one of its kinds, without waiting for anything."""

    def take(self, term: int, step: int, rank: int, sums: dict[str, str]) -> None:
        """Take the checksums of a rank's state after a step, by tensor; only tensors that replicas share."""

    def may_follow(self, step: int) -> bool:
        """Whether another capture may follow that of a step."""
        return True
