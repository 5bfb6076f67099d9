"""What ranks tell their agent of their shards."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fsdp_jobs.run.agreement import take_sums, write_sums
from fsdp_jobs.run.env import RANK_STATE_ENV, TERM_ENV


def test_steps_are_told_in_order_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANK_STATE_ENV, str(tmp_path))
    monkeypatch.setenv(TERM_ENV, "3")
    steps = random.Random(0).sample(range(5, 105), 100)
    for step in steps:
        write_sums(step, 1, {"w": str(step)})
    assert [*take_sums(tmp_path)] == [(3, step, 1, {"w": str(step)}) for step in range(5, 105)]
    assert not [*take_sums(tmp_path)]
