"""Processes, ports and GPUs of this machine. No torch."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from functools import cache
from pathlib import Path

import psutil
import setproctitle

from fsdp_jobs.run.directory import try_lock, write_atomic
from fsdp_jobs.run.env import RUN_DIR_ENV

_PR_SET_PDEATHSIG = 1  # prctl(2)
_RETRY_S = 0.02
_RECORDED_S = 2.0  # within which a process that was started is recorded

# Asks a rank for its stacks: a real-time signal that no program uses, where there are any.
STACKS_SIGNAL = int(signal.SIGRTMIN) + 6 if hasattr(signal, "SIGRTMIN") else int(signal.SIGUSR2)


def die_with_parent(_worker: int = 0) -> None:
    """Ask the kernel to kill this process when its parent dies (Linux; elsewhere nothing happens)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def age_s() -> float:
    """Return for how many seconds this process has existed."""
    return time.time() - psutil.Process().create_time()


def has_signal(pid: int, which: str, number: int) -> bool:
    """Whether a process ignores (SigIgn) or handles (SigCgt) a signal; ranks on `fsdp_jobs.job` ignore SIGTERM."""
    with open(f"/proc/{pid}/status") as f:
        mask = next((line.split()[1] for line in f if line.startswith(f"{which}:")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


def kills_for_memory() -> int:
    """Count the processes that this machine's kernel has killed for lack of memory since it was started."""
    with suppress(OSError), open("/proc/vmstat") as f:
        for line in f:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def raise_file_limit(most: int = 1 << 20) -> None:
    """Let this process and those that it starts open as many files as the system allows, up to `most`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = most if hard == resource.RLIM_INFINITY else min(hard, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def kill_families(pids: Iterable[int]) -> None:
    """Kill processes and their children at once; those that have gone already are no error."""
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for member in [process, *process.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    member.kill()


def set_title(part: str) -> None:
    """Call this process of a job `fsdp_jobs: NAME PART` in `ps`; its environment in /proc stays readable."""
    os.environ["SPT_NOENV"] = "1"
    setproctitle.setproctitle(f"fsdp_jobs: {Path(os.environ[RUN_DIR_ENV]).name} {part}")


@cache
def watch_parent(pid: int) -> None:
    """End this process soon after its parent `pid`, also where a thread of that one started it and has ended.

    The kernel's death signal (`die_with_parent`) would come with the end of that thread.
    """

    def watch() -> None:
        while os.getppid() == pid:
            time.sleep(0.1)
        os._exit(1)

    if pid != os.getpid():
        threading.Thread(target=watch, daemon=True, name="watch_parent").start()


def free_port() -> int:
    """Return a TCP port that is free now."""
    with closing(socket.socket()) as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])


def visible_gpus() -> list[str]:
    """Return ids of the NVIDIA GPUs that this process may use: CUDA_VISIBLE_DEVICES, or all that the driver lists."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [gpu for gpu in chosen.split(",") if gpu]
    return [str(i) for i, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]


def start_detached(module: str, folder: Path, record: Path, log: Path) -> None:
    """Run `python -m MODULE FOLDER` so that it outlives this terminal, unless it runs already.

    The process holds a lock beside `record` from before it exists until it ends, so that there is never a second one,
    and a command that is killed here has started it or has not. The program calls `record_this_process` first.
    """
    with _lock_of(record).open("a") as lock:
        while not try_lock(lock):
            if recorded_process(record) is not None:
                return
            time.sleep(_RETRY_S)  # another command looks at it
        with log.open("a") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=[lock.fileno()],
            )
        _record(record, process.pid)


def record_this_process(record: Path) -> None:
    """Record this process, in case the command that started it died before it could."""
    _record(record, os.getpid())


def recorded_process(record: Path) -> psutil.Process | None:
    """Return the process that `start_detached` started; None when it has ended.

    Where the record is lost, or of an older version, the process is the one that holds the lock.
    """
    deadline = time.monotonic() + _RECORDED_S
    while True:
        with suppress(OSError, ValueError, psutil.NoSuchProcess):
            known = json.loads(record.read_text())
            process = psutil.Process(known["pid"])
            if _started(process) == known["started"] and process.status() != psutil.STATUS_ZOMBIE:
                return process
        try:
            with _lock_of(record).open() as lock:
                if try_lock(lock):
                    return None
        except OSError:  # never started, or another user's
            return None
        if time.monotonic() > deadline and (holder := _holder(_lock_of(record))) is not None:
            return holder
        time.sleep(_RETRY_S)  # it is being started, and will be recorded


def _holder(lock: Path) -> psutil.Process | None:
    """Return the process that has a lock's file open to write; commands that look open it to read."""
    real = str(lock.resolve())
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(file.path == real and file.mode.startswith("a") for file in process.open_files()):
                return process
    return None


def _started(process: psutil.Process) -> str:
    """Return what tells a process from others with its id: its start in the kernel's ticks, which no clock moves."""
    try:
        ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        return f"{ticks} of {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except FileNotFoundError:  # not Linux; or it has ended, which psutil then says
        return str(process.create_time())


def _record(record: Path, pid: int) -> None:
    write_atomic(record, json.dumps({"pid": pid, "started": _started(psutil.Process(pid))}))


def _lock_of(record: Path) -> Path:
    return record.with_suffix(".lock")
