"""Find and control the processes, ports and GPUs of this machine. No torch."""

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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import psutil
import setproctitle

from fsdp_jobs.run.env import HOST_ENV, RUN_DIR_ENV
from fsdp_jobs.run.files import try_lock, write_json
from fsdp_jobs.run.threads import start_thread

_PR_SET_PDEATHSIG = 1  # prctl(2)
_FILES = 1 << 20
_RETRY_S = 0.02
_DRIVERS = Path("/")  # GPU drivers list their GPUs below it
NO_GPU = "-1"  # hides all: AMD's runtime takes an empty list for none
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_RECORDED_S = 2.0  # within which a started process is recorded

# Signals by which clusters and users make a job save and stop.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

# Makes a rank write its stacks: a real-time signal that no program uses, if the system has any.
STACKS_SIGNAL = int(signal.SIGRTMIN) + 6 if hasattr(signal, "SIGRTMIN") else int(signal.SIGUSR2)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies (Linux; elsewhere nothing happens)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block by an exception, as Ctrl-C does, so that what it has begun is undone.

    A second signal does not interrupt that. Signals that are ignored, as under nohup, or handled already stay so.
    """
    is_main = threading.current_thread() is threading.main_thread()
    heard = [n for n in (signal.SIGTERM, signal.SIGHUP) if is_main and signal.getsignal(n) is signal.SIG_DFL]

    def end(number: int, _frame: object) -> None:
        for each in heard:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)  # as of a shell

    for number in heard:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, signal.SIG_DFL)


def this_machine() -> str:
    """Return the name of the machine that a node of a job is on; a pod's host name is another."""
    return os.environ.get(HOST_ENV) or socket.gethostname()


def age_s() -> float:
    """Return the age of this process in seconds; psutil, which truncates the boot's time, is off by up to one."""
    born_s = _start_ticks(os.getpid()) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - born_s


def _start_ticks(pid: int) -> int:
    """Return when a process started, in kernel ticks since the boot, which no clock changes. Linux only."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def has_signal(pid: int, which: str, number: int) -> bool:
    """Whether a process ignores (SigIgn) or handles (SigCgt) a signal; ranks on `fsdp_jobs.job` ignore SIGTERM."""
    with open(f"/proc/{pid}/status") as f:
        mask = next((line.split()[1] for line in f if line.startswith(f"{which}:")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


def raise_file_limit() -> None:
    """Let this process and its children open as many files as the system allows, up to a million."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def kill_families(pids: Iterable[int]) -> None:
    """Kill processes and their children at once; it is no error if some have already ended."""
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for member in [process, *process.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    member.kill()


def kill_orphans_of(folder: Path) -> None:
    """Kill what ranks of a killed agent have started, unless it has a session of its own.

    Such a process has the agent's folder in its environment, or a file of it mapped if it was forked from a rank.
    """
    for process in all_processes():
        with suppress(OSError, psutil.Error):
            files = Path(f"/proc/{process.pid}")
            if not psutil.pid_exists(os.getsid(process.pid)) and any(
                os.fsencode(folder) in (files / name).read_bytes() for name in ("environ", "maps")
            ):
                process.kill()


def set_title(part: str) -> None:
    """Show this process of a job as `fsdp_jobs: NAME PART` in `ps`; its environment in /proc stays readable."""
    os.environ["SPT_NOENV"] = "1"
    setproctitle.setproctitle(f"fsdp_jobs: {Path(os.environ[RUN_DIR_ENV]).name} {part}")


@cache
def watch_parent(pid: int) -> None:
    """End this process soon after its parent `pid`, even if a thread of the parent started it.

    The kernel's death signal (`die_with_parent`) would arrive at the end of that thread.
    """

    def watch() -> None:
        while os.getppid() == pid:
            time.sleep(0.1)
        os._exit(1)

    if pid != os.getpid():
        start_thread(watch, "watch_parent")


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])


def hold_port() -> socket.socket:
    """Return a socket that keeps a TCP port for a coordinator that starts: nobody else gets it as a free one."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # the coordinator sets it, too
    held.bind(("", 0))
    return held


def wildcards() -> list[str]:
    """Return the addresses on which a server is reached from everywhere: pods of some clusters have only IPv6."""
    try:
        socket.create_server(("::", 0), family=socket.AF_INET6).close()
    except OSError:  # the kernel has no IPv6, or it is turned off
        return ["0.0.0.0"]
    return ["0.0.0.0", "::"]


def gloo_interface(others: Iterable[str]) -> dict[str, str]:
    """Return the variable that makes gloo use the network interface towards the first other machine.

    Without it gloo uses the address of this machine's name, which with Debian's default /etc/hosts (127.0.1.1) only
    this machine reaches. Empty if the name has another address, the user has set the variable, or there is no other
    machine.

    Args:
        others: names or addresses of the job's machines, this one perhaps included.
    """
    if _GLOO_INTERFACE in os.environ:
        return {}
    named = next(_own_addresses(socket.gethostname()), None)
    if named is not None and not named.is_loopback:
        return {}
    ways = (own for host in others for own in _own_addresses(host, reach=True) if not own.is_loopback)
    own = str(next(ways, None))
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address.partition("%")[0] == own for a in addresses):
            return {_GLOO_INTERFACE: name}
    return {}


def _own_addresses(host: str, reach: bool = False) -> Iterator[IPv4Address | IPv6Address]:
    """Yield the addresses of `host` that are this machine's or, with `reach`, this machine's on the way to `host`."""
    with suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as s:
                if reach:
                    s.connect(address)  # sends nothing
                else:
                    s.bind((address[0], 0, *address[2:]))
                yield ip_address(s.getsockname()[0].partition("%")[0])


@cache
def is_for_amd() -> bool:
    """Whether PyTorch here is built for AMD's GPUs."""
    return "rocm" in version("torch")


def gpus_variable() -> str:
    """Name the variable that says which GPUs a process sees: AMD's runtime prefers its own, if it is set."""
    return "HIP_VISIBLE_DEVICES" if is_for_amd() and os.environ.get("HIP_VISIBLE_DEVICES") else "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> list[str]:
    """Return ids of the GPUs that this process may use: those that a variable names, or all that the driver lists."""
    chosen = os.environ.get(gpus_variable())
    if chosen is not None:
        return [gpu for gpu in chosen.split(",") if gpu not in ("", NO_GPU)]
    amds = _DRIVERS.glob("sys/class/kfd/kfd/topology/nodes/*/gpu_id")
    gpus = [*filter(_is_gpu, amds)] if is_for_amd() else [*_DRIVERS.glob("proc/driver/nvidia/gpus/*")]
    return [str(i) for i, _ in enumerate(gpus)]


def _is_gpu(file: Path) -> bool:
    """Whether AMD's driver lists a GPU there, not a CPU (0) or a GPU that this container may not use."""
    with suppress(PermissionError):
        return file.read_text().strip() != "0"
    return False


def start_detached(module: str, folder: Path, record: Path, log: Path) -> None:
    """Run `python -m MODULE FOLDER` so that it outlives this terminal, unless it already runs.

    The process holds a lock beside `record`, taken before it is started and held until it ends. So there is never a
    second process, and a command killed here has started it or not. The program first calls `record_process`.
    """
    with _lock_of(record).open("a") as lock:
        while not try_lock(lock):
            if recorded_process(record) is not None:
                return
            time.sleep(_RETRY_S)  # another command is checking the lock
        with log.open("a") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=[lock.fileno()],
            )
        record_process(record, process.pid)


def record_process(record: Path, pid: int | None = None) -> None:
    """Record a process, by default this one: the command that started it may have died before recording it."""
    process = psutil.Process(pid)
    write_json(record, {"pid": process.pid, "started": _started(process)})


def recorded_process(record: Path) -> psutil.Process | None:
    """Return the process that `start_detached` started; None if it has ended.

    If the record is lost, or of an older version, it is the process that holds the lock.
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
        time.sleep(_RETRY_S)  # the process is being started and not recorded yet


def all_processes() -> Iterator[psutil.Process]:
    """Yield every process.

    `psutil.process_iter` keeps objects of earlier calls, even of a process that has ended and whose id a new process
    now has: such an object cannot kill the new process.
    """
    for pid in psutil.pids():
        with suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)


def command_of(process: psutil.Process) -> list[str]:
    """Return a process's command line; empty if it has ended or belongs to another user."""
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def _holder(lock: Path) -> psutil.Process | None:
    """Return the process that has a lock's file open for writing; commands that check the lock only read it."""
    real = str(lock.resolve())
    for process in all_processes():
        with suppress(psutil.Error):
            if any(file.path == real and file.mode.startswith("a") for file in process.open_files()):
                return process
    return None


def _started(process: psutil.Process) -> str:
    """Return a mark that differs between processes of one id."""
    try:
        return f"{_start_ticks(process.pid)} of {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except FileNotFoundError:  # not Linux, or it has ended: then psutil raises
        return str(process.create_time())


def _lock_of(record: Path) -> Path:
    return record.with_suffix(".lock")
