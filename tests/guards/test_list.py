"""Guards come from a list of names: what is taken off it is named nowhere else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fsdp_jobs.run.guards import GUARDS

_WITHOUT = """
import sys
from fsdp_jobs.run import guards

sys.modules["fsdp_jobs.guards.{guard}"] = None
guards.GUARDS = tuple(name for name in guards.GUARDS if name != "{guard}")
import fsdp_jobs.checkpoints.checkpointer, fsdp_jobs.control.server, fsdp_jobs.job, fsdp_jobs.node.elastic_agent
import fsdp_jobs.tiers.memory.copies

print(*(kind.__module__ for part in ("control", "node", "rank") for kind in guards.guards_in(part)))
"""


@pytest.mark.integration
@pytest.mark.parametrize("guard", GUARDS)
def test_coordinator_agents_and_ranks_do_without_a_guard(guard: str) -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT.format(guard=guard)], capture_output=True, text=True)
    found = {name.split(".")[2] for name in done.stdout.split()}
    assert found == {*GUARDS} - {guard}, done.stderr
