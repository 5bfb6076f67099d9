"""The interface of a guard in the coordinator. No torch, no network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from fsdp_jobs.control.placement import ConnectedAgent
from fsdp_jobs.run.events import Event
from fsdp_jobs.run.messages import Message

if TYPE_CHECKING:
    from fsdp_jobs.control.attempt import Attempt


class Guard:
    """Watches a running job; calls the attempt's `record`, `break_round`, `park` or `close` when it finds something.

    Its methods are called with the coordinator's clock, `now`, in seconds.
    """

    takes: ClassVar[tuple[type[Message], ...]] = ()  # messages from agents

    def __init__(self, attempt: Attempt):
        self.attempt = attempt
        self.start()

    def start(self) -> None:
        """Set up the state; called once."""

    def read(self, event: Event) -> None:
        """Restore state from an event that an earlier coordinator recorded; the oldest comes first."""

    def begin_round(self) -> Message | None:
        """Reset for a new round; the attempt still has the old one. Returns a message to send before `Round`."""

    def on_message(self, agent: ConnectedAgent, message: Any, now: float) -> None:
        """Handle a message of a class in `takes`."""

    def watch(self, now: float) -> None:
        """Check the running round; called ten times a second."""

    def close(self, now: float) -> None:
        """Report unfinished findings before the verdict."""
