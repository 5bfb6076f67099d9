"""The agent's part in comparing replicas: it tells the coordinator the sums of what its ranks hold. No torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdp_jobs.run.agreement import Agreement, Known, digest, take_sums
from fsdp_jobs.run.protocol import Message

_KEPT = 16  # newest steps whose sums of single tensors can be asked for
_AT_ONCE = 200  # tensors in a message; a line has to be shorter than 64 KiB
_HOLD_S = 5.0  # for the coordinator to say that a step may be followed by another capture


class Sums:
    """What a node's ranks hold of a round's newest steps."""

    def __init__(self, folder: Path, ranks: int, send: Callable[..., Any]):
        """`folder` is that of the rank states, `ranks` how many there are, and `send` tells the coordinator."""
        self.agreement = Agreement(folder)
        self._folder, self._ranks, self._send = folder, ranks, send
        self._lock = threading.Lock()
        self._round: Message = {}
        self._by_step: dict[int, dict[int, dict[str, str]]] = {}  # step -> rank -> tensor -> sum
        self._said_at: dict[int, float] = {}  # step -> when the first of them was known

    def begin_round(self, message: Message) -> None:
        """Take note of the coordinator's `round`, before ranks start."""
        with self._lock:
            self._round, self._by_step, self._said_at = message, {}, {}
        self.agreement.write(Known(limit=message["limit"], replayed=message["replayed"]))

    def look(self) -> None:
        """Pass on what ranks have written."""
        for epoch, step, rank, sums in take_sums(self._folder):
            self.take(epoch, step, rank, sums)

    def take(self, epoch: int, step: int, rank: int, sums: dict[str, str]) -> None:
        """Keep the sums of a rank's shards; when those of all ranks here are known, tell the coordinator."""
        with self._lock:
            if not sums or epoch != self._round.get("epoch"):
                return
            of_step = self._by_step.setdefault(step, {})
            of_step[rank] = sums
            self._said_at.setdefault(step, time.monotonic())
            for old in sorted(self._by_step)[:-_KEPT]:
                del self._by_step[old], self._said_at[old]
        if len(of_step) == self._ranks:
            digests = [[rank, digest(sums)] for rank, sums in of_step.items()]
            self._send("sums", round=self._round["round"], step=step, sums=digests)

    def tell(self, message: Message) -> None:
        """Answer the coordinator, which wants to know the tensors: those of a rank here, if it is asked for."""
        with self._lock:
            of_step = dict(self._by_step.get(message["step"], {}))
        for rank in of_step.keys() & set(message["ranks"]):
            sums = sorted(of_step[rank].items())
            for begin in range(0, len(sums), _AT_ONCE):
                about = {"round": message["round"], "step": message["step"], "rank": rank, "of": len(sums)}
                self._send("tensors", **about, sums=sums[begin : begin + _AT_ONCE])

    def note(self, message: Message) -> None:
        """Take note of what the coordinator has found, for the ranks."""
        known, news = self.agreement.read(), {key: message[key] for key in ("agreed", "compared", "differ")}
        self.agreement.write(known._replace(began=min(known.began, message["compared"]), **news))

    def may_follow(self, step: int) -> bool:
        """Whether another capture may follow that of a step: the one before it is kept until this one is compared."""
        said_at = self._said_at.get(step)
        waits = said_at is not None and self._round.get("holds") and time.monotonic() - said_at < _HOLD_S
        return not waits or self.agreement.read().compared >= step
