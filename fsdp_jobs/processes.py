"""Processes and ports of this machine. No torch."""

from __future__ import annotations

import ctypes
import signal
import socket
import sys
from contextlib import closing

_PR_SET_PDEATHSIG = 1  # prctl(2)


def die_with_parent(_worker: int = 0) -> None:
    """Ask the kernel to kill this process when its parent dies (Linux; elsewhere nothing happens)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    """A TCP port that is free now."""
    with closing(socket.socket()) as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])
