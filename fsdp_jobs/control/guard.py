"""The interface of a guard in the coordinator. No torch, no network."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fsdp_jobs.control.placement import ConnectedAgent
from fsdp_jobs.run.events import Event
from fsdp_jobs.run.protocol import Message

if TYPE_CHECKING:
    from fsdp_jobs.control.attempt import Attempt


class Guard:
    """Watches a running job; calls the attempt's `record`, `break_round`, `park` or `close` when it finds something.

    Its methods are called with the coordinator's clock, `now`, in seconds.
    """

    kinds: ClassVar[tuple[str, ...]] = ()  # of the messages of agents that it takes in

    def __init__(self, attempt: Attempt):
        self.attempt = attempt

    def read(self, event: Event) -> None:
        """Take in an event that a coordinator before this one has recorded; the oldest comes first."""

    def begin_round(self) -> Message:
        """Forget the round before, which the attempt still has. Returns what agents have to know of the new one."""
        return {}

    def on_message(self, agent: ConnectedAgent, message: Message, now: float) -> None:
        """Take in a message of one of its kinds."""

    def watch(self, now: float) -> None:
        """Look at the running round, ten times a second."""

    def close(self, now: float) -> None:
        """Tell what is still open, before the verdict."""
