"""Ranks that live and do not advance."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.jobs import job
from tests.world import TINY_TASK

pytestmark = pytest.mark.integration


def test_a_hanging_rank_is_found_named_and_restarted(tmp_path: Path) -> None:
    overrides = ["model=custom", "model._target_=tests.models.hangs_at_step_6", "model.wrap_classes=[Block]"]
    overrides += [*TINY_TASK, "data.micro_batch=4", "steps=12", "elastic.stall_timeout_s=3", "fsdp=full_shard"]
    with job(tmp_path, "hang", *overrides, nodes="2", nproc=1, tiny=False) as hang:
        assert hang.wait().verdict == "done"
        stalled = hang.events("stalled")
        assert len(stalled) == 1
        assert "no rank has done a step" in stalled[0]["why"]
        stacks = sorted(hang.run.path.glob("attempts/0/node-*/stacks-rank-*.txt"))
        assert len(stacks) == 2
        assert "in forward" in stacks[1].read_text() and "models.py" in stacks[1].read_text()
        assert len(hang.losses()) == 12


def test_a_stopped_rank_is_the_culprit(tmp_path: Path) -> None:
    with job(tmp_path, "frozen", "steps=400", "elastic.stall_timeout_s=3", "checkpoint.every_steps=50") as frozen:
        frozen.until_step(60)
        frozen.ranks(1)[0].send_signal(signal.SIGSTOP)
        frozen.until(lambda: bool(frozen.events("stalled")), "the stall is noticed", 30)
        why = frozen.events("stalled")[0]["why"]
        assert "on node 1 (stopped) does not respond" in why
        assert frozen.wait().verdict == "done"
        assert len(frozen.losses()) == 400
