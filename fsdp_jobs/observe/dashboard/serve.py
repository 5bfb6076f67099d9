"""Serve the dashboard to holders of its token, because a login node has other users."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

import uvicorn

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.terminal import say
from fsdp_jobs.observe.dashboard.app import Dashboard, make_app
from fsdp_jobs.run import log
from fsdp_jobs.run.files import write_atomic

_LOCAL = ("127.0.0.1", "localhost", "::1")


def serve(dashboard: Dashboard, host: str, port: int, token_file: str | None) -> int:
    """Print the address to open, and serve until Ctrl-C.

    The token is read from `token_file`, which is created if it does not exist; without a file the token is new.

    Raises:
        BadInput: the address or port cannot be listened on.
    """
    log.configure()
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # now, so that a browser that opens the address at once can connect
    except (OSError, OverflowError) as e:
        what = e.strerror if isinstance(e, OSError) else "a port is a number from 0 to 65535"
        raise BadInput.at(f"--host {host} --port {port}", str(what), "--port 0 takes a free one") from e
    token = secrets.token_urlsafe(24)
    if token_file is not None and Path(token_file).exists():
        token = Path(token_file).read_text().strip() or token
    elif token_file is not None:
        write_atomic(Path(token_file), token, mode=0o600)
    app = make_app(dashboard, ["127.0.0.1", "localhost", "[::1]"] if host in _LOCAL else ["*"], token)
    name = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, f"[{host}]" if ":" in host else host)
    say(f"http://{name}:{listener.getsockname()[1]}/?token={token}")
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, log_level="warning", lifespan="off"))
    dashboard.is_over = lambda: server.should_exit  # otherwise Ctrl-C would wait until browsers disconnect
    server.run(sockets=[listener])
    return 0
