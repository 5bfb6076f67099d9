"""The report: whole without a network, true to the run, and safe whatever a run has written."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.schema import dump_config
from fsdp_jobs.observe.report.history import History
from fsdp_jobs.observe.report.page import write_report
from fsdp_jobs.run.directory import RunDir, write_atomic
from tests.jobs import cli
from tests.observe.browser import Watched, browser  # noqa: F401
from tests.recorded import HOSTILE, recorded_run


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href", "action")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_a_report_needs_no_network_and_executes_nothing_that_a_run_wrote(tmp_path: Path) -> None:
    written = write_report(recorded_run(tmp_path), pngs=True)
    assert [f.name for f in written] == ["report.html", "report-steps.png", "report-time.png", "report-goodput.png"]
    assert all(f.read_bytes().startswith(b"\x89PNG") for f in written[1:])
    page = _Page()
    page.feed(written[0].read_text())
    assert "script" not in page.tags
    assert all(link.startswith("#") for link in page.links), "something is loaded from elsewhere"
    ids = re.findall(r'\bid="([^"]+)"', written[0].read_text())
    assert len(ids) == len(set(ids)), "charts share ids"
    text = " ".join(page.words)
    assert HOSTILE in text and "img" not in page.tags
    for word in (
        "Over steps",
        "loss",
        "attempt 0",
        "fault",
        "checkpoint",
        "Planned and measured",
        "groups of 2",
        "is slow: its forward",
    ):
        assert word in text, word


def test_a_step_that_was_done_again_counts_once_and_breaks_the_line(tmp_path: Path) -> None:
    history = History.of(recorded_run(tmp_path))
    assert [r["step"] for r in history.newest()] == list(range(1, 21))
    assert [[part[0]["step"], part[-1]["step"]] for part in history.stretches()] == [[1, 12], [11, 20]]
    assert {kind: len(at) for kind, at in history.marks.items()} == {"fault": 1, "checkpoint": 1}


def test_of_a_long_run_evenly_spread_steps_are_drawn(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    line = {"loss": 1.0, "attempt": 0, "grad_norm": 1.0, "tokens_per_s": 12345.678, "useful_s": 1.0, "step_s": 1.0}
    with run.metrics.open("a") as f:
        f.writelines(json.dumps({"step": i, "time": 130.0 + i, **line}) + "\n" for i in range(21, 100_000))
    steps = [record["step"] for record in History.of(run).newest()]
    assert 1990 < len(steps) < 2010 and steps[-1] == 99_999
    assert max(after - before for before, after in pairwise(steps)) < 120


def test_a_run_that_has_not_begun_has_a_report(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "new")
    write_atomic(run.config, dump_config(compose_job(["name=new"])))
    (page,) = write_report(run)
    assert "submitted" in page.read_text()


def test_a_program_that_measures_little_or_nothing_has_a_report(tmp_path: Path) -> None:
    for name, lines in (
        ("nothing", []),
        ("own", [{"time": 103.0 + i, "attempt": 0, "step": i, "accuracy": i / 9} for i in range(9)]),
        ("stepless", [{"time": 103.0, "attempt": 0, "said": "hello"}]),
    ):
        run = recorded_run(tmp_path / "runs", name)
        run.plan.unlink()
        run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        (page,) = write_report(run)
        assert "Where the time went" in page.read_text() and "Failures" in page.read_text()
        assert ("accuracy" in page.read_text()) == (name == "own")
        assert name in cli(tmp_path, "status", name).stdout


@pytest.mark.integration
def test_a_report_is_legible_for_everybody(browser: Any, tmp_path: Path) -> None:  # noqa: F811
    (file,) = write_report(recorded_run(tmp_path))
    for name, settings in (
        ("report", {}),
        ("report-dark", {"color_scheme": "dark"}),
        ("report-phone", {"viewport": {"width": 390, "height": 844}}),
    ):
        watched = Watched(browser, **settings)
        watched.page.goto(file.as_uri())
        watched.page.get_by_role("img", name="Over steps", exact=True).wait_for()
        watched.check()
        assert watched.is_as_wide_as_the_window(), name
        watched.keep(tmp_path, name)


def test_the_terminal_shows_what_a_run_wrote_as_it_is(tmp_path: Path) -> None:
    recorded_run(tmp_path / "runs")
    for args in (["list"], ["status", "recorded"]):
        shown = cli(tmp_path, *args, COLUMNS="400")
        assert shown.returncode == 0 and HOSTILE in shown.stdout, shown.stderr
