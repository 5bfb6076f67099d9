"""Milliseconds until a browser shows many runs in the dashboard, and what it costs to keep them up to date.

    python benchmarks/dashboard.py [--runs 500] [--steps 10000] [--live 50] [--turns 3]

Runs are those of benchmarks/status.py. Chromium runs on this machine, headless; a new profile for each turn.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import sync_playwright
from status import arguments, make_runs

_NOTE = """
addEventListener("DOMContentLoaded", () => {
  const body = document.querySelector(".runs tbody");
  let some = 0;
  const painted = (then) => requestAnimationFrame(() => setTimeout(() => then(performance.now())));
  const look = () => {
    const paint = performance.getEntriesByName("first-contentful-paint")[0]?.startTime;
    if (body.rows.length) painted((now) => { some ||= now; });
    if (body.rows.length === RUNS) painted((now) => { window.noted ??= [paint, some, now]; });
  };
  new MutationObserver(look).observe(body, { childList: true });
});
"""


def opened(chromium: Any, address: str, runs: int) -> tuple[Any, list[float]]:
    """A page, and the milliseconds after which something, some rows and all rows were painted."""
    page = chromium.new_context().new_page()
    page.add_init_script(_NOTE.replace("RUNS", str(runs)))
    page.goto(address)
    page.wait_for_function("() => window.noted", timeout=120_000)
    return page, page.evaluate("window.noted")


def main() -> None:
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}")
    args = arguments(__doc__)
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory() as made, sync_playwright() as playwright:
        folder = Path(made)
        make_runs(folder, args.runs, args.steps, args.live)
        command = [sys.executable, "-m", "fsdp_jobs", "dashboard", "--port", "0"]
        env = {**os.environ, "XDG_STATE_HOME": str(folder / ".state")}
        server = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True)
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=root)
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            load = os.getloadavg()[0]
            print(f"{args.runs} runs of {args.steps} steps, {args.live} of them running; load {load:.0f}")
            print("| milliseconds after opening | first paint | some rows | all rows |\n|---|---:|---:|---:|")
            for turn in range(args.turns + 1):
                page, noted = opened(chromium, address, args.runs)
                name = "the server has just been started" if turn == 0 else "it runs"
                print(f"| {name} | {' | '.join(f'{at:.0f}' for at in noted)} |", flush=True)
                if turn < args.turns:
                    page.context.close()
            pages = [page]
            for watchers in (1, 8):
                pages += [opened(chromium, address, args.runs)[0] for _ in range(watchers - len(pages))]
                before, began = psutil.Process(server.pid).cpu_times(), time.monotonic()
                time.sleep(20)
                after, took = psutil.Process(server.pid).cpu_times(), time.monotonic() - began
                share = (after.user + after.system - before.user - before.system) / took
                memory = psutil.Process(server.pid).memory_info().rss
                print(f"{watchers} browsers watch: {share:.1%} of a processor, {memory / 1e6:.0f} MB")
        finally:
            chromium.close()
            server.terminate()
            server.wait(10)


if __name__ == "__main__":
    main()
