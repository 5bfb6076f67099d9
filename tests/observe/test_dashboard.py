"""The dashboard: what it tells, what it refuses, and how it looks and reacts in a real browser."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from fsdp_jobs.launchers.base import Description, Launcher, launcher_of
from fsdp_jobs.observe.dashboard import live
from fsdp_jobs.observe.dashboard.app import Dashboard, make_app
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.identity import Identity
from fsdp_jobs.run.status import RunStatus
from fsdp_jobs.submit import submitted
from fsdp_jobs.submit.overview import Overview
from fsdp_jobs.sweeps.jobs import measured
from fsdp_jobs.sweeps.table import sweeps_in
from tests.jobs import cli, environment, job
from tests.observe.browser import Watched, browser  # noqa: F401
from tests.recorded import HOSTILE, add_line, of_sweep, recorded_run
from tests.world import PACED


def client(folder: Path, token: str | None = None, host: str = "localhost") -> TestClient:
    """A browser; it has the token unless that is given."""
    app = make_app(Dashboard(str(folder), sweeps_in, measured), ["localhost"], token or "known")
    return TestClient(app, base_url=f"http://{host}", headers={} if token else {"Authorization": "Bearer known"})


def until(told: Callable[[], bool], what: str, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not told():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def unfinished(folder: Path, name: str, handle: str) -> RunDir:
    """A run whose end is not recorded, so that its launcher is asked."""
    run = recorded_run(folder, name)
    lines = run.events.read_text().splitlines(keepends=True)
    run.events.write_text("".join(line for line in lines if "attempt_ended" not in line))
    write_atomic(run.job, json.dumps({**run.read_job(), "handle": handle}))
    return run


def step_line(step: int, at: float, loss: float) -> dict[str, Any]:
    sums = {"useful_s": 20.0, "stall_s": 0.0, "lost_s": 2.0, "recover_s": 2.0}
    return {"step": step, "loss": loss, "step_s": 1, "tokens_per_s": 100, "attempt": 0, "time": at, **sums}


def test_no_path_leads_out_of_the_folder_and_every_answer_forbids_foreign_code(tmp_path: Path) -> None:
    recorded_run(tmp_path / "runs")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "job.json").write_text('{"handle": "h"}')
    web = client(tmp_path / "runs")
    for page in ("/", "/app.js", "/style.css", "/sweep.js", "/api/runs/recorded", "/api/runs/recorded/curves"):
        shown = web.get(page)
        assert shown.status_code == 200, page
        policy = shown.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'" in policy and "unsafe" not in policy
        assert shown.headers["x-content-type-options"] == "nosniff"
    about = web.get("/api/runs/recorded")
    assert about.headers["content-type"] == "application/json" and about.json()["story"][0][1].startswith(HOSTILE)
    for name in ("..", "../secret", "%2e%2e%2fsecret", "..%2fsecret", "%2fetc%2fpasswd", "nothing", "a%00b"):
        for rest in ("", "/curves", "/logs"):
            assert web.get(f"/api/runs/{name}{rest}").status_code == 404, name + rest
        assert "handle" not in web.get(f"/{name}").text
        assert web.get(f"/api/sweeps/{name}").status_code == 404
    assert web.post("/api/runs/recorded").status_code == 405


def test_it_answers_to_its_own_name_and_with_a_token_only_who_has_it(tmp_path: Path) -> None:
    recorded_run(tmp_path)
    assert client(tmp_path, host="rebound.example").get("/").status_code == 400
    web = client(tmp_path, token="sesame")
    for page in ("/", "/app.js", "/api/sweeps", "/api/rows", "/api/runs/recorded", "/api/runs/recorded/logs"):
        assert web.get(page).status_code == web.get(f"{page}?token=wr%C3%B6ng").status_code == 403, page
    assert web.get("/?token=sesame").status_code == 200  # redirected, with a cookie
    assert "token" not in str(web.get("/").url) and web.get("/api/runs/recorded").status_code == 200
    other = client(tmp_path, token="seed")  # on another port: the same cookies
    assert other.get("/?token=seed").status_code == 200
    web.cookies.update(other.cookies)
    assert web.get("/").status_code == 200


def test_monitoring_reads_the_figures_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_run(tmp_path)
    unfinished(tmp_path, "going", "local_fsdp://elsewhere/going")
    web = client(tmp_path, token="sesame")
    assert web.get("/metrics").status_code == 403
    bearer = {"Authorization": "Bearer sesame"}
    until(lambda: web.get("/metrics", headers=bearer).status_code == 200, "the runs have been read")
    told = web.get("/metrics", headers=bearer).text
    assert 'fsdp_jobs_runs{state="done"} 1' in told and 'fsdp_jobs_failures_total{run="going"} 1' in told
    assert 'fsdp_jobs_step{run="going"} 20' in told and 'run="recorded"' not in told, told
    with monkeypatch.context() as nobody_asks:
        nobody_asks.setattr(live, "_IDLE_S", 0.0)
        nobody_asks.setattr(live, "_READ_S", 0.0)
        until(lambda: web.get("/metrics", headers=bearer).status_code == 503, "what is old is not told")
    assert web.get("/metrics", headers=bearer).status_code == 200, "however rarely it is asked"
    values = [line for line in told.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r'fsdp_jobs_\w+\{\w+="[^"]*"\} [-+0-9.e]+', line) for line in values), told


def test_a_curve_counts_the_last_of_repeated_steps_and_leaves_out_what_is_no_number(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    add_line(run.metrics, step_line(21, 140.0, float("nan")))
    curves = client(tmp_path).get("/api/runs/recorded/curves").json()
    assert curves["columns"]["step"] == [21, *range(20, 10, -1), *range(12, 0, -1)], "as recorded, the newest first"
    assert curves["columns"]["loss"][:2] == [None, 3.0] and curves["gaps"] == [[100.0, 0.0]]
    with run.metrics.open("a") as f:
        f.writelines(json.dumps(step_line(step, 200.0 + step, 2.0)) + "\n" for step in range(22, 50_000))
    steps = client(tmp_path).get("/api/runs/recorded/curves").json()["columns"]["step"]
    assert 990 < len(steps) < 1010 and steps[0] == 49_999 and steps[-1] <= 60
    assert max(before - after for before, after in pairwise(steps)) < 120, "evenly spread"


def test_a_run_with_damaged_files_says_so_and_the_others_are_told(tmp_path: Path) -> None:
    for name in ("a-sound", "b-cut", "c-odd", "d-typed"):
        recorded_run(tmp_path / "runs", name)
    (tmp_path / "runs" / "b-cut" / "job.json").write_text('{"handle": "x')
    (tmp_path / "runs" / "c-odd" / "job.json").write_text("[1, 2]")
    add_line(RunDir(tmp_path / "runs" / "d-typed").metrics, {"step": "seven", "time": 150.0})
    rows = {row["run"]: row for row in json.loads(cli(tmp_path, "status", "--json").stdout)}
    assert {name: row["state"] for name, row in rows.items()} == {
        "a-sound": "done", "b-cut": "damaged", "c-odd": "damaged", "d-typed": "damaged",
    }  # fmt: skip
    assert "b-cut/job.json: damaged" in rows["b-cut"]["reason"] and rows["b-cut"]["step"] is None
    assert "all runs have ended" in cli(tmp_path, "status", "--watch", timeout=60).stdout
    looked = live.LiveRows(str(tmp_path / "runs"))
    until(lambda: looked.is_complete, "all are read")
    assert {name: row["state"] for name, row in looked.rows.items()} == {
        name: row["state"] for name, row in rows.items()
    }
    assert client(tmp_path / "runs").get("/api/runs/d-typed").status_code == 500
    planned = cli(tmp_path, "plan", "nodes=1")  # learns how often nodes fail from the runs beside it
    assert planned.returncode == 0, planned.stderr


def test_damage_of_one_run_is_logged_once_and_hides_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    odd = recorded_run(tmp_path, "odd")
    write_atomic(odd.job, json.dumps({**odd.read_job(), "handle": ["x"]}))
    recorded_run(tmp_path, "sound")
    typed = recorded_run(tmp_path, "typed")
    add_line(typed.metrics, {"step": "seven", "time": 150.0})
    overview = Overview(lambda _: {})
    for _ in range(3):
        states = [row.state for row in overview.look([odd, RunDir(tmp_path / "sound"), typed]).values()]
        assert states == ["damaged", "done", "damaged"]
        assert client(tmp_path).get("/api/runs/typed").status_code == 500
    said = [record for record in caplog.records if "cannot be read" in record.message]
    assert len(said) == 3 and all(record.exc_info for record in said), "two rows and a page"


def test_a_run_whose_events_hold_no_number_is_shown(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    add_line(run.events, {"time": 131.0, "event": "loss_spike", "attempt": 0, "step": 9, "loss": float("inf"),
                          "mean": 2.0, "deviations": float("nan")})  # fmt: skip
    events = client(tmp_path).get("/api/runs/recorded").json()["events"]
    assert events[-1]["event"] == "loss_spike" and events[-1]["loss"] is None


def test_a_run_that_is_read_slowly_holds_up_no_other_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_run(tmp_path, "long")
    recorded_run(tmp_path, "short")
    begun, goes_on, update, waited = threading.Event(), threading.Event(), RunStatus.update, list[bool]()

    def slow(status: RunStatus) -> Any:
        if status.run.name == "long":
            begun.set()
            waited.append(goes_on.wait(10))
        return update(status)

    monkeypatch.setattr(RunStatus, "update", slow)
    web = client(tmp_path)
    reader = threading.Thread(target=web.get, args=("/api/runs/long",))
    reader.start()
    try:
        assert begun.wait(30) and web.get("/api/runs/short").status_code == 200
    finally:
        goes_on.set()
        reader.join(30)
    assert all(waited), "the other was not answered meanwhile"


def test_no_file_of_a_log_is_touched_where_all_requests_are_answered_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded_run(tmp_path)
    last_attempt, threads = RunDir.last_attempt, list[str]()

    def noted(run: RunDir) -> int:
        with suppress(RuntimeError):
            threads.append(str(asyncio.get_running_loop()))
        return last_attempt(run)

    monkeypatch.setattr(RunDir, "last_attempt", noted)
    shown = Dashboard(str(tmp_path), list, dict)
    shown.is_over = lambda: True
    logs = TestClient(make_app(shown, ["testserver"], "known")).get("/api/runs/recorded/logs?token=known")
    assert HOSTILE[:8] in logs.text and threads == []


def test_the_states_are_those_of_status_and_only_what_changed_is_sent(tmp_path: Path) -> None:
    unfinished(tmp_path / "runs", "gone", "local_fsdp://fsdp_jobs/gone")
    unfinished(tmp_path / "runs", "elsewhere", "no_such_launcher://there/1")
    done = recorded_run(tmp_path / "runs", "done")
    looked = live.LiveRows(str(tmp_path / "runs"))
    told = {row["run"]: row for row in json.loads(cli(tmp_path, "status", "--json").stdout)}
    assert told["gone"]["state"] == "failed" and "does not answer" in told["elsewhere"]["reason"]

    def agrees() -> bool:
        return {n: (r["state"], r["reason"]) for n, r in looked.rows.items()} == {
            n: (r["state"], r["reason"]) for n, r in told.items()
        }

    until(agrees, "the rows agree with status")
    before = dict(looked.rows)
    add_line(done.metrics, step_line(21, 140.0, 0.1234))
    until(lambda: looked.rows["done"]["loss"] == "0.12340", "the new step")
    assert looked.rows["gone"] is before["gone"] and looked.rows["elsewhere"] is before["elsewhere"]


def test_launchers_are_asked_beside_each_other_and_a_hanging_one_is_named_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Sequence[str]] = []
    hangs = threading.Event()

    def ask(name: str, handles: list[str]) -> dict[str, Description]:
        asked.append(handles)
        return answers(name, handles)

    def reach(_: Launcher, handle: str) -> None:
        if handle.startswith("hanging"):
            hangs.wait(60)
            raise RuntimeError("connection lost")

    answers = submitted._described
    monkeypatch.setattr(submitted, "_described", ask)
    monkeypatch.setattr(submitted, "_elsewhere", reach)
    monkeypatch.setattr(submitted, "launcher_of", lambda _: launcher_of("local_fsdp"))
    monkeypatch.setattr(live, "_PATIENCE_S", 1.0)
    unfinished(tmp_path, "gone", "local_fsdp://fsdp_jobs/absent")
    unfinished(tmp_path, "waiting", "hanging://there/1")
    looked, began = live.LiveRows(str(tmp_path)), time.monotonic()
    try:
        until(
            lambda: "has no such job any more" in looked.rows.get("gone", {}).get("reason", ""), "the one that answers"
        )
        until(lambda: "has not answered for" in looked.rows["waiting"]["reason"], "the one that hangs")
        assert [h for handles in asked for h in handles].count("hanging://there/1") == 1, "it is not asked meanwhile"
        times = [handles[0] for handles in asked].count("local_fsdp://fsdp_jobs/absent")
        assert 1 <= times <= 1 + (time.monotonic() - began) / 5, "at most every five seconds"
    finally:
        hangs.set()
    until(lambda: "connection lost" in looked.rows["waiting"]["reason"], "why it did not answer")


def test_a_port_in_use_and_a_folder_without_runs_end_in_words(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = cli(tmp_path, "dashboard", "--port", str(taken.getsockname()[1]))
    assert said.returncode == 2 and "in use" in said.stderr and "--port 0" in said.stderr


@contextmanager
def dashboard(folder: Path) -> Iterator[str]:
    """A dashboard as a user starts it; its address. It ends at once when it is told to, whoever watches."""
    command = [sys.executable, "-m", "fsdp_jobs", "dashboard", "--port", "0"]
    process = subprocess.Popen(command, cwd=folder, env=environment(folder), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(10)


def a_sweep(folder: Path) -> None:
    """Six jobs over two keys in `folder/runs`, one of them failed."""
    for i, (rate, layers) in enumerate((r, n) for r in ("1e-4", "1e-3", "1e-2") for n in ("2", "4")):
        run = recorded_run(folder / "runs", f"grid-{i:03d}")
        add_line(run.metrics, step_line(21, 131.0, 2.0 + 0.3 * abs(i - 2)))
        of_sweep(run, "grid", [f"optim.lr={rate}", f"model.n_layers={layers}"], [HOSTILE])
        if i == 5:
            run.events.write_text(run.events.read_text().replace('"verdict": "done"', '"verdict": "failed"'))


@pytest.mark.integration
def test_a_running_job_and_its_fault_are_seen_without_a_reload(browser: Any, tmp_path: Path) -> None:  # noqa: F811
    watched = Watched(browser)
    page = watched.page
    recorded_run(tmp_path / "runs", "hostile")
    task = ("steps=4000", "checkpoint.every_steps=10", *PACED)
    with job(tmp_path, "watched", *task, nproc=1) as running, dashboard(tmp_path) as address:
        running.until(lambda: bool(running.events("checkpoint")), "a checkpoint")
        assert "?token=" in address, "other users of this machine"
        page.goto(address)
        row = page.locator(".runs tbody tr", has_text="watched")
        before = row.inner_text(timeout=30_000)
        running.until_step(running.step() + 10)
        page.wait_for_function("before => !document.body.innerText.includes(before)", arg=before, timeout=30_000)
        page.evaluate("window.isSame = true")
        page.click("text=watched")
        page.wait_for_selector("#nodes .rank.running", timeout=30_000)
        assert page.locator("#nodes .rank").count() == running.events("round_started")[-1]["world_size"]
        loss = page.locator("#story dd").nth(2)
        first = loss.inner_text()
        running.ranks(1)[0].kill()
        page.wait_for_selector("#story >> text=lost, training again after", timeout=60_000)
        running.until(lambda: bool(running.events("resumed")), "it goes on")
        page.wait_for_selector("#events >> text=resumed from", timeout=60_000)
        page.wait_for_function("first => document.querySelectorAll('#story dd')[2].innerText !== first", arg=first)
        assert page.evaluate("window.isSame"), "the page was loaded again"
        page.goto(address.partition("?")[0] + "#run/hostile")  # the browser has the token by now
        page.wait_for_selector("#log >> text=alert('x')", timeout=60_000)
        assert HOSTILE in page.inner_text("#story") and HOSTILE in page.inner_text("#nodes")
        watched.check()


@pytest.mark.integration
def test_runs_are_compared_and_sweeps_and_logs_shown_by_keyboard_alone(browser: Any, tmp_path: Path) -> None:  # noqa: F811
    a_sweep(tmp_path)
    recorded_run(tmp_path / "runs", "first")
    second = recorded_run(tmp_path / "runs", "second")
    eves = Identity("id", "eve", os.getuid() + 1, "login", str(second.path), "of another configuration")
    write_atomic(second.identity, eves.to_json())
    for rank, words in ((0, ["loading", "Epoch 1"]), (1, ["loading", "CUDA out of memory"])):
        write_atomic(second.rank_log(0, 0, rank), "".join(f"{word}\n" for word in words))
    (tmp_path / "runs" / "torn").mkdir()
    (tmp_path / "runs" / "torn" / "job.json").write_text("{")
    watched = Watched(browser)
    page = watched.page
    focused = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.innerText"

    def tab_to(name: str, key: str = "Tab") -> None:
        for _ in range(80):
            page.keyboard.press(key)
            if page.evaluate(focused) == name:
                return
        raise AssertionError(f"no way to {name}")

    with dashboard(tmp_path) as address:
        page.goto(address)
        page.wait_for_selector("text=9 runs", timeout=30_000)
        assert "damaged" in page.locator("tr", has_text="torn").inner_text()
        assert page.locator("tr", has_text="of eve").locator("a").inner_text() == "second"
        watched.keep(tmp_path, "runs")
        page.keyboard.press("/")
        page.keyboard.type("sec")
        page.wait_for_selector("text=1 of 9 runs")
        tab_to("compare second")
        page.keyboard.press("Space")
        tab_to("Compare none", "Shift+Tab")
        tab_to("compare second")
        page.keyboard.press("/")
        page.keyboard.press("Control+a")
        page.keyboard.type("first")
        tab_to("compare first")
        page.keyboard.press("Space")
        plot = page.get_by_role("img", name=re.compile("loss over step; newest: second 3, first 3"))
        plot.wait_for(timeout=30_000)
        assert {"first", "second"} <= set(page.locator("#compare .u-legend .u-label").all_inner_texts())
        for over in ("tokens", "time"):
            page.get_by_label("Compared runs: over").select_option(over)
            page.get_by_role("img", name=re.compile(f"loss over {over}; newest: second 3, first 3")).wait_for()
        page.get_by_label("Compared runs: curve").select_option("tokens_per_s")
        page.get_by_role("img", name=re.compile("tokens_per_s over time; newest: second 100")).wait_for()
        watched.check()
        watched.keep(tmp_path, "compare")
        page.keyboard.press("/")
        page.keyboard.press("Control+a")
        page.keyboard.type("second")
        tab_to("second")
        page.keyboard.press("Enter")
        page.wait_for_selector("#log >> text=CUDA out of memory")
        assert page.evaluate("document.activeElement.id") == "title", "a screen reader hears where it is"
        page.get_by_role("img", name=re.compile(r"goodput over time; newest: second 0\.\d+")).wait_for()
        page.keyboard.press("/")
        page.keyboard.type("cuda")
        page.wait_for_selector("#lines >> text=/^1 line$/")
        assert page.inner_text("#log").split() == ["[node-0/rank-1]", "CUDA", "out", "of", "memory"]
        page.fill("#text", "")
        page.fill("#rank", "0")
        page.locator("#log", has_text="Epoch 1").wait_for()
        with second.rank_log(0, 0, 0).open("a") as log:
            log.write("Epoch 2\n")
        page.locator("#log", has_text="Epoch 2").wait_for()
        assert "CUDA" not in page.inner_text("#log")
        assert page.locator("#nodes .rank").count() == 4
        watched.check()
        watched.keep(tmp_path, "run")
        tab_to("all runs", "Shift+Tab")
        page.keyboard.press("Enter")
        tab_to("grid")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=best: grid-002")
        assert page.locator("#drawn polyline").count() == 6 and page.locator("#jobs tbody tr").count() == 6
        assert "optim.lr (log)" in page.inner_text("#drawn")
        watched.check()
        watched.keep(tmp_path, "sweep")


@pytest.mark.integration
def test_a_run_that_cannot_be_shown_says_why_in_place_of_another_ones_values(browser: Any, tmp_path: Path) -> None:  # noqa: F811
    recorded_run(tmp_path / "runs", "sound").attempt(0).mkdir(parents=True, exist_ok=True)
    shutil.rmtree(recorded_run(tmp_path / "runs", "unstarted").path / "attempts", ignore_errors=True)
    write_atomic(recorded_run(tmp_path / "runs", "torn").job, "{")
    page = Watched(browser).page
    with dashboard(tmp_path) as address:
        page.goto(f"{address}#run/sound")
        page.wait_for_selector("#story >> text=3.0000", timeout=30_000)
        for name, why in (("torn", "runs/torn/job.json: damaged"), ("gone", "there is no such run")):
            page.evaluate(f"location.hash = 'run/{name}'")
            page.wait_for_selector(f"#problem >> text={why}")
            page.wait_for_timeout(2000)  # in which all rows are sent again
            assert why in page.inner_text("header") and page.inner_text("main").strip() == ""
        page.evaluate("location.hash = 'run/sound'")
        page.wait_for_selector("#story >> text=3.0000")
        assert page.inner_text("#problem") == ""
        for name in ("sound", "unstarted"):
            page.evaluate(f"location.hash = 'run/{name}'")
            page.wait_for_selector(f"h1 >> text={name}")
            page.wait_for_selector("#story >> text=3.0000")
            page.wait_for_timeout(500)  # in which the stream of its lines begins
            (tmp_path / "runs" / name).rename(tmp_path / f"removed-{name}")
            page.wait_for_selector("text=not up to date: there is no such run")
            page.wait_for_timeout(2000)
            assert "there is no such run" in page.inner_text("header"), "the rows, which are up to date, do not hide it"


@pytest.mark.integration
def test_a_long_name_hides_no_state(browser: Any, tmp_path: Path) -> None:  # noqa: F811
    recorded_run(tmp_path / "runs", "llama-" + 90 * "x")
    for width in (375, 1280):
        watched = Watched(browser, viewport={"width": width, "height": 800})
        with dashboard(tmp_path) as address:
            watched.page.goto(address)
            state = watched.page.locator("tbody .state")
            state.wait_for(timeout=30_000)
            box = state.bounding_box()
            assert box is not None and box["x"] + box["width"] < width


@pytest.mark.integration
def test_a_sweep_over_long_values_is_as_wide_as_the_window(browser: Any, tmp_path: Path) -> None:  # noqa: F811
    of_sweep(recorded_run(tmp_path / "runs", "grid-000"), "grid", [f"data.path={'long/' * 60}"])
    watched = Watched(browser)
    with dashboard(tmp_path) as address:
        watched.page.goto(f"{address}#sweep/grid")
        watched.page.wait_for_selector("#drawn svg", timeout=30_000)
        assert watched.is_as_wide_as_the_window()
        state = watched.page.locator("#jobs .state").bounding_box()
        assert state is not None and state["x"] + state["width"] < 1200


@pytest.mark.integration
def test_dark_light_and_a_telephone(browser: Any, tmp_path: Path) -> None:  # noqa: F811
    a_sweep(tmp_path)
    unfinished(tmp_path / "runs", "gone", "local_fsdp://fsdp_jobs/gone")
    with dashboard(tmp_path) as address:
        for name, settings in (
            ("dark", {"color_scheme": "dark"}),
            ("phone", {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "device_scale_factor": 2}),
        ):
            watched = Watched(browser, **settings)
            page = watched.page
            page.goto(address)
            page.wait_for_selector("text=7 runs", timeout=30_000)
            page.get_by_label("compare grid-000").check()
            page.get_by_label("compare grid-003").check()
            page.get_by_role("img", name=re.compile("loss over step; newest: grid-000 2.6")).wait_for()
            for view in ("runs", "run/gone", "sweep/grid"):
                if view != "runs":
                    page.evaluate("view => { location.hash = view; }", view)
                    page.wait_for_selector("#log div" if "run/" in view else "#drawn svg")
                assert watched.is_as_wide_as_the_window(), f"{name}: {view}"
                watched.check()
                watched.keep(tmp_path, f"{name}-{view.replace('/', '-')}")


@pytest.mark.integration
def test_a_folder_without_runs_says_how_to_start_one_and_shows_the_first(browser: Any, tmp_path: Path) -> None:  # noqa: F811
    watched = Watched(browser)
    with dashboard(tmp_path) as address:
        watched.page.goto(address)
        watched.page.wait_for_selector("text=fsdp-jobs name=first")
        watched.check()
        shutil.copytree(recorded_run(tmp_path / "elsewhere", "new").path, tmp_path / "runs" / "new")
        watched.page.wait_for_selector("text=1 run")
        watched.page.wait_for_selector(".runs >> text=new")
    watched.page.wait_for_selector("text=does not answer", timeout=30_000)
