"""A real browser for tests of pages, and what they ask of every page in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
KEPT = os.environ.get("SCREENSHOTS")  # folder in which screenshots are kept; else with the test's other files


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt install chromium")
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"]
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=[*quiet, *root])
        yield chromium
        chromium.close()


class Watched:
    """A page, and what the browser complains of: errors, refused scripts and styles, dialogs."""

    def __init__(self, browser: Any, **settings: Any):
        self.page = browser.new_page(**{"viewport": {"width": 1200, "height": 1000}, **settings})
        self.complaints: list[str] = []
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))

    def check(self) -> None:
        """axe-core finds nothing serious or critical, and the browser has not complained."""
        axe = pytest.importorskip("axe_playwright_python.sync_playwright")
        found = axe.Axe().run(self.page).response["violations"]
        bad = [
            (v["id"], v["impact"], [n["html"][:200] + n["failureSummary"] for n in v["nodes"][:3]])
            for v in found
            if v["impact"] in ("serious", "critical")
        ]
        assert not bad, bad
        assert not self.complaints

    def is_as_wide_as_the_window(self) -> bool:
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))

    def keep(self, folder: Path, name: str) -> None:
        """Keep a picture of the whole page."""
        into = Path(KEPT) if KEPT else folder
        into.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=str(into / f"{name}.png"), full_page=True)
