"""What an agent reports of a rank that has failed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fsdp_jobs.node.elastic_agent import Agent
from fsdp_jobs.run.messages import Failed
from fsdp_jobs.run.rank_state import Phase, RankState
from fsdp_jobs.run.term import Lease

WORKER = """Caught OSError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/v/torch/utils/data/_utils/worker.py", line 349, in _worker_loop
    data = fetcher.fetch(index)
           ^^^^^^^^^^^^^^^^^^^^
OSError: cat-0017.jpg is truncated
"""
SPAWNED = """

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "/v/torch/multiprocessing/spawn.py", line 95, in _wrap
    fn(i, *args)

ValueError: no such optimizer
"""
LAUNCHED = """
============================================================
train FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-28_07:35:25
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 26591)
  traceback : Traceback (most recent call last):
    File "/v/torch/distributed/elastic/multiprocessing/errors/__init__.py", line 366, in wrapper
      return f(*args, **kwargs)
             ^^^^^^^^^^^^^^^^^^
    File "/home/train.py", line 9, in train
      raise KeyError("vocab.json")
  KeyError: 'vocab.json'

============================================================"""


def _after_step_7(folder: Path) -> RankState:
    state = RankState(folder, 0)
    state.report(7, -1, Phase.TRAINING)
    return state


EXCEPTION = """[rank3]: Traceback (most recent call last):
[rank3]:   File "train.py", line 9, in main
[rank3]:     raise error
[rank3]: torch.AcceleratorError: bad shard
"""
WORKER_SAYS = "OSError: Caught OSError in DataLoader worker process 0"
SPAWNED_SAYS = "ProcessRaisedException: -- Process 1 terminated with the following error"


@pytest.mark.parametrize(
    ("raised", "reported"),
    [
        (f"OSError: {WORKER}", f"{WORKER_SAYS}: OSError: cat-0017.jpg is truncated"),
        (f"ProcessRaisedException: {SPAWNED}", f"{SPAWNED_SAYS}: ValueError: no such optimizer"),
        (f"ChildFailedError: {LAUNCHED}", "ChildFailedError: KeyError: 'vocab.json'"),  # of a torchrun in the program
        ("ChildFailedError: \n=========\ntrain.py FAILED\n---------\n", "ChildFailedError: train.py FAILED"),
        ("RuntimeError: Errors in the state of Net:\n\tno head.", "RuntimeError: Errors in the state of Net: no head."),
        ("ValueError: bad\nTraceback", "ValueError: bad"),
        ("ImportError: \n\nneeds sentencepiece\n", "ImportError: needs sentencepiece"),  # as transformers writes them
        ("KeyboardInterrupt: ", "KeyboardInterrupt"),
        ("ValueError: \x1b[31mred\x1b[0m\x07", "ValueError: red"),
        ("FileNotFoundError: 'data/\udcff.bin'", "FileNotFoundError: 'data/?.bin'"),  # a name that is not UTF-8
    ],
)
def test_any_exception_reaches_the_coordinator(tmp_path: Path, raised: str, reported: str) -> None:
    error_file = tmp_path / "error.json"
    error_file.write_text(json.dumps({"message": {"message": raised, "extraInfo": {"timestamp": "1"}}}))
    handler = SimpleNamespace(lease=Lease(tmp_path), log_files=lambda: [tmp_path], states=[_after_step_7(tmp_path)])
    agent: Any = SimpleNamespace(_handler=handler, _node=1, _kills_for_memory=0)
    failure = Agent._describe(agent, 3, ProcessFailure(0, pid=1, exitcode=1, error_file=str(error_file)))
    (received,) = Failed.read(Failed([failure]).line()).failures
    assert (received.node, received.rank, received.step, received.error) == (1, 3, 7, reported)


@pytest.mark.parametrize(
    ("before", "printed", "said"),
    [
        ("", "usage: train.py [--lr LR]\n\x1b[31mtrain.py: error: no --lrr\x1b[0m\n", "train.py: error: no --lrr"),
        ("", f"{EXCEPTION}wandb: Find logs at: ./wandb/run-1/logs\n", "[rank3]: torch.AcceleratorError: bad shard"),
        (
            "",
            f"{EXCEPTION}the next one\nConnectionError: again\ngave up\n",
            "[rank3]: torch.AcceleratorError: bad shard",
        ),
        ("", "ConnectionError: again\ngave up\n", "gave up"),
        (EXCEPTION, "gave up\n", "gave up"),
    ],
)
def test_a_program_that_only_exits_is_named_by_its_traceback_or_last_line(
    tmp_path: Path, before: str, printed: str, said: str
) -> None:
    """What an earlier round has printed does not count."""
    rank_log = tmp_path / "rank-3.log"
    rank_log.write_text(before + printed)
    handler = SimpleNamespace(lease=Lease(tmp_path), log_files=lambda: [rank_log], states=[_after_step_7(tmp_path)])
    agent: Any = SimpleNamespace(_handler=handler, _node=1, _kills_for_memory=0, _log_sizes=[len(before)])
    failure = Agent._describe(agent, 3, ProcessFailure(0, pid=1, exitcode=2, error_file=str(tmp_path / "none.json")))
    (received,) = Failed.read(Failed([failure]).line()).failures
    assert received.describe() == f"rank 3 on node 1 failed: exit code 2 ({said})"
    assert not received.is_victim and not received.error  # a line is no exception


GLOO = (
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete"
)
CLIENTS = "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined."
NCCL = """terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: [Rank 0] \
Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, \
Timeout(ms)=600000) ran for 600020 milliseconds before timing out.
Exception raised from checkTimeout at ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:609 (most recent call first):
"""


@pytest.mark.parametrize(
    ("raised", "log", "waited_s"),
    [
        (GLOO, "", 1800),
        (CLIENTS, "", 601),
        ("", NCCL, 600.02),
        ("", "free(): invalid pointer\n", 0),
        ("KeyError: 5", "", 0),
    ],
)
def test_how_long_a_rank_waited_before_its_collective_timed_out(
    tmp_path: Path, raised: str, log: str, waited_s: float
) -> None:
    """NCCL's watchdog ends the process, so that only its log tells."""
    error_file, rank_log = tmp_path / "error.json", tmp_path / "rank-3.log"
    if raised:
        error_file.write_text(json.dumps({"message": {"message": raised, "extraInfo": {"timestamp": "1"}}}))
    rank_log.write_text(log + "frame #0: c10::Error::Error + 0x96 (0x7f3b6d41df86 in libc10.so)\n" * 30)
    handler = SimpleNamespace(lease=Lease(tmp_path), log_files=lambda: [rank_log], states=[_after_step_7(tmp_path)])
    agent: Any = SimpleNamespace(_handler=handler, _node=1, _kills_for_memory=0)
    code = 1 if raised else -signal.SIGABRT
    failure = Agent._describe(agent, 3, ProcessFailure(0, pid=1, exitcode=code, error_file=str(error_file)))
    assert failure.waited_s == pytest.approx(waited_s)
