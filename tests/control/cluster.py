"""A coordinator with agents that are only messages, and a clock that only we move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.control.coordinator import Coordinator
from fsdp_jobs.control.placement import ConnectedAgent
from fsdp_jobs.control.requests import read_requests
from fsdp_jobs.plan.shape_client import shape_of
from fsdp_jobs.run import messages
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.failure import Failure
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.messages import NO_ROUND, Message
from fsdp_jobs.run.rank_state import SAVES_NOTHING, Phase, Report, Times
from fsdp_jobs.run.tail import read_json_lines
from fsdp_jobs.run.verdict import Verdict

PROGRAM = ("script=train.py", "elastic.join_window_s=1")
SILENCE = {"step": -1, "committed": SAVES_NOTHING, "phase": int(Phase.STARTING)}


class Cluster:
    """A coordinator, its clock, and the messages each agent has received."""

    def __init__(self, folder: Path, *overrides: str):
        self.run = RunDir(folder / "run")
        self.run.attempt(0).mkdir(parents=True, exist_ok=True)
        self.config = compose_job(["nproc_per_node=2", *overrides])
        if (shape := shape_of(self.config)) is not None:
            write_atomic(self.run.shape, shape.to_json())
        self.now = 0.0
        self.coordinator = Coordinator(self.config, self.run, 0, self.now)
        self.received: dict[str, list[Message]] = {}
        self.silent: dict[str, float] = {}  # agent -> seconds for which its ranks have done nothing

    def join(
        self,
        node: int,
        life: str = "a",
        round_: int = -1,
        size: int = 0,
        switches: tuple[str, ...] = (),
        host: str = "",
        signal: str = "",
        attempt: int = 0,
    ) -> ConnectedAgent:
        inbox = self.received.setdefault(f"{node}{life}", [])
        member = ConnectedAgent(
            attempt=attempt,
            node=node,
            host=host or f"node{node}",
            address=f"node{node}",
            nproc=2,
            switches=switches,
            copies=0,
            id=f"{node}{life}",
            send=inbox.append,
            drop=lambda: None,
            heard=self.now,
        )
        running = (
            messages.Round(round_, 1, size, 2, rank=0, layout="", last=1, partner=None) if round_ >= 0 else NO_ROUND
        )
        hello = messages.Hello(
            member,
            term=running.term,
            running=running,
            ready=running is NO_ROUND,
            ended=False,
            signal=signal,
            local=("", 0),
            at=self.now,
        )
        self.is_taken = self.coordinator.on_hello(member, hello, self.now)
        return member

    def ready(self, member: ConnectedAgent, *failures: Failure) -> None:
        after = self.coordinator.round.number if member.in_round else -1
        if failures:
            self.coordinator.on_message(member, messages.Failed(list(failures)), self.now)
        self.coordinator.on_message(member, messages.Ready(after, self.now), self.now)

    def ended(self, member: ConnectedAgent) -> None:
        self.coordinator.on_message(member, messages.Ended(), self.now)

    def closed(self, member: ConnectedAgent) -> None:
        """Its process has died, and the kernel has closed its connection."""
        self.coordinator.on_gone(member, f"closed{member.memory_note}", self.now, certain=True)

    def later(
        self, seconds: float, *beating: ConnectedAgent, step: int = 1, committed: int = -1, phase: int = 1
    ) -> None:
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += 0.1
            for member in beating:
                if member.id == self.coordinator.round.head:
                    master = messages.Master(self.coordinator.round.number, member.address, 29500)
                    self.coordinator.on_message(member, master, self.now)
                ranks = [(Report(self.now, step, committed, phase), Times())] * 2 if member.in_round else []
                beat = messages.Beat(ranks, {"silent": self.silent.get(member.id, 0.0)}, self.now)
                self.coordinator.on_message(member, beat, self.now)
            self.coordinator.on_requests(read_requests(self.run, self.coordinator.round.running), self.now)
            self.coordinator.tick(self.now)

    def skip(self, seconds: float, *beating: ConnectedAgent) -> None:
        """Let time pass in which nothing changes, without playing it."""
        self.now += seconds
        self.coordinator._ticked = self.now
        for member in beating:
            member.heard = self.now

    def last(self, member: ConnectedAgent, kind: type[Message]) -> Any:
        """The newest message of a class that an agent has received, None without one."""
        return next((m for m in reversed(self.received[member.id]) if isinstance(m, kind)), None)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [e for e in read_json_lines(self.run.events) if e["event"] == name]

    @property
    def verdict(self) -> Verdict | None:
        return Verdict.read(self.run, 0)


def failure(node: int, rank: int, error: str = "", exit_code: int = 1, step: int = 5, time: float = 1.0) -> Failure:
    return Failure(node, rank, exit_code, error, time, step)


def fails(cluster: Cluster, members: list[ConnectedAgent], node: int, error: str = "") -> None:
    """A rank of a node fails in the running round, and everyone comes back."""
    failed = failure(node, node * 2, error, exit_code=1 if error else -9)
    for member in members:
        cluster.ready(member, *[failed] if member.node == node else [])
