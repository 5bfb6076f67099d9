"""What the coordinator does in threads is done at once, unless a test says otherwise."""

from __future__ import annotations

import pytest

from fsdp_jobs.control import fencing


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fencing, "_SOON_S", 60)
