"""The dashboard: what it shows, what it refuses, and that it opens in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from fsdp_jobs.observe.dashboard.app import make_app
from fsdp_jobs.run.directory import RunDir, write_atomic
from tests.jobs import environment, job
from tests.recorded import HOSTILE, add_line, recorded_run

CHROMIUM = shutil.which("chromium")


def client(folder: Path, token: str | None = None, host: str = "localhost") -> TestClient:
    return TestClient(make_app(str(folder), ["localhost"], token), base_url=f"http://{host}")


def test_hostile_words_and_names_do_no_harm(tmp_path: Path) -> None:
    recorded_run(tmp_path / "runs")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "job.json").write_text("{}")
    web = client(tmp_path / "runs")
    for page in ("/rows", "/runs/recorded/report"):
        shown = web.get(page)
        assert shown.status_code == 200
        assert "<script" not in shown.text and "<img" not in shown.text and "&lt;script" in shown.text
        assert "script-src 'self'" in shown.headers["content-security-policy"]
    logs = web.get("/runs/recorded/logs")
    assert HOSTILE in logs.text and logs.headers["content-type"].startswith("text/plain")
    assert logs.headers["x-content-type-options"] == "nosniff"
    for name in ("..", "../secret", "%2e%2e%2fsecret", "..%2fsecret", "/etc/passwd", "nothing", "a%00b"):
        assert web.get(f"/runs/{name}/report").status_code == 404, name
        assert web.get(f"/runs/{name}/logs").status_code == 404, name
    assert web.post("/runs/recorded/report").status_code == 405


def test_it_answers_to_its_own_name_and_with_a_token_only_who_has_it(tmp_path: Path) -> None:
    recorded_run(tmp_path)
    assert client(tmp_path, host="rebound.example").get("/rows").status_code == 400
    web = client(tmp_path, token="sesame")
    assert web.get("/rows").status_code == web.get("/rows?token=wr%C3%B6ng").status_code == 403
    assert web.get("/rows?token=sesame").status_code == 200  # redirected, with a cookie
    assert "token" not in str(web.get("/rows").url) and web.get("/rows").status_code == 200


def test_a_hundred_runs_are_listed_and_what_is_new_is_shown(tmp_path: Path) -> None:
    first = recorded_run(tmp_path, "run-000")
    runs = [RunDir(shutil.copytree(first.path, tmp_path / f"run-{i:03d}")) for i in range(1, 100)]
    web = client(tmp_path)
    assert len(re.findall("/runs/run-", web.get("/rows").text)) == 100
    add_line(runs[7].metrics, {"step": 21, "loss": 0.1234, "lr": 0, "grad_norm": 0, "step_s": 1, "tokens_per_s": 1,
                               "checkpoint_stall_s": 0.0, "attempt": 0, "time": 140.0})  # fmt: skip
    assert web.get("/rows").text.count("0.1234") == 1


def test_a_job_that_its_launcher_no_longer_knows_has_failed_as_in_status(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "runs", "gone")
    lines = run.events.read_text().splitlines(keepends=True)
    run.events.write_text("".join(line for line in lines if "attempt_ended" not in line))
    write_atomic(run.job, json.dumps({**run.read_job(), "handle": "local_fsdp://fsdp_jobs/gone"}))
    web, deadline = client(tmp_path / "runs"), time.monotonic() + 30
    while "no longer knows the job" not in (shown := web.get("/rows").text):
        assert time.monotonic() < deadline, shown
        time.sleep(0.1)
    assert "state failed" in shown


@contextmanager
def dashboard(folder: Path) -> Iterator[str]:
    """A dashboard as a user starts it; its address."""
    command = [sys.executable, "-m", "fsdp_jobs", "dashboard", "--port", "0"]
    process = subprocess.Popen(command, cwd=folder, env=environment(folder), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(10)


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


@pytest.mark.integration
def test_a_running_job_and_its_fault_are_seen_in_chromium(browser: Any, tmp_path: Path) -> None:
    page = browser.new_page(viewport={"width": 1150, "height": 1500})
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    recorded_run(tmp_path / "runs", "hostile")
    with job(tmp_path, "watched", "steps=4000", "checkpoint.every_steps=20") as running, dashboard(tmp_path) as address:
        running.until(lambda: bool(running.events("checkpoint")), "a checkpoint")
        assert "?token=" in address, "other users of this machine"
        page.goto(address)
        row = page.locator("tr", has_text="watched")
        before = row.inner_text(timeout=30_000)
        running.until_step(running.step() + 10)
        page.wait_for_function("before => !document.body.innerText.includes(before)", arg=before, timeout=30_000)
        page.click("text=watched")
        page.wait_for_selector("text=Over time", timeout=60_000)
        loss = page.locator("p", has_text="loss").first
        first = loss.inner_text()
        running.ranks(1)[0].kill()
        page.wait_for_selector("text=Failures", timeout=60_000)
        page.wait_for_selector("svg >> text=fault", timeout=60_000)
        running.until(lambda: bool(running.events("resumed")), "it goes on")
        page.wait_for_function(
            "first => !document.body.innerText.includes(first)", arg=first, timeout=60_000
        )  # the loss moves
        page.screenshot(path=str(tmp_path / "dashboard.png"), full_page=True)
        page.goto(address.partition("?")[0] + "runs/hostile")  # the browser has the token by now
        page.wait_for_selector("text=Failures", timeout=60_000)
        assert "alert('x')" in page.inner_text("main")
    assert not complaints
    assert (tmp_path / "dashboard.png").stat().st_size > 10_000
