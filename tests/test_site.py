"""The documentation site: what `make docs` builds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import ROOT

pytest.importorskip("material", reason="pip install 'fsdp_jobs[docs]'")


@pytest.mark.integration
def test_the_site_builds_without_a_warning_and_its_pages_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # its successor's advertisement
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        loaded = re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?((?:https?:)?//[^\" >]+)", page.read_text()
        )
        assert not loaded, f"{page}: {loaded}"
