"""Listening: on this machine alone, or elsewhere with a token."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable

import uvicorn

from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.observe.dashboard.app import make_app

_OWN = ("127.0.0.1", "localhost", "::1")


def serve(folder: str, host: str, port: int, say: Callable[[str], None]) -> int:
    """Serve until Ctrl-C. `say` is given the address to open.

    Raises:
        BadInput: the address or port cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as e:
        raise BadInput([Problem(f"--host {host} --port {port}", str(e.strerror), "--port 0 takes a free one")]) from e
    is_own = host in _OWN
    token = None if is_own else secrets.token_urlsafe(24)
    app = make_app(folder, ["127.0.0.1", "localhost", "[::1]"] if is_own else ["*"], token)
    shown = f"[{host}]" if ":" in host else host
    say(f"http://{shown}:{listener.getsockname()[1]}/" + ("" if token is None else f"?token={token}"))
    uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off")).run(sockets=[listener])
    return 0
