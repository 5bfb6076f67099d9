"""The soak in short: four kills at random moments; `make soak` does fifty."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.jobs import ROOT
from tests.netns import needs_netns

pytestmark = [pytest.mark.integration, needs_netns, pytest.mark.timeout(600)]


def test_kills_at_random_moments_change_no_loss() -> None:
    soak = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--kills", "4"]
    done = subprocess.run(soak, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
