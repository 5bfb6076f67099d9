"""What an agent reports of a rank that has failed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fsdp_jobs.node.elastic_agent import Agent
from fsdp_jobs.run.messages import Failed
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
WORKER_SAYS = "OSError: Caught OSError in DataLoader worker process 0"
SPAWNED_SAYS = "ProcessRaisedException: -- Process 1 terminated with the following error"


@pytest.mark.parametrize(
    ("raised", "reported"),
    [
        (f"OSError: {WORKER}", f"{WORKER_SAYS}: OSError: cat-0017.jpg is truncated"),
        (f"ProcessRaisedException: {SPAWNED}", f"{SPAWNED_SAYS}: ValueError: no such optimizer"),
        ("RuntimeError: Errors in the state of Net:\n\tno head.", "RuntimeError: Errors in the state of Net: no head."),
        ("ValueError: bad\nTraceback", "ValueError: bad"),
        ("ImportError: \n\nneeds sentencepiece\n", "ImportError: needs sentencepiece"),  # as transformers writes them
        ("KeyboardInterrupt: ", "KeyboardInterrupt"),
        ("FileNotFoundError: 'data/\udcff.bin'", "FileNotFoundError: 'data/?.bin'"),  # a name that is not UTF-8
    ],
)
def test_any_exception_reaches_the_coordinator(tmp_path: Path, raised: str, reported: str) -> None:
    error_file = tmp_path / "error.json"
    error_file.write_text(json.dumps({"message": {"message": raised, "extraInfo": {"timestamp": "1"}}}))
    handler = SimpleNamespace(lease=Lease(tmp_path))
    agent: Any = SimpleNamespace(_handler=handler, _node=1, _kills_for_memory=0, _step=lambda _: 7)
    failure = Agent._describe(agent, 3, ProcessFailure(0, pid=1, exitcode=1, error_file=str(error_file)))
    (received,) = Failed.read(Failed([failure]).line()).failures
    assert (received.node, received.rank, received.step, received.error) == (1, 3, 7, reported)
