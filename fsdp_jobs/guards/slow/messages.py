"""Messages between the coordinator and the agent of a slow node."""

from __future__ import annotations

from fsdp_jobs.run.messages import Message


class Slow(Message):
    """From the coordinator: this node is slower than the others."""


class Throttled(Message):
    """The agent's answer to `Slow`."""

    why: list[str]  # reasons that slow down its GPUs; empty: none
