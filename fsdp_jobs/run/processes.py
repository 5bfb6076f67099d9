"""Processes and ports of this machine. No torch."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psutil
import setproctitle

from fsdp_jobs.run.directory import write_atomic
from fsdp_jobs.run.env import RUN_DIR_ENV

_PR_SET_PDEATHSIG = 1  # prctl(2)


def die_with_parent(_worker: int = 0) -> None:
    """Ask the kernel to kill this process when its parent dies (Linux; elsewhere nothing happens)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def set_title(part: str) -> None:
    """Call this process of a job `fsdp_jobs: NAME PART` in `ps`; its environment in /proc stays readable."""
    os.environ["SPT_NOENV"] = "1"
    setproctitle.setproctitle(f"fsdp_jobs: {Path(os.environ[RUN_DIR_ENV]).name} {part}")


def free_port() -> int:
    """Return a TCP port that is free now."""
    with closing(socket.socket()) as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])


def start_detached(module: str, folder: Path, record: Path, log: Path) -> None:
    """Run `python -m MODULE FOLDER` so that it outlives this terminal, and record which process that is."""
    with log.open("a") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    started = psutil.Process(process.pid).create_time()
    write_atomic(record, json.dumps({"pid": process.pid, "started": started}))


def recorded_process(record: Path) -> psutil.Process | None:
    """Return the process that `start_detached` recorded; None when it has ended."""
    try:
        known = json.loads(record.read_text())
        process = psutil.Process(known["pid"])
        alive = process.create_time() == known["started"] and process.status() != psutil.STATUS_ZOMBIE
        return process if alive else None
    except (OSError, ValueError, psutil.NoSuchProcess):
        return None
