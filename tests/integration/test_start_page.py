"""docs/start/laptop.md, run command by command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import cli
from tests.pages import QUICK, run_page

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


def but_for_the_installation(line: str) -> str:
    """The environment is that of the tests; tests/test_packaging.py installs one. The steps are of fewer tokens."""
    line = line.replace("name=first", f"name=first {QUICK}").replace(
        "rehearse kill_node", f"rehearse kill_node {QUICK}"
    )
    return "" if line in ("make setup", ". .venv/bin/activate") else line


def test_the_page_for_this_machine_runs_as_it_says(tmp_path: Path) -> None:
    try:
        run_page("laptop.md", tmp_path, but_for_the_installation)
    finally:
        cli(tmp_path / "checkout", "cancel", "first", "--now")  # what a failure has left
    run = tmp_path / "checkout" / "runs" / "first"
    assert (run / "report.html").is_file() and list((run / "export").glob("*.safetensors"))
