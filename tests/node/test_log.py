"""What the agent logs."""

from __future__ import annotations

import subprocess
import sys

_FAILURE = """
import logging, sys
from fsdp_jobs.node import agent
agent.log.configure()
agent.log.take_over("torch.distributed")
try:
    raise ValueError("a rank has failed")
except ValueError:
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").exception("failed")
print("torch._dynamo" in sys.modules)
"""


def test_the_log_of_a_failed_rank_does_not_import_the_compiler() -> None:
    """It took seconds, before the agent told the coordinator of the failure."""
    done = subprocess.run([sys.executable, "-c", _FAILURE], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "False\n"
    assert "ERROR torch.distributed.elastic.multiprocessing.api: failed\nTraceback" in done.stderr
