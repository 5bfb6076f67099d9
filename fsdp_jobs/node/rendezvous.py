"""torch elastic's rendezvous interface in the agent; the coordinator makes the decisions."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from torch.distributed import HashStore
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.agent.server.api import Worker

from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.node.guard import Guard
from fsdp_jobs.node.link import Link
from fsdp_jobs.node.memory import memory_in_use
from fsdp_jobs.run import messages
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import COORDINATOR_ENV
from fsdp_jobs.run.failure import Failure
from fsdp_jobs.run.leaves import guards_in
from fsdp_jobs.run.messages import NO_ROUND
from fsdp_jobs.run.processes import free_port
from fsdp_jobs.run.protocol import lease_s, unreachable_s
from fsdp_jobs.run.rank_state import RankState, Request
from fsdp_jobs.run.term import Lease


class CoordinatorRendezvous(rendezvous.RendezvousHandler):
    """torch elastic's rendezvous handler over the link to the coordinator."""

    def __init__(self, config: JobConfig, run: RunDir, agent: messages.Agent, term: int, folder: Path):
        """`term` is the newest known to this node; `folder` holds its rank states, error files and pipes."""
        self.config, self.run, self.agent, self.folder = config, run, agent, folder
        elastic = config.elastic
        self.states = [RankState(folder, local_rank) for local_rank in range(agent.nproc)]
        self.lease, self.lease_s = Lease(folder), lease_s(elastic)
        self.fresh_s = min(self.lease_s, unreachable_s(elastic))
        self.workers: Callable[[], list[Worker]] = list  # the newest processes, by local rank
        self.before_end: Callable[[], None] = lambda: None  # once all ranks here are done
        self.is_stop_requested = False
        self.round = NO_ROUND  # the newest round of this node; `NO_ROUND` while it waits for one
        self.running_round = -1  # number of the round that ranks here were started for, even if it is over
        self.end: messages.End | None = None  # from the coordinator, when the attempt is over
        self._changed = threading.Condition()
        self._term = term
        self._master: messages.Master | None = None  # where the round's ranks meet
        self._broken = -1  # the newest round that is over
        self._waiting = self.has_ended = False
        self._joins_by = 0  # the number of the connection by which the newest round came
        self._failures: list[Failure] = []  # not sent yet
        self._signal = ""  # the stop signal, which each new connection repeats
        for state in self.states:
            state.clear()
        self.guards: list[Guard] = [made(self) for made in guards_in("node")]
        self._guard_of = {kind: guard for guard in self.guards for kind in guard.takes}  # by message class
        self._read = messages.reader([*messages.FROM_COORDINATOR, *self._guard_of])
        token = run.token.read_text()
        self.link = Link(os.environ[COORDINATOR_ENV], token, self._hello, self._beat, self._receive, elastic)

    def _hello(self, local: tuple[str, int]) -> messages.Hello:
        running = self.round if self.running_round > self._broken else NO_ROUND
        state = (running, self._waiting, self.has_ended, self._signal)
        return messages.Hello(self.agent, self._term, *state, local, Lease.now())

    def _beat(self) -> messages.Beat:
        measured: dict[str, float] = {}
        for guard in self.guards:
            measured |= guard.beat()
        ranks = [(state.read(), state.times()) for state in self.states]
        return messages.Beat(ranks, measured, Lease.now(), memory_in_use())

    def _receive(self, line: bytes) -> None:
        message = self._read(line)
        with self._changed:
            match message:
                case messages.Alive():
                    if message.at is not None:
                        fresh_s = self.fresh_s if message.is_in_charge else 0.0
                        self.lease.renew(message.at + self.lease_s, message.at + fresh_s)
                        self.lease.set_clock(message.time, message.at)
                    self._send_failures()  # those that came without a connection
                case messages.Round():
                    self.round, self._master, self._waiting, self._term = message, None, False, message.term
                    self._broken = min(self._broken, message.number - 1)  # a new coordinator may use a number again
                    self._joins_by = self.link.connections
                    for guard in self.guards:
                        guard.begin_round(message)
                case messages.Master():
                    self._master = message
                case messages.Break():
                    self._broken = max(self._broken, message.round)
                case messages.Request():
                    self.request(message.request)
                case messages.End():
                    self.end = message
                case _:
                    self._guard_of[type(message)].on_message(message)
            self._changed.notify_all()

    def pids(self) -> list[int]:
        """Return the process ids of the ranks here that are started, by local rank."""
        return [worker.id for worker in self.workers() if isinstance(worker.id, int)]

    def ranks(self) -> list[int]:
        return [worker.global_rank for worker in self.workers()]

    def log_files(self) -> list[Path]:
        return [self.run.rank_log(self.agent.attempt, self.agent.node, rank) for rank in self.ranks()]

    def stack_files(self) -> list[Path]:
        return [self.run.stacks(self.agent.attempt, self.agent.node, rank) for rank in self.ranks()]

    def failed(self, failures: list[Failure]) -> None:
        """Report to the coordinator at once, or as soon as there is a connection."""
        self.link.beat()  # the coordinator may not know yet which step the ranks restored
        with self._changed:
            self._failures = failures
            self._send_failures()

    def _send_failures(self) -> None:
        if self._failures and self.link.send(messages.Failed(self._failures)):
            self._failures = []

    def notice(self, name: str) -> None:
        """Report a stop signal; without a connection, ask the ranks here, which agree with all others."""
        self._signal = name
        if not self.link.send(messages.Notice(name)):
            self.request(Request.STOP)

    def request(self, request: Request) -> None:
        """Pass a request to the ranks here."""
        for state in self.states:
            state.request(max(request, state.requested()))
        self.is_stop_requested |= request is Request.STOP

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        """Wait until this node is part of a round.

        Raises:
            RendezvousGracefulExitError: the coordinator has ended the attempt.
        """
        while True:
            self.link.beat()  # with the last report of the ranks that ran here
            with self._changed:
                after = self.round.number
                self.round, self._waiting, self.running_round, self.has_ended = NO_ROUND, True, -1, False
                for state in self.states:
                    state.clear()
                self._send_failures()
            self.link.send(messages.Ready(after, Lease.now()))
            with self._changed:
                self._changed.wait_for(lambda: self.round is not NO_ROUND or self.end)
                if self.end is not None:
                    raise rendezvous.RendezvousGracefulExitError(self.end.why)
            if (info := self._join()) is not None:
                self.running_round = self.round.number
                return info

    def _join(self) -> rendezvous.RendezvousInfo | None:
        """Announce the master address on the first node, receive it on others; None if the round cannot begin.

        It cannot if it is already over, or if the connection was lost, maybe with the address.

        torch's agents would exchange their numbers of ranks through a store, and if one died now, the others would
        wait until the store's timeout. Here all nodes have equally many (`TORCH_ELASTIC_WORKER_IDENTICAL`).
        """
        current = self.round
        if current.rank == 0:
            master = messages.Master(current.number, self.agent.address, free_port())
            if not self.link.send(master):
                return None
        else:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._master
                        or self.end
                        or self._broken >= current.number
                        or self.link.connections != self._joins_by
                    )
                )
                if self._master is None:
                    return None
                master = self._master
        store = rendezvous.RendezvousStoreInfo(master.host, master.port)
        return rendezvous.RendezvousInfo(HashStore(), current.rank, current.size, store)

    def is_cut_off(self) -> bool:
        """Whether the lease of this node's running ranks has expired; then its round is over."""
        if self.lease.left_s() < 0 and not self.has_ended:
            self._broken = max(self._broken, self.running_round)
            return True
        return False

    def num_nodes_waiting(self) -> int:
        """Return 1 when the running round is over and its ranks must be stopped."""
        return int(self._broken >= self.running_round or self.end is not None)

    def ended(self) -> None:
        self.before_end()
        self.link.beat()
        self.has_ended = True
        self.link.send(messages.Ended())

    def get_backend(self) -> str:
        return "fsdp_jobs"

    def is_closed(self) -> bool:
        return self.end is not None

    def set_closed(self) -> None:
        pass

    def get_run_id(self) -> str:
        return self.run.name

    def shutdown(self) -> bool:
        self.link.close()
        return True
