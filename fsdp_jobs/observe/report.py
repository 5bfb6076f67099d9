"""Write a page of the dashboard as one HTML file with its data, which needs no server and no network. No torch."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections import deque
from pathlib import Path

from fsdp_jobs import __version__
from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.observe.answers import about, curves, row_of
from fsdp_jobs.run.directory import RunDir, rank_logs
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.record import JsonObject
from fsdp_jobs.run.status import RunStatus
from fsdp_jobs.run.tail import Logs, label
from fsdp_jobs.submit.overview import Overview

_STATIC = Path(__file__).parent / "dashboard" / "static"
_LOG_LINES = 500  # the newest of the newest attempt
_LOG_BYTES = 1 << 20  # of all ranks' logs together, from their ends
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "microsoft-edge")
_PICTURE_S = 60.0
_MODULE = re.compile(r"^import .*$|^export ", re.MULTILINE)  # statements that a plain script must not have


def write_report(run: RunDir, png: bool = False, out: str | None = None) -> list[Path]:
    """Write `report.html`, with `png` also a picture of it, into `out` or the run directory; return the files.

    Raises:
        BadInput: no browser for the picture is installed, or it fails.
    """
    status = RunStatus(run)
    status.update()
    summary = Overview().look([run])[run]
    logs = Logs(run.path, rank_logs(run.last_attempt()))
    logs.skip(but=_LOG_BYTES)
    lines = [(label(file), line) for file, line in deque(logs.backlog(), _LOG_LINES)]
    answers = {
        "api/rows": {"rows": [row_of(summary)], "order": [run.name]},
        f"api/runs/{run.name}": about(status, summary.state),
        f"api/runs/{run.name}/curves": curves(run),
        f"api/runs/{run.name}/logs": lines,
    }
    page = run.report if out is None else Path(out, run.report.name)
    write_page(page, f"run/{run.name}", answers)
    return [page, _picture_of(page)] if png else [page]


def write_page(file: Path, page: str, answers: JsonObject) -> None:
    """Write the dashboard's page `#page` to a file; `answers` has the server's answers by address."""
    script = "\n".join(_MODULE.sub("", (_STATIC / name).read_text()) for name in ("sweep.js", "app.js"))
    chart = (_STATIC / "uPlot.iife.min.js").read_text()
    style = "\n".join((_STATIC / name).read_text() for name in ("uPlot.min.css", "style.css"))
    said = f"as of {time.strftime('%Y-%m-%d %H:%M:%S')}, written by fsdp_jobs {__version__}"
    inside = json.dumps({"page": page, "said": said, "answers": answers}).replace("<", "\\u003c")
    policy = f"default-src 'none'; script-src {_hash(chart)} {_hash(script)}; style-src {_hash(style)}"
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'
        f'<script type="application/json" id="inside">{inside}</script>\n<script>{chart}</script>\n'
    )
    body = f'<script type="module">{script}</script>\n</body>'
    html = re.sub(r"<(link|script) .*\n", "", (_STATIC / "index.html").read_text())
    write_atomic(file, html.replace("</head>", f"{head}</head>").replace("</body>", body))


def _hash(code: str) -> str:
    """Return the Content-Security-Policy source expression of an allowed script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"


def _picture_of(file: Path) -> Path:
    """Let a browser draw a report as a PNG file beside it."""
    picture, browser = file.with_suffix(".png"), next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        raise BadInput.at("--png", "there is no browser to draw it", f"install one of {', '.join(_BROWSERS)}")
    flags = ["--headless", "--hide-scrollbars", "--window-size=1240,2000", "--virtual-time-budget=5000"]
    if os.geteuid() == 0:
        flags.append("--no-sandbox")  # Chromium refuses to start as root otherwise
    command = [browser, *flags, f"--screenshot={picture.resolve()}", file.resolve().as_uri()]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_PICTURE_S)
    except (OSError, subprocess.SubprocessError) as e:
        raise BadInput.at("--png", f"{browser} fails: {e}", "open the HTML file, and print it") from e
    return picture
