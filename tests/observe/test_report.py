"""The report: whole without a network, true to the run, and safe whatever a run has written."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.schema import dump_config
from fsdp_jobs.observe.report import write_report
from fsdp_jobs.plan.plan import make_plan
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import write_atomic
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


def inside(page: Path) -> dict[str, Any]:
    """What the file has in place of a server: answers by address."""
    found = re.search(r'<script type="application/json" id="inside">(.*)</script>', page.read_text())
    assert found is not None
    return dict(json.loads(found[1])["answers"])


def test_a_report_loads_nothing_and_executes_nothing_that_a_run_wrote(tmp_path: Path) -> None:
    (written,) = write_report(recorded_run(tmp_path))
    page = _Page()
    page.feed(written.read_text())
    assert page.tags.count("script") == 3 and "img" not in page.tags and "link" not in page.tags
    assert all(link.startswith("#") for link in page.links), "something is loaded from elsewhere"
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', written.read_text())
    assert policy and policy[1].startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy[1]


def test_a_run_that_has_not_begun_has_a_report(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "new")
    write_atomic(run.config, dump_config(compose_job(["name=new"])))
    (page,) = write_report(run)
    assert "name: new" in inside(page)["api/runs/new"]["config"]


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
        about, curves = inside(page)[f"api/runs/{name}"], inside(page)[f"api/runs/{name}/curves"]
        assert any(HOSTILE in sentence for _, sentence in about["story"]), "the failure"
        assert about["compared"] == [] and ("accuracy" in curves["columns"]) == (name == "own")
        assert name in cli(tmp_path, "status", name).stdout


@pytest.mark.integration
def test_a_report_is_the_runs_page_without_a_server_legible_for_everybody(browser: Any, tmp_path: Path) -> None:  # noqa: F811
    run = recorded_run(tmp_path)
    write_atomic(run.rank_log(0, 0, 1), "\x1b[31mred words\x1b[0m\n")
    (file,) = write_report(run)
    for name, settings in (
        ("report", {}),
        ("report-dark", {"color_scheme": "dark"}),
        ("report-phone", {"viewport": {"width": 390, "height": 844}}),
    ):
        watched = Watched(browser, **settings)
        page = watched.page
        page.context.set_offline(True)
        page.goto(file.as_uri())
        page.get_by_role("img", name="loss over step; newest: recorded 3", exact=True).wait_for()
        page.get_by_role("img", name=re.compile(r"goodput over time; newest: recorded 0\.")).wait_for()
        text = page.inner_text("body")
        for word in (
            "20/20",
            "2 steps lost",
            "is slow: its forward",
            "groups of 2",
            "Planned and measured",
            "as of 20",
        ):
            assert word in text, word
        assert HOSTILE in page.inner_text("#events") and HOSTILE in page.inner_text("#log")
        assert "red words" in page.inner_text("#log") and "\x1b" not in page.inner_text("#log")
        assert not page.locator("#back, #logs, #runs").filter(visible=True).count(), "what needs a server"
        watched.check()
        assert watched.is_as_wide_as_the_window(), name
        watched.keep(tmp_path, name)


@pytest.mark.integration
def test_a_program_that_measures_nothing_has_no_empty_charts_and_no_label_is_repeated(
    browser: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    run = recorded_run(tmp_path, "script")
    run.metrics.unlink()
    watched = Watched(browser)
    watched.page.goto(write_report(run)[0].as_uri())
    watched.page.wait_for_selector("#events >> text=is slow")
    assert not watched.page.locator("#run .plot").filter(visible=True).count()
    write_report(recorded_run(tmp_path, "short"))
    watched.page.add_init_script(
        "const draw = CanvasRenderingContext2D.prototype.fillText; window.labels = [];"
        "CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {"
        " labels.push(text); return draw.call(this, text, ...at); };"
    )
    watched.page.goto((tmp_path / "short" / "report.html").as_uri())
    watched.page.get_by_role("img", name=re.compile("goodput over time; newest")).wait_for()
    watched.page.wait_for_function("labels.includes('20s')")
    labels = [label for label in watched.page.evaluate("labels") if label.endswith("s")]
    assert len(labels) % len(set(labels)) == 0, labels
    watched.check()


@pytest.mark.integration
def test_a_picture_of_a_report_needs_a_browser_and_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    browser: Any,  # noqa: F811
) -> None:
    page, picture = write_report(recorded_run(tmp_path), png=True)
    assert picture == page.with_suffix(".png") and picture.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match="no browser"):
        write_report(RunDir(tmp_path / "recorded"), png=True)


def test_the_terminal_shows_what_a_run_wrote_as_it_is(tmp_path: Path) -> None:
    recorded_run(tmp_path / "runs")
    for args in (["list"], ["status", "recorded"]):
        shown = cli(tmp_path, *args, COLUMNS="400")
        assert shown.returncode == 0 and HOSTILE in shown.stdout, shown.stderr


def test_no_goodput_is_compared_before_a_step_counts(tmp_path: Path) -> None:
    """The story above shows a dash, and the table said 0.0%."""
    run = recorded_run(tmp_path)
    address = f"api/runs/{run.name}"
    assert "goodput" in [row[0] for row in inside(write_report(run)[0])[address]["compared"]]
    run.metrics.write_text("")
    assert inside(write_report(run)[0])[address]["compared"] == []


def test_nothing_is_compared_with_the_plan_of_an_unknown_model(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    write_atomic(run.plan, make_plan(compose_job(["script=train.py"])).to_json())
    (page,) = write_report(run)
    assert inside(page)[f"api/runs/{run.name}"]["compared"] == []
