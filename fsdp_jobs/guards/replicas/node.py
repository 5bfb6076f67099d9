"""Send the coordinator checksums of the tensors that ranks share with their replicas. No torch.

To the coordinator:
    sums        round, step, sums: [[rank, digest], ...]        of tensors that replicas share
    tensors     round, step, rank, of, sums: [[name, sum], ...] some of a rank's tensors, of so many; answers tell
From it:
    round       limit, replayed, holds
                (limit: newest step that a restart may use, unless replicas are known to agree at a later one;
                replayed: a step that is compared again; holds: captures wait for comparisons)
    compared    agreed, compared, differ                        replicas were compared after a step
    tell        round, step, ranks                              send the sums of these ranks' tensors
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from fsdp_jobs.node import guard
from fsdp_jobs.run.agreement import Agreement, Known, digest, take_sums
from fsdp_jobs.run.protocol import Message

if TYPE_CHECKING:
    from fsdp_jobs.node.rendezvous import CoordinatorRendezvous

_KEPT = 16  # newest steps whose sums of single tensors can be asked for
_AT_ONCE = 200  # tensors in a message; a line has to be shorter than 64 KiB
_HOLD_S = 5.0  # for the coordinator to say that a step may be followed by another capture


class Guard(guard.Guard):
    """Keeps what a node's ranks hold of a round's newest steps."""

    kinds = ("compared", "tell")

    def __init__(self, node: CoordinatorRendezvous):
        super().__init__(node)
        self.agreement = Agreement(node.folder)
        self._lock = threading.Lock()
        self._round: Message = {}
        self._by_step: dict[int, dict[int, dict[str, str]]] = {}  # step -> rank -> tensor -> sum
        self._said_at: dict[int, float] = {}  # step -> when the first of them was known

    def begin_round(self, message: Message) -> None:
        with self._lock:
            self._round, self._by_step, self._said_at = message, {}, {}
        self.agreement.write(Known(limit=message["limit"], replayed=message["replayed"]))

    def beat(self) -> dict[str, Any]:
        """Pass on what ranks have written."""
        for term, step, rank, sums in take_sums(self.node.folder):
            self.take(term, step, rank, sums)
        return {}

    def take(self, term: int, step: int, rank: int, sums: dict[str, str]) -> None:
        """Keep the sums of a rank's shards; when those of all ranks here are known, tell the coordinator."""
        with self._lock:
            if not sums or term != self._round.get("term"):
                return
            of_step = self._by_step.setdefault(step, {})
            of_step[rank] = sums
            self._said_at.setdefault(step, time.monotonic())
            for old in sorted(self._by_step)[:-_KEPT]:
                del self._by_step[old], self._said_at[old]
        if len(of_step) == len(self.node.states):
            digests = [[rank, digest(sums)] for rank, sums in of_step.items()]
            self.node.send("sums", round=self._round["round"], step=step, sums=digests)

    def on_message(self, message: Message) -> None:
        if message["kind"] == "tell":
            self._tell(message)
        else:
            self._note(message)

    def _tell(self, message: Message) -> None:
        """Answer the coordinator, which wants to know the tensors: those of a rank here, if it is asked for."""
        with self._lock:
            of_step = dict(self._by_step.get(message["step"], {}))
        for rank in of_step.keys() & set(message["ranks"]):
            sums = sorted(of_step[rank].items())
            for begin in range(0, len(sums), _AT_ONCE):
                about = {"round": message["round"], "step": message["step"], "rank": rank, "of": len(sums)}
                self.node.send("tensors", **about, sums=sums[begin : begin + _AT_ONCE])

    def _note(self, message: Message) -> None:
        """Take note of what the coordinator has found, for the ranks."""
        known, news = self.agreement.read(), {key: message[key] for key in ("agreed", "compared", "differ")}
        self.agreement.write(known._replace(began=min(known.began, message["compared"]), **news))

    def may_follow(self, step: int) -> bool:
        """Whether it may: the capture before this one is kept until this one is compared."""
        said_at = self._said_at.get(step)
        waits = said_at is not None and self._round.get("holds") and time.monotonic() - said_at < _HOLD_S
        return not waits or self.agreement.read().compared >= step
