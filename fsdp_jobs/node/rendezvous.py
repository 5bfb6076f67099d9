"""The agent's side of rendezvous: torch elastic's interface, answered by the coordinator."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import HashStore
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.agent.server.api import Worker

from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.node.guard import Guard
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import COORDINATOR_ENV
from fsdp_jobs.run.leaves import guards_in
from fsdp_jobs.run.processes import free_port
from fsdp_jobs.run.protocol import NO_ROUND, Link, Message, lease_s, unreachable_s
from fsdp_jobs.run.rank_state import RankState, Request
from fsdp_jobs.run.term import Lease


class CoordinatorRendezvous(rendezvous.RendezvousHandler):
    """torch elastic's rendezvous handler over the link to the coordinator."""

    def __init__(self, config: JobConfig, run: RunDir, identity: Message, folder: Path):
        """`identity` is this node's part of `hello`; `folder` holds its rank states, error files and pipes."""
        self.config, self.run, self.identity, self.folder = config, run, identity, folder
        elastic = config.elastic
        self.states = [RankState(folder, local_rank) for local_rank in range(identity["nproc"])]
        self.lease, self.lease_s = Lease(folder), lease_s(elastic)
        self.fresh_s = min(self.lease_s, unreachable_s(elastic))
        self.workers: Callable[[], list[Worker]] = list  # the newest, by local rank
        self.is_stop_requested = False
        self.round: Message = {}  # the newest that this node is part of; empty while it waits for one
        self.running_round = -1  # number of the one that it has ranks in, be it over
        self.end: Message = {}  # from the coordinator, when the attempt is over
        self._changed = threading.Condition()
        self._start: Message = {}
        self._broken = -1  # the newest round that is over
        self._waiting = self._ended = False
        self._failures: list[Message] = []
        self._signal = ""  # to stop, that came while there was no coordinator
        for state in self.states:
            state.clear()
        self.guards: list[Guard] = [made(self) for made in guards_in("node")]
        token = run.token.read_text()
        self._link = Link(os.environ[COORDINATOR_ENV], token, self._hello, self._report, self._receive, elastic)

    def _hello(self) -> Message:
        current, is_running = self.round, self.running_round > self._broken
        in_round = {key: current[key] for key in NO_ROUND} if current and is_running else NO_ROUND
        return self.identity | in_round | {"ready": self._waiting, "ended": self._ended, "signal": self._signal}

    def send(self, kind: str, **content: Any) -> bool:
        """Send a message to the coordinator; False without a connection."""
        return self._link.send(kind, **content)

    def _report(self) -> Message:
        more: Message = {}
        for guard in self.guards:
            more |= guard.beat()
        read = [(state.read(), state.times()) for state in self.states]
        ranks = [[r.step, r.committed, r.phase, *(round(t, 6) for t in times)] for r, times in read]
        return {"ranks": ranks, **more}

    def _receive(self, message: Message) -> None:
        with self._changed:
            match message["kind"]:
                case "alive":
                    if message["at"] is not None:
                        self.lease.renew(message["at"] + self.lease_s, message["at"] + self.fresh_s)
                        self.lease.set_clock(message["time"], message["at"])
                case "round":
                    self.round, self._start, self._waiting = message, {}, False
                    self.identity["term"] = message["term"]
                    for guard in self.guards:
                        guard.begin_round(message)
                case "start":
                    self._start = message
                case "break":
                    self._broken = max(self._broken, message["round"])
                case "request":
                    self.request(Request(message["request"]))
                case "end":
                    self.end = message
                case kind:
                    for guard in self.guards:
                        if kind in guard.kinds:
                            guard.on_message(message)
            self._changed.notify_all()

    def pids(self) -> list[int]:
        """Return the processes of the ranks here, by local rank; none before all have been started."""
        pids = [worker.id for worker in self.workers()]
        return [pid for pid in pids if isinstance(pid, int)] if all(isinstance(pid, int) for pid in pids) else []

    def ranks(self) -> list[int]:
        return [worker.global_rank for worker in self.workers()]

    def log_files(self) -> list[Path]:
        return [self.run.rank_log(self.identity["attempt"], self.identity["node"], rank) for rank in self.ranks()]

    def stack_files(self) -> list[Path]:
        return [self.run.stacks(self.identity["attempt"], self.identity["node"], rank) for rank in self.ranks()]

    def failed(self, failures: list[Message]) -> None:
        """Report to the coordinator at once, or with the next `ready` while there is no connection."""
        if not self._link.send("failed", failures=failures):
            self._failures = failures

    def notice(self, name: str) -> None:
        """Pass on a signal to stop; without a coordinator the ranks here tell the others."""
        if not self._link.send("notice", signal=name):
            self._signal = name
            self.request(Request.STOP)

    def request(self, request: Request) -> None:
        """Request something of the ranks here."""
        for state in self.states:
            state.request(request)
        self.is_stop_requested |= request is Request.STOP

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        """Wait until this node is part of a round.

        Raises:
            RendezvousGracefulExitError: the coordinator has ended the attempt.
        """
        while True:
            self._link.beat()  # the last report of the ranks that ran here
            with self._changed:
                after = self.round.get("round", -1)
                self.round, self._waiting, self.running_round, self._ended = {}, True, -1, False
                failures, self._failures = self._failures, []
                for state in self.states:
                    state.clear()
            self._link.send("ready", failures=failures, after=after, at=Lease.now())
            with self._changed:
                self._changed.wait_for(lambda: self.round or self.end)
                if self.end:
                    raise rendezvous.RendezvousGracefulExitError(self.end["why"])
            info = self._join()
            if info is not None:
                self.running_round = self.round["round"]
                return info

    def _join(self) -> rendezvous.RendezvousInfo | None:
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
                if not self._start:
                    return None
                host, port = self._start["host"], self._start["port"]
        return rendezvous.RendezvousInfo(HashStore(), rank, size, rendezvous.RendezvousStoreInfo(host, port))

    def is_cut_off(self) -> bool:
        """Whether this node's lease has run out, and so its round is over for it."""
        if self.lease.left_s() < 0:
            self._broken = max(self._broken, self.running_round)
            return True
        return False

    def num_nodes_waiting(self) -> int:
        """Return 1 when the running round is over and its ranks must be stopped."""
        return int(self._broken >= self.running_round or bool(self.end))

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
        return bool(self.end)

    def set_closed(self) -> None:
        pass

    def get_run_id(self) -> str:
        return self.run.name

    def shutdown(self) -> bool:
        self._link.close()
        return True
