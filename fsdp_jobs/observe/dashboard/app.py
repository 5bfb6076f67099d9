"""The web application: two pages that ask for themselves again every two seconds. It only reads run directories.

Safe on whatever runs have written: everything is escaped, and the browser is told to execute our one script and to
load nothing. Safe from other pages in the same browser: it answers to its own host name only.
"""

from __future__ import annotations

import hmac
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.schema import plain_values
from fsdp_jobs.observe.report.page import content_of
from fsdp_jobs.pages.page import render
from fsdp_jobs.run.directory import RunDir, find_run, runs_in
from fsdp_jobs.run.goodput import goodput_of
from fsdp_jobs.run.status import RunStatus
from fsdp_jobs.run.table import duration
from fsdp_jobs.run.tail import label, last_lines

_LOG_LINES = 60  # of each rank
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_COOKIE = "fsdp_jobs_token"


@dataclass
class _Watched:
    """A run, at a glance and then what is new."""

    status: RunStatus
    config: dict[str, Any]


@dataclass
class Runs:
    """The runs under one folder."""

    folder: str
    _watched: dict[str, _Watched] = field(default_factory=dict)
    _drawn: dict[str, tuple[Any, str]] = field(default_factory=dict)  # name -> (sizes of its records, page)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # matplotlib and the two above are one's at a time

    def rows(self) -> str:
        """The table of all runs, newest first."""
        with self._lock:
            runs = [self._row(run) for run in reversed(runs_in(self.folder))]
        return render(__package__, "rows.html.j2", runs=runs, folder=self.folder)

    def _row(self, run: RunDir) -> dict[str, Any]:
        watched = self._watched.get(run.name)
        if watched is None:
            watched = self._watched[run.name] = _Watched(RunStatus(run), plain_values(run.config))
            watched.status.glance()
        status, config = watched.status, watched.config
        status.update()
        return {
            "name": run.name,
            "state": status.state,
            "doing": status.reason or status.doing,
            "nodes": f"{len(status.nodes)}/{config['nodes']}",
            "step": status.step_of(config["steps"]),
            "loss": f"{status.loss:.4f}" if status.loss is not None else "-",
            "speed": f"{status.tokens_per_s:,.0f}",
            "checkpoint": f"step {status.committed:,}, {status.checkpoint_age()}" if status.committed >= 0 else "-",
            "eta": duration(status.eta_s(config["steps"])),
            "goodput": f"{goodput_of(run).fraction:.0%}",
        }

    def report(self, run: RunDir) -> str:
        """A run's report, drawn again when there is something new."""
        records = [f.stat().st_size if f.exists() else 0 for f in (run.events, run.metrics)]
        with self._lock:
            known = self._drawn.get(run.name)
            if known is None or known[0] != records:
                page = render("fsdp_jobs.observe.report", "run.html.j2", **content_of(run))
                known = self._drawn[run.name] = (records, page)
        return known[1]


def make_app(folder: str, hosts: list[str], token: str | None) -> Starlette:
    """The application. `hosts`: names by which it may be called; `token`: without it nobody is answered."""
    runs = Runs(folder)

    async def index(_: Request) -> Response:
        page = render(__package__, "shell.html.j2", name="runs", source="/rows", back=False)
        return HTMLResponse(page)

    async def rows(_: Request) -> Response:
        return HTMLResponse(await run_in_threadpool(runs.rows))

    def named(request: Request) -> RunDir | None:
        try:
            run = find_run(folder, request.path_params["name"])
        except BadInput:
            return None
        return run if run.is_submitted else None

    async def one(request: Request) -> Response:
        run = named(request)
        if run is None:
            return PlainTextResponse("there is no such run", 404)
        page = render(__package__, "shell.html.j2", name=run.name, source=f"/runs/{run.name}/report", back=True)
        return HTMLResponse(page)

    async def report(request: Request) -> Response:
        run = named(request)
        if run is None:
            return PlainTextResponse("there is no such run", 404)
        return HTMLResponse(await run_in_threadpool(runs.report, run))

    async def logs(request: Request) -> Response:
        run = named(request)
        if run is None:
            return PlainTextResponse("there is no such run", 404)
        return PlainTextResponse(await run_in_threadpool(_newest_logs, run))

    async def script(_: Request) -> Response:
        return Response((Path(__file__).parent / "live.js").read_text(), media_type="text/javascript")

    routes = [
        Route("/", index),
        Route("/rows", rows),
        Route("/live.js", script),
        Route("/runs/{name}", one),
        Route("/runs/{name}/report", report),
        Route("/runs/{name}/logs", logs),
    ]
    middleware = [
        Middleware(_Guard, token=token),
        Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False),
    ]
    return Starlette(routes=routes, middleware=middleware)


def _newest_logs(run: RunDir) -> str:
    files = sorted(run.attempt(run.last_attempt()).glob("node-*/rank-*.log"))
    return (
        "\n".join(f"== {label(f)}\n{last_lines(f, _LOG_LINES)}\n" for f in files)
        or "no rank has written anything yet\n"
    )


class _Guard:
    """Adds headers to every answer; with a token, answers only who has it, once in the URL and then as a cookie."""

    def __init__(self, app: ASGIApp, token: str | None):
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        request = Request(scope)
        answer: ASGIApp = self.app
        if self.token is not None:
            given = request.query_params.get("token", "")
            if hmac.compare_digest(given, self.token):
                redirect = RedirectResponse(request.url.remove_query_params("token"))
                redirect.set_cookie(_COOKIE, self.token, httponly=True, samesite="strict")
                answer = redirect
            elif not hmac.compare_digest(request.cookies.get(_COOKIE, ""), self.token):
                answer = PlainTextResponse("open the address that `fsdp-jobs dashboard` printed: it has the token", 403)
        return await answer(scope, receive, with_headers)
