"""SIGTERM to every process of a node at once, as SLURM sends it without cgroups: the state is saved nevertheless."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.jobs import family, job, signal_all
from tests.world import PACED

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.mark.parametrize("workers", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_a_signal_to_a_whole_node_is_a_request_to_save(tmp_path: Path, workers: int) -> None:
    endless = ["steps=100000", *PACED, f"data.workers={workers}", "checkpoint.async_mode=thread"]
    with job(tmp_path, "tree", *endless, nodes="2", nproc=1) as tree:
        tree.until_step(5)
        node = family(tree.agent(1))
        signal_all(node, signal.SIGTERM)
        tree.until(lambda: bool(tree.events("stop_requested")), "the request")
        signal_all(node, signal.SIGTERM)  # slurmd's and srun's, as of a preemption without GraceTime
        tree.until(lambda: bool(tree.events("attempt_ended")), "the end of the attempt")
        (ended,) = tree.events("attempt_ended")
        assert (ended["verdict"], ended["decision"]) == ("preempted", "requeue"), tree.story()
        assert ended["committed"] == ended["step"] >= 5, tree.story()
        assert not tree.events("rank_failed") and len(tree.events("round_started")) == 1, tree.story()
