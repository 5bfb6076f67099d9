"""Send the coordinator checksums of the tensors that ranks share with their replicas. No torch."""

from __future__ import annotations

import threading
import time

from fsdp_jobs.guards.replicas.messages import Ask, Compared, Digests, Limits, Tensors
from fsdp_jobs.node import guard
from fsdp_jobs.run.agreement import NO_LIMIT, Agreement, Known, digest, take_sums
from fsdp_jobs.run.messages import NO_ROUND, Round

_KEPT = 16  # newest steps whose single tensors the coordinator can ask for
_AT_ONCE = 200  # tensors in a message; a line must be shorter than 64 KiB
_HOLD_S = 5.0  # to wait for a comparison before the next snapshot


class Guard(guard.Guard):
    """Keeps the checksums of a node's ranks for the newest steps of a round."""

    takes = (Limits, Compared, Ask)

    def start(self) -> None:
        self.agreement = Agreement(self.node.folder)
        self._lock = threading.Lock()
        self._round = NO_ROUND
        self._limits = Limits(NO_LIMIT, replayed=-1, holds=False)
        self._by_step: dict[int, dict[int, dict[str, str]]] = {}  # step -> rank -> tensor -> checksum
        self._said_at: dict[int, float] = {}  # step -> when its first checksums arrived

    def begin_round(self, round_: Round) -> None:
        with self._lock:
            self._round, self._by_step, self._said_at = round_, {}, {}
        self.agreement.write(Known(limit=self._limits.limit, replayed=self._limits.replayed))

    def beat(self) -> dict[str, float]:
        """Pass on the checksums that ranks have written."""
        for term, step, rank, sums in take_sums(self.node.folder):
            self.take(term, step, rank, sums)
        return {}

    def take(self, term: int, step: int, rank: int, sums: dict[str, str]) -> None:
        """Keep a rank's checksums; send digests to the coordinator once all ranks here have sent theirs."""
        with self._lock:
            if not sums or term != self._round.term:
                return
            of_step = self._by_step.setdefault(step, {})
            of_step[rank] = sums
            self._said_at.setdefault(step, time.monotonic())
            for old in sorted(self._by_step)[:-_KEPT]:
                del self._by_step[old], self._said_at[old]
        if len(of_step) == len(self.node.states):
            self.node.link.send(
                Digests(self._round.number, step, {rank: digest(sums) for rank, sums in of_step.items()})
            )

    def on_message(self, message: Limits | Compared | Ask) -> None:
        match message:
            case Limits():
                self._limits = message
            case Compared(agreed, compared, differ):  # for the ranks to read
                known = self.agreement.read()
                began = min(known.began, compared)
                self.agreement.write(known._replace(began=began, agreed=agreed, compared=compared, differ=differ))
            case Ask(step, ranks):
                with self._lock:
                    of_step = dict(self._by_step.get(step, {}))
                for rank in of_step.keys() & {*ranks}:
                    sums = sorted(of_step[rank].items())
                    for begin in range(0, len(sums), _AT_ONCE):
                        self.node.link.send(Tensors(step, rank, len(sums), dict(sums[begin : begin + _AT_ONCE])))

    def may_follow(self, step: int) -> bool:
        """Whether another snapshot may follow: once this one is compared. Until then the older one is kept."""
        said_at = self._said_at.get(step)
        waits = said_at is not None and self._limits.holds and time.monotonic() - said_at < _HOLD_S
        return not waits or self.agreement.read().compared >= step
