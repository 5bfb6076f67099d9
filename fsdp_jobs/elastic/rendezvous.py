"""The agent's side of rendezvous: torch elastic's interface, answered by the coordinator."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from fsdp_jobs.config.schema import ElasticConfig
from fsdp_jobs.elastic.protocol import Link, Message, lease_s
from fsdp_jobs.elastic.rank_state import SAVES_NOTHING, Phase, RankState, Request
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.run.epoch import Lease
from fsdp_jobs.run.processes import free_port


class CoordinatorRendezvous(RendezvousHandler):
    """torch elastic's rendezvous handler over the link to the coordinator."""

    def __init__(
        self,
        coordinator: str,
        token: str,
        run_name: str,
        identity: Message,
        states: list[RankState],
        lease: Lease,
        elastic: ElasticConfig,
    ):
        self.identity, self.states, self.run_name = identity, states, run_name
        self.lease, self.lease_s = lease, lease_s(elastic)
        self.on_dump: Callable[[], None] = lambda: None
        self.on_stop: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._round: Message | None = None  # the newest round that this node is part of
        self._start: Message | None = None
        self._broken = -1  # the newest round that is over
        self.end: Message | None = None  # from the coordinator, when the attempt is over
        self._waiting = False
        self._running_round = -1
        self._ended = False
        self._failures: list[Message] = []
        self._signal = ""  # to stop, that came while there was no coordinator
        self._link = Link(coordinator, token, self._hello, self._reports, self._receive, elastic)

    @property
    def round(self) -> Message:
        assert self._round is not None
        return self._round

    def _hello(self) -> Message:
        running = self._running_round if self._running_round > self._broken else -1
        in_round: Message = {"round": -1, "epoch": 0, "size": 0, "shard_group": 0}
        if self._round is not None and running >= 0:
            in_round = {key: self._round[key] for key in ("round", "epoch", "size")}
            in_round["shard_group"] = Layout.from_json(self._round["layout"]).shard_group
        more = {"ready": self._waiting, "ended": self._ended, "signal": self._signal}
        return {**self.identity, **in_round, **more}

    def _reports(self) -> list[list[int]]:
        reports = [state.read() for state in self.states]
        return [[r.step, r.committed, r.phase] if r.time else [-1, SAVES_NOTHING, Phase.STARTING] for r in reports]

    def _receive(self, message: Message) -> None:
        with self._changed:
            kind = message["kind"]
            if kind == "alive":
                if message["at"] is not None:
                    self.lease.renew(message["at"] + self.lease_s)
                return
            if kind == "round":
                self._round, self._start, self._waiting = message, None, False
            elif kind == "start":
                self._start = message
            elif kind == "break":
                self._broken = max(self._broken, message["round"])
            elif kind == "request":
                self._request(Request(message["request"]))
            elif kind == "dump":
                threading.Thread(target=self.on_dump, name="dump", daemon=True).start()
            elif kind == "end":
                self.end = message
            self._changed.notify_all()

    def failed(self, failures: list[Message]) -> None:
        """Report to the coordinator at once, or with the next `ready` while there is no connection."""
        if not self._link.send("failed", failures=failures):
            self._failures = failures

    def notice(self, name: str) -> None:
        """Pass on a signal to stop; without a coordinator the ranks here tell the others."""
        if not self._link.send("notice", signal=name):
            self._signal = name
            self._request(Request.STOP)

    def _request(self, request: Request) -> None:
        for state in self.states:
            state.request(request)
        if request is Request.STOP:
            self.on_stop()

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until this node is part of a round.

        Raises:
            RendezvousGracefulExitError: the coordinator has ended the attempt.
        """
        while True:
            self._link.beat()  # the last report of the ranks that ran here
            with self._changed:
                self._round, self._waiting, self._running_round, self._ended = None, True, -1, False
                failures, self._failures = self._failures, []
                for state in self.states:
                    state.clear()
            self._link.send("ready", failures=failures, at=Lease.now())
            with self._changed:
                self._changed.wait_for(lambda: self._round is not None or self.end is not None)
                if self.end is not None:
                    raise RendezvousGracefulExitError(self.end["why"])
            info = self._join()
            if info is not None:
                self._running_round = self.round["round"]
                return info

    def _join(self) -> RendezvousInfo | None:
        """Say where ranks meet on the round's first node, learn it elsewhere; None if the round is already over.

        torch's agents would compare their numbers of ranks in a store of this round. Here every node has as many
        (`TORCH_ELASTIC_WORKER_IDENTICAL`): one that dies now would hold the others until the store's timeout.
        """
        number, rank, size = (self.round[key] for key in ("round", "rank", "size"))
        if rank == 0:
            host, port = str(self.identity["address"]), free_port()
            self._link.send("master", round=number, port=port)
        else:
            with self._changed:
                self._changed.wait_for(lambda: self._start or self.end or self._broken >= number)
                if self._start is None:
                    return None
                host, port = self._start["host"], self._start["port"]
        return RendezvousInfo(HashStore(), rank, size, RendezvousStoreInfo(host, port))

    def is_cut_off(self) -> bool:
        """Whether this node's lease has run out, and so its round is over for it."""
        if self.lease.left_s() < 0:
            self._broken = max(self._broken, self._running_round)
            return True
        return False

    @property
    def has_ranks(self) -> bool:
        """Whether this node is in a round, be it one that is over."""
        return self._running_round >= 0

    def ask_to_save(self) -> None:
        """Let ranks save once more, before it is too late."""
        self._request(Request.SAVE)

    def num_nodes_waiting(self) -> int:
        """Return 1 when the running round is over and its ranks must be stopped."""
        return int(self._broken >= self._running_round or self.end is not None)

    def send_stacks(self, ranks: list[Message]) -> None:
        self._link.send("stacks", node=self.identity["node"], ranks=ranks)

    def ended(self) -> None:
        self._link.beat()
        self._ended = True
        self._link.send("ended")

    def get_backend(self) -> str:
        return "fsdp_jobs"

    @property
    def use_agent_store(self) -> bool:
        return False

    def is_closed(self) -> bool:
        return self.end is not None

    def set_closed(self) -> None:
        pass

    def get_run_id(self) -> str:
        return self.run_name

    def shutdown(self) -> bool:
        self._link.close()
        return True
