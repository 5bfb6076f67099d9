"""Guards and tiers come from lists of names: what is taken off is named nowhere else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fsdp_jobs.run.leaves import LEAVES

_WITHOUT = """
import sys
from fsdp_jobs.run import leaves

sys.modules["fsdp_jobs.{leaf}"] = None
leaves.LEAVES = tuple(leaf for leaf in leaves.LEAVES if leaf != "{leaf}")
import fsdp_jobs.checkpoints.checkpointer, fsdp_jobs.control.server, fsdp_jobs.job, fsdp_jobs.node.elastic_agent

for part in ("control", "node", "rank"):
    print(*(made.__module__ for made in leaves.guards_in(part) + leaves.tiers_in(part)))
"""


@pytest.mark.integration
@pytest.mark.parametrize("leaf", sorted(LEAVES))
def test_coordinator_agents_and_ranks_do_without_a_leaf(leaf: str) -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT.format(leaf=leaf)], capture_output=True, text=True)
    found = {".".join(name.split(".")[1:3]) for name in done.stdout.split()}
    assert found == {*LEAVES} - {leaf}, done.stderr
