"""What the coordinator does in threads is done at once here, too: a plan can take longer than many ticks of a test."""

from __future__ import annotations

from tests.control.conftest import _patience

__all__ = ["_patience"]
