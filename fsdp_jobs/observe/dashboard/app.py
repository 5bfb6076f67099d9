"""The dashboard's web application: static files, JSON, and server-sent events. It is read-only.

Its headers let browsers execute only its own scripts, which never interpret a run's text as HTML, and load nothing
else. Pages of other sites cannot use it, because it answers only to its own host names.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.observe.answers import about, curves
from fsdp_jobs.observe.dashboard.live import LiveRows
from fsdp_jobs.observe.dashboard.prometheus import exposition
from fsdp_jobs.run.directory import RunDir, find_run, rank_logs
from fsdp_jobs.run.record import JsonObject
from fsdp_jobs.run.status import RunStatus
from fsdp_jobs.run.tail import Logs, label, pause_s
from fsdp_jobs.submit.overview import DAMAGES, damage

_SEND_EVERY_S = 0.5
_LOG_BYTES = 8 << 20  # searched from the ends of all ranks' logs together
_LOG_LINES = 1000  # of the present logs that a browser gets
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Dashboard:
    """Handlers for the runs under one folder. Starlette calls synchronous handlers in threads.

    Args:
        folder: of the runs.
        sweeps: returns the names of all sweeps of runs in a folder.
        sweep: returns a sweep by name and `runs_dir`: keys, objective, and rows with the newest values; or raises
            BadInput.
    """

    def __init__(self, folder: str, sweeps: Callable[[str], Iterable[str]], sweep: Callable[..., JsonObject]):
        self.is_over: Callable[[], bool] = lambda: False  # whether streams must end
        self._live = LiveRows(folder)
        self._sweeps, self._sweep = partial(sweeps, folder), partial(sweep, runs_dir=folder)
        self._read = lru_cache(20)(lambda run: (threading.Lock(), list[RunStatus]()))  # of the runs requested last

    def routes(self) -> list[Route | Mount]:
        return [
            Route("/metrics", self.metrics),
            Route("/api/rows", self.rows),
            Route("/api/sweeps", lambda _: JSONResponse(sorted(self._sweeps()))),
            Route("/api/sweeps/{name}", lambda request: JSONResponse(self._sweep(request.path_params["name"]))),
            Route("/api/runs/{name}", self.run),
            Route("/api/runs/{name}/curves", self.curves),
            Route("/api/runs/{name}/logs", self.logs),
            Mount("/", StaticFiles(directory=Path(__file__).parent / "static", html=True)),
        ]

    async def rows(self, _: Request) -> Response:
        """Stream the rows of all runs, then every changed row, and the order of the rows when it changes."""

        async def messages() -> AsyncIterator[JsonObject | None]:
            live, sent, said = self._live, dict[str, JsonObject](), None
            while not self.is_over():
                live.watched_at = time.monotonic()
                rows, news = live.rows, JsonObject()
                if changed := [row for name, row in rows.items() if sent.get(name) is not row]:
                    news["rows"] = changed
                if list(rows) != list(sent):
                    news["order"] = list(rows)
                if said != (say := {"folder": live.folder, "complete": live.is_complete, "trouble": live.trouble}):
                    news |= say
                sent, said = rows, say
                yield news or None
                await asyncio.sleep(_SEND_EVERY_S)

        return _events(messages())

    def metrics(self, _: Request) -> Response:
        """Answer with the runs' metrics for Prometheus; 503 if reading all runs takes longer than it waits."""
        if (summaries := self._live.fresh()) is None:
            return PlainTextResponse("the runs are being read", 503)
        return PlainTextResponse(exposition(summaries), media_type="text/plain; version=0.0.4")

    def run(self, request: Request) -> Response:
        """Answer with the details of a run."""
        run = self._run_of(request)
        lock, statuses = self._read(run.name)
        with lock:
            status = statuses.pop() if statuses else RunStatus(run)
            status.update()
            statuses.append(status)  # put back only if reading succeeds
            return JSONResponse(about(status, self._live.rows.get(run.name, {}).get("state", status.state)))

    def curves(self, request: Request) -> Response:
        """Answer with the curves of a run's metrics."""
        return JSONResponse(curves(self._run_of(request)))

    def logs(self, request: Request) -> Response:
        """Stream the newest lines of the newest attempt, then new ones; ends with the attempt, then browsers ask again.

        The query may have a `text` that lines must contain, in any case, and a `rank`.
        """
        run = self._run_of(request)
        text, rank = request.query_params.get("text", "").casefold(), request.query_params.get("rank", "")
        attempt = run.last_attempt()
        logs = Logs(run.path, rank_logs(attempt, rank=int(rank) if rank.isdecimal() else None))
        logs.skip(but=_LOG_BYTES)

        def matching(lines: Callable[[], Any]) -> list[tuple[str, str]]:
            return list(deque(((label(f), line) for f, line in lines() if text in line.casefold()), _LOG_LINES))

        def is_newest() -> bool:  # no longer, once the run is removed
            return run.path.is_dir() and run.last_attempt() == attempt

        async def messages() -> AsyncIterator[list[tuple[str, str]] | None]:
            yield await run_in_threadpool(matching, logs.backlog)
            while await run_in_threadpool(is_newest) and not self.is_over():
                began = time.monotonic()
                yield await run_in_threadpool(matching, logs.new) or None
                await asyncio.sleep(pause_s(began, _SEND_EVERY_S))

        return _events(messages())

    def _run_of(self, request: Request) -> RunDir:
        """Return the run that a URL names; answer 404 if there is none."""
        run = find_run(self._live.folder, request.path_params["name"])
        if not (run.is_damaged or run.is_submitted):
            raise HTTPException(404, "there is no such run")
        return run


def _events(messages: AsyncIterator[Any]) -> Response:
    """Stream messages as JSON; None becomes a comment, whose sending detects that a browser has gone."""

    async def lines() -> AsyncIterator[str]:
        async for message in messages:
            yield ":\n\n" if message is None else f"retry: 1000\ndata: {json.dumps(message)}\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


def make_app(dashboard: Dashboard, hosts: list[str], token: str) -> Starlette:
    """Make the application.

    Args:
        dashboard: the handlers.
        hosts: allowed host names of requests.
        token: required in every request.
    """
    middleware = [
        Middleware(BaseHTTPMiddleware, dispatch=partial(_guard, token)),
        Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False),
    ]
    unreadable = dict.fromkeys(DAMAGES, _unreadable)
    return Starlette(routes=dashboard.routes(), middleware=middleware, exception_handlers=unreadable)


def _unreadable(request: Request, error: Exception) -> Response:
    return PlainTextResponse(damage(request.url.path, error), 404 if isinstance(error, BadInput) else 500)


async def _guard(token: str, request: Request, call_next: RequestResponseEndpoint) -> Response:
    """Add headers to every response; require the token: once in the URL, then as a cookie."""
    response = _without_token(request, token) or await call_next(request)
    response.headers.update(_HEADERS)
    return response


def _without_token(request: Request, token: str) -> Response | None:
    """Return the response to a request that has the token neither as a cookie nor, from monitoring, as a bearer.

    The cookie's name differs between dashboards, because all ports of a host share its cookies.
    """
    cookie = f"fsdp_jobs_{hashlib.sha256(token.encode()).hexdigest()[:12]}"
    if _is_same(request.query_params.get("token", ""), token):
        redirect = RedirectResponse(request.url.remove_query_params("token"))
        redirect.set_cookie(cookie, token, httponly=True, samesite="strict")
        return redirect
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
    if _is_same(request.cookies.get(cookie, ""), token) or _is_same(bearer, token):
        return None
    return PlainTextResponse("open the address that `fsdp-jobs dashboard` printed: it has the token", 403)


def _is_same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())
