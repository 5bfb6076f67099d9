"""Whether processes do nothing, told from what they use; where ranks are, told from what faulthandler writes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fsdp_jobs.guards.silence.node import Silence, files_of
from fsdp_jobs.guards.stall.messages import Dump, RankStack, Stacks
from fsdp_jobs.node.stacks import Stack
from fsdp_jobs.run import messages
from fsdp_jobs.run.directory import RunDir
from tests.control.cluster import PROGRAM, SILENCE, Cluster

LIMIT_S = 3.0
IN_BARRIER = Stack((("/site-packages/torch/distributed/distributed_c10d.py", "5", "barrier"), ("/a/t.py", "7", "main")))
IN_LOOP = Stack((("/a/t.py", "8", "main"),))


@contextmanager
def running(program: str) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", f"import time\nprint(flush=True)\n{program}"], stdout=-1)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def silent_s(watch: Silence, pid: int, seconds: float = LIMIT_S + 1.5) -> float | None:
    """Look once in a while; returns the first answer."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (answer := watch.look([pid], "written", time.monotonic())) is not None:
            return answer
        time.sleep(0.3)
    return None


@pytest.mark.integration
@pytest.mark.parametrize(
    ("program", "stack", "is_silent"),
    [
        ("time.sleep(99)", IN_LOOP, True),
        ("while True: pass", IN_BARRIER, True),  # as NCCL waits
        ("while True: pass", IN_LOOP, False),
        ("while True: time.sleep(0.01)", IN_BARRIER, False),  # from one collective to the next, as with gloo
    ],
)
def test_who_waits_or_spins_in_a_collective_is_silent(program: str, stack: Stack, is_silent: bool) -> None:
    with running(program) as pid:
        answer = silent_s(Silence(LIMIT_S, lambda: [stack], lambda: None), pid)
        assert (answer is not None and answer >= LIMIT_S) == is_silent


@pytest.mark.integration
def test_whoever_moves_or_writes_is_not_silent(tmp_path: Path) -> None:
    with running("time.sleep(99)") as pid:
        stacks = iter([[IN_LOOP], [IN_BARRIER], [IN_LOOP], [IN_LOOP]])
        assert silent_s(Silence(LIMIT_S, lambda: next(stacks), lambda: None), pid) is None
        run = RunDir(tmp_path)
        own, ours = run.path / "own" / "state.pt", run.events
        own.parent.mkdir()
        before = files_of(run)
        ours.write_text("{}")
        assert files_of(run) == before, "what the job itself writes"
        own.write_text("state")
        assert files_of(run) != before
        files = iter(range(9))
        assert silent_s(Silence(LIMIT_S, lambda: [IN_LOOP], lambda: next(files)), pid) is None


DUMP = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x00007f02 (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 5210 in barrier
  File "/v/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 80 in wrapper
  File "/home/me/train.py", line 12 in save
  File "<frozen runpy>", line 88 in _run_code
"""


def test_a_stack_is_told_by_the_programs_own_line() -> None:
    stack = Stack.parse(DUMP)
    assert stack.is_in_collective and str(stack) == "save (train.py:12), barrier"
    assert not Stack.parse("").frames and not Stack.parse("").is_in_collective


def rank(number: int, place: str, waits: bool = True, ended: bool = False, dumped: bool = True) -> RankStack:
    return RankStack(number, "sleeping", dumped, step=-1, ended=ended, place=place, waits=waits)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([rank(0, "a")] + [rank(n, "b") for n in (1, 2, 3)], "rank 0 on node 0 in a; rank 1 on node 0, rank 2 on node"),
        ([rank(n, "loading", waits=False) for n in (0, 1, 2)] + [rank(3, "b")], "rank 0 on node 0, rank 1 on node 0, "),
        ([rank(n, "b") for n in (0, 1, 2)] + [rank(3, "", ended=True)], "rank 3 on node 1 ended; rank 0 on node 0"),
        (
            [rank(n, "b") for n in (0, 1, 2)] + [rank(3, "", dumped=False)],
            "rank 3 on node 1 (sleeping) does not respond",
        ),
        ([rank(n, "b") for n in range(4)], "every rank in b"),
    ],
)
def test_all_nodes_are_silent_before_the_round_ends(tmp_path: Path, ranks: list[RankStack], said: str) -> None:
    cluster = Cluster(tmp_path, *PROGRAM, "nodes=2", "elastic.stall_timeout_s=30")
    agents = [cluster.join(node) for node in range(2)]
    for agent in agents:
        cluster.ready(agent)
    cluster.later(2, *agents, **SILENCE)
    for agent in agents:
        assert cluster.last(agents[0], Dump) is None, "the other node may be at work"
        cluster.silent[agent.id] = 31.0
        cluster.later(0.2, *agents, **SILENCE)
    for agent, its in zip(agents, (ranks[:2], ranks[2:]), strict=True):
        assert cluster.last(agent, Dump) is not None
        cluster.coordinator.on_message(agent, Stacks(its), cluster.now)
    cluster.later(0.2, *agents, **SILENCE)
    assert cluster.last(agents[1], messages.Break) is not None
    (stalled,) = cluster.events("stalled")
    assert stalled["why"].startswith("no output, no work and no new file for 31 s: "), stalled
    assert stalled["why"].partition(": ")[2].startswith(said), stalled


@pytest.mark.parametrize(("works_s", "verdict"), [(0, "stalled"), (700, None)])
def test_half_an_hour_of_silence_is_no_progress(tmp_path: Path, works_s: float, verdict: str | None) -> None:
    """A program that hangs again and again ends the job, unless it has worked for long before."""
    cluster = Cluster(tmp_path, *PROGRAM, "nodes=1", "elastic.max_failures_without_progress=2")
    agent = cluster.join(0)
    for _ in range(3):
        cluster.silent.clear()
        cluster.ready(agent)
        cluster.later(2, agent, **SILENCE)
        cluster.skip(works_s + 1800, agent)
        cluster.silent[agent.id] = 1801.0
        cluster.later(0.2, agent, **SILENCE)
        cluster.coordinator.on_message(agent, Stacks([rank(0, "b")]), cluster.now)
        cluster.later(1.5, agent, **SILENCE)
    assert len(cluster.events("stalled")) == 3
    assert (cluster.verdict.verdict if cluster.verdict else None) == verdict
