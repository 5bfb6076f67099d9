"""The dashboard's web application: pages that refresh every two seconds and change nothing.

Whatever runs have written is escaped, and browsers are told to execute only this application's script and to load
nothing else. Pages of other sites cannot use it: it answers only to its own host names.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.launchers.base import Description
from fsdp_jobs.observe.report.page import content_of
from fsdp_jobs.pages.page import render
from fsdp_jobs.run.directory import RunDir, find_run, rank_logs, runs_in
from fsdp_jobs.run.status import RunStatus
from fsdp_jobs.run.tail import label, last_lines
from fsdp_jobs.submit.overview import Overview, ask_launchers

_ASK_EVERY_S = 5.0
_LOG_LINES = 60  # of each rank
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_COOKIE = "fsdp_jobs_token"

logger = logging.getLogger(__name__)


class Dashboard:
    """The runs under one folder. Starlette calls the handlers, which are synchronous, in threads."""

    def __init__(self, folder: str):
        self.folder = folder
        self._lock = threading.Lock()  # protects the next two, and matplotlib
        self._overview = Overview(self._newest_answers)
        self._reports: dict[str, tuple[list[int], str]] = {}  # run -> sizes of its records, its report
        self._answers: dict[str, Description] = {}  # handle -> what its launcher said last
        self._failure = ""  # why no launcher answered
        self._asking, self._asked_at = threading.Thread(), -_ASK_EVERY_S

    def routes(self) -> list[Route]:
        return [
            Route("/", self.index),
            Route("/rows", self.rows),
            Route("/live.js", self.script),
            Route("/runs/{name}", self.run),
            Route("/runs/{name}/report", self.report),
            Route("/runs/{name}/logs", self.logs),
        ]

    def index(self, _: Request) -> Response:
        return HTMLResponse(render(__package__, "shell.html.j2", name="runs", source="/rows", back=False))

    def rows(self, _: Request) -> Response:
        """Answer with the table of all runs, the newest first."""
        with self._lock:
            runs = [row.cells() for row in self._overview.look(runs_in(self.folder)[::-1])]
        return HTMLResponse(render(__package__, "rows.html.j2", runs=runs, folder=self.folder))

    def script(self, _: Request) -> Response:
        return FileResponse(Path(__file__).parent / "live.js")

    def run(self, request: Request) -> Response:
        name = self._run_of(request).name
        return HTMLResponse(render(__package__, "shell.html.j2", name=name, source=f"/runs/{name}/report", back=True))

    def report(self, request: Request) -> Response:
        """Answer with a run's report, drawn again when there is something new."""
        run = self._run_of(request)
        sizes = [f.stat().st_size if f.exists() else 0 for f in (run.events, run.metrics)]
        with self._lock:
            if run.name not in self._reports or self._reports[run.name][0] != sizes:
                page = render("fsdp_jobs.observe.report", "run.html.j2", **content_of(run))
                self._reports[run.name] = (sizes, page)
            return HTMLResponse(self._reports[run.name][1])

    def logs(self, request: Request) -> Response:
        """Answer with the newest lines of every rank."""
        run = self._run_of(request)
        files = sorted(run.path.glob(rank_logs(run.last_attempt())))
        lines = [f"== {label(file)}\n{last_lines(file, _LOG_LINES)}\n" for file in files]
        return PlainTextResponse("\n".join(lines) or "no rank has written anything yet\n")

    def _run_of(self, request: Request) -> RunDir:
        """Return the run that a URL names; answer 404 when there is none."""
        try:
            run = find_run(self.folder, request.path_params["name"])
        except BadInput:
            run = None
        if run is None or not run.is_submitted:
            raise HTTPException(404, "there is no such run")
        return run

    def _newest_answers(self, statuses: Sequence[RunStatus]) -> dict[str, Description]:
        """Return what launchers said last; ask them again, beside this request, every few seconds."""
        if not self._asking.is_alive() and time.monotonic() - self._asked_at >= _ASK_EVERY_S:
            self._asked_at = time.monotonic()
            self._asking = threading.Thread(target=self._ask, args=(statuses,), daemon=True)
            self._asking.start()
        return self._answers

    def _ask(self, statuses: Sequence[RunStatus]) -> None:
        try:
            self._answers, self._failure = ask_launchers(statuses), ""
        except Exception as e:  # whatever a cluster's client raises: the run directories say what is known
            if str(e) != self._failure:
                logger.warning("a launcher does not answer: %s", e)
            self._answers, self._failure = {}, str(e)


def make_app(folder: str, hosts: list[str], token: str | None) -> Starlette:
    """Make the application.

    Args:
        folder: that the runs are in.
        hosts: names by which it may be called.
        token: that every request needs; None for none.
    """
    middleware = [
        Middleware(_Guard, token=token),
        Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False),
    ]
    return Starlette(routes=Dashboard(folder).routes(), middleware=middleware)


class _Guard(BaseHTTPMiddleware):
    """Add headers to every response; with a token, require it: once in the URL, then as a cookie."""

    def __init__(self, app: ASGIApp, token: str | None):
        super().__init__(app)
        self.token = token

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        response = self._without_token(request, self.token) if self.token is not None else None
        if response is None:
            response = await call_next(request)
        response.headers.update(_HEADERS)
        return response

    def _without_token(self, request: Request, token: str) -> Response | None:
        """Return the response to a request that does not have the token as a cookie."""
        if _is_same(request.query_params.get("token", ""), token):
            redirect = RedirectResponse(request.url.remove_query_params("token"))
            redirect.set_cookie(_COOKIE, token, httponly=True, samesite="strict")
            return redirect
        if _is_same(request.cookies.get(_COOKIE, ""), token):
            return None
        return PlainTextResponse("open the address that `fsdp-jobs dashboard` printed: it has the token", 403)


def _is_same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())
