"""What the coordinator does in threads is done at once, unless a test says otherwise."""

from __future__ import annotations

import pytest

from fsdp_jobs.run import threads


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_SOON_S", 60)
