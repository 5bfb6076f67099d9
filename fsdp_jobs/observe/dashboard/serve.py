"""Serve the dashboard to whoever has its token: a login node has other users."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

import uvicorn

from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.terminal import say
from fsdp_jobs.observe.dashboard.app import Dashboard, make_app
from fsdp_jobs.run import log
from fsdp_jobs.run.directory import write_atomic

_LOCAL = ("127.0.0.1", "localhost", "::1")


def serve(dashboard: Dashboard, host: str, port: int, token_file: str | None) -> int:
    """Serve until Ctrl-C, and say the address to open.

    The token is that in `token_file`, which is made where it is not there; without such a file a new one.

    Raises:
        BadInput: the address or port cannot be listened on.
    """
    log.configure()
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # a browser that opens the address at once waits
    except (OSError, OverflowError) as e:
        what = e.strerror if isinstance(e, OSError) else "a port is a number from 0 to 65535"
        raise BadInput([Problem(f"--host {host} --port {port}", str(what), "--port 0 takes a free one")]) from e
    token = secrets.token_urlsafe(24)
    if token_file is not None and Path(token_file).exists():
        token = Path(token_file).read_text().strip() or token
    elif token_file is not None:
        write_atomic(Path(token_file), token, mode=0o600)
    app = make_app(dashboard, ["127.0.0.1", "localhost", "[::1]"] if host in _LOCAL else ["*"], token)
    name = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, f"[{host}]" if ":" in host else host)
    say(f"http://{name}:{listener.getsockname()[1]}/?token={token}")
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, log_level="warning", lifespan="off"))
    dashboard.is_over = lambda: server.should_exit  # else Ctrl-C would wait for browsers to go
    server.run(sockets=[listener])
    return 0
