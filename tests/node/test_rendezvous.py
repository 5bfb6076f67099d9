"""An agent whose connection to the coordinator is lost at a bad moment, and error files that are half written."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.node.elastic_agent import Agent
from fsdp_jobs.node.rendezvous import CoordinatorRendezvous
from fsdp_jobs.run import messages
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import COORDINATOR_ENV
from fsdp_jobs.run.failure import Failure
from fsdp_jobs.run.rank_state import Phase, Request

ROUND = messages.Round(3, 4, 2, 2, rank=1, layout="", last=1, partner=None)


class FakeLink:
    """In the connection's place: what was sent, while there is one."""

    def __init__(self) -> None:
        self.connections, self.is_up, self.sent = 1, True, list[messages.Message]()

    def send(self, message: messages.Message) -> bool:
        if self.is_up and not isinstance(message, messages.Beat):
            self.sent.append(message)
        return self.is_up

    def beat(self) -> None:
        """Nobody looks at beats here."""


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CoordinatorRendezvous:
    monkeypatch.setenv(COORDINATOR_ENV, "127.0.0.1:1")
    run = RunDir(tmp_path / "run")
    run.token.parent.mkdir(parents=True)
    run.token.write_text("secret")
    (tmp_path / "states").mkdir()
    this = messages.Agent(0, 1, "h", "h", 1, (), 0, "id")
    made = CoordinatorRendezvous(compose_job(["nodes=2"]), run, this, 0, tmp_path / "states")
    made.link.close()
    made.link = FakeLink()  # type: ignore[assignment]
    return made


def _until(condition: object) -> None:
    deadline = time.monotonic() + 10
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_connection_lost_between_a_round_and_its_address_sends_the_agent_back(agent: CoordinatorRendezvous) -> None:
    link: FakeLink = agent.link  # type: ignore[assignment]
    joined: list[object] = []
    threading.Thread(target=lambda: joined.append(agent.next_rendezvous()), daemon=True).start()
    _until(lambda: [type(m) for m in link.sent] == [messages.Ready])
    agent._receive(ROUND.line())
    link.connections = 2  # the address went over the first
    agent._receive(messages.Alive(None, time.time(), True).line())
    _until(lambda: len(link.sent) == 2)
    assert isinstance(link.sent[1], messages.Ready) and not joined
    agent._broken = 7  # by a coordinator that is gone; the new one uses a number again
    agent._receive(ROUND.line())
    agent._receive(messages.Master(3, "first", 29500).line())
    _until(lambda: joined)
    assert agent.num_nodes_waiting() == 0


def test_what_happens_without_a_connection_is_told_with_the_next(agent: CoordinatorRendezvous) -> None:
    link: FakeLink = agent.link  # type: ignore[assignment]
    link.is_up = False
    agent.failed([Failure(1, 1, 1, "ValueError: bad", 0.0, 5)])
    threading.Thread(target=agent.next_rendezvous, daemon=True).start()
    _until(lambda: agent._waiting)
    link.is_up = True
    for _ in range(2):
        agent._receive(messages.Alive(None, time.time(), True).line())
    assert [f.error for m in link.sent if isinstance(m, messages.Failed) for f in m.failures] == ["ValueError: bad"]
    agent.notice("SIGTERM")
    assert agent._hello(("", 0)).signal == "SIGTERM", "a new coordinator must not plan with this node"


def test_the_step_to_which_ranks_were_restored_is_known_when_their_failure_is(agent: CoordinatorRendezvous) -> None:
    sent = agent.link.sent = list[messages.Message]()  # type: ignore[attr-defined]
    agent.link.beat = lambda: sent.append(agent._beat())  # type: ignore[method-assign]
    agent.states[0].report(80, 50, Phase.STARTING)
    agent.failed([Failure(1, 1, -11, "", 0.0, 80)])
    beat, failed = sent
    assert isinstance(beat, messages.Beat) and isinstance(failed, messages.Failed)
    assert beat.ranks[0][0].step == failed.failures[0].step == 80


def test_a_request_to_save_does_not_replace_one_to_stop(agent: CoordinatorRendezvous) -> None:
    agent.request(Request.PARK)
    agent.request(Request.SAVE)
    assert [state.requested() for state in agent.states] == [Request.PARK]


@pytest.mark.parametrize("half", ["", '{"message": {"mess', "[]"])
def test_half_an_error_file_ends_no_agent(tmp_path: Path, half: str) -> None:
    """Torch writes it in place: another rank may be about to, or /dev/shm is full."""
    files = [tmp_path / f"error-{rank}.json" for rank in range(3)]
    whole = '{"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "", "timestamp": "1"}}}'
    for file, content in zip(files, (whole, half, half), strict=True):
        file.write_text(content)
    context = object.__new__(MultiprocessContext)
    context._pc = SimpleNamespace(processes=[SimpleNamespace(exitcode=code) for code in (1, 1, None)])  # type: ignore
    context.error_files = {rank: str(file) for rank, file in enumerate(files)}
    agent = object.__new__(Agent)
    agent._pcontext = context
    workers = [SimpleNamespace(global_rank=rank, local_rank=rank, id=11 + rank) for rank in range(3)]
    dead = agent._dead(SimpleNamespace(workers=workers))  # type: ignore[arg-type]
    assert {rank: failure.exitcode for rank, failure in dead.items()} == {0: 1, 1: 1}
    assert dead[0].error_file_data["message"]["message"] == "ValueError: x"
