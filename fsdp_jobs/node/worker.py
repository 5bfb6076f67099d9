"""The first thing a rank does: die with its agent from now on, send its output to its log file, run its program.

A Python program, the built-in trainer among them, is run by `run_program` in a process forked from one that has
imported torch already. Any other is started by `python -m fsdp_jobs.node.worker`, which becomes it.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import faulthandler
import gc
import io
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from fsdp_jobs.config.errors import BadInput, JobFailed, Problem
from fsdp_jobs.node.program import Program
from fsdp_jobs.run.env import AGENT_PID_ENV, LOG_ENV, RANK_STATE_ENV, STACKS_ENV
from fsdp_jobs.run.processes import STACKS_SIGNAL, die_with_parent, set_title
from fsdp_jobs.run.rank_state import SAVES_NOTHING, Phase, RankState, Request
from fsdp_jobs.run.term import LOOK_S, Lease
from fsdp_jobs.run.verdict import EXIT_REQUEUE


def enter() -> None:
    """Die when the parent dies (Linux), and append stdout and stderr to the rank's log."""
    die_with_parent()
    if os.getppid() == 1 and os.environ.get(AGENT_PID_ENV) != "1":
        os._exit(1)  # the parent died before the line above
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    log = Path(os.environ[LOG_ENV])
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        with suppress(OSError):  # a full disk
            os.write(descriptor, b"\n")  # a killed process has not ended its last line, as that of a progress bar
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


class _Log(io.FileIO):
    """A rank's log, as stdout and stderr of its program: what a full disk has no room for is lost."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return memoryview(data).nbytes


def _die_with_lease() -> None:
    """Kill this process when its node's lease has run out: also when its agent stands still, and cannot."""
    lease = Lease(os.environ[RANK_STATE_ENV])
    while (left := lease.left_s()) > 0:
        time.sleep(min(left, LOOK_S))
    print("no answer from the coordinator for too long: this rank must not run any more", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def run_program() -> None:
    """Run a rank's Python program in the surroundings that `python program.py` or `python -m program` would give it."""
    enter()
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.BufferedWriter(_Log(n, "w", closefd=False)), f.encoding, f.errors, line_buffering=True)
        for n, f in ((1, sys.stdout), (2, sys.stderr))
    )
    stacks = open(os.environ[STACKS_ENV], "a")  # noqa: SIM115 - stays open for as long as the rank lives
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    threading.Thread(target=_die_with_lease, name="lease", daemon=True).start()
    program = Program.from_environment()
    set_title(f"rank {os.environ['RANK']}/{os.environ['WORLD_SIZE']} {Path(program.what).name}")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.set_start_method(None, force=True)  # Python's own default again
    if sys.flags.safe_path:
        sys.path.insert(0, program.folder)
    else:
        sys.path[0] = program.folder  # in place of the agent's
    sys.argv = [program.what, *program.args]
    atexit.register(_end_children)
    _seed_anew()
    exit_code = _run(program)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()  # an interpreter does so at its end, a forked process does not
    _write_what_is_open()
    state = RankState(os.environ[RANK_STATE_ENV], int(os.environ["LOCAL_RANK"]))
    if exit_code in (0, EXIT_REQUEUE) and state.requested() is Request.PARK and state.read().phase == Phase.LEAVING:
        _park(state)
    if exit_code:
        os._exit(exit_code)
    if not state.read().time:
        state.report(-1, SAVES_NOTHING, Phase.DONE)  # the process stays until all of its node's have ended


def _seed_anew() -> None:
    """Seed the generators that the fork server has imported, as a fresh interpreter would; Python's own are already."""
    for module in ("torch", "numpy.random"):
        if module in sys.modules:
            sys.modules[module].seed()


def _end_children() -> None:
    """Kill the daemonic processes that Python would end with SIGTERM: a rank that ignores it has them ignore it."""
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def _write_what_is_open() -> None:
    """Write what is left in the buffers of files that the program has not closed, as an interpreter does at its end."""
    gc.collect()  # what the program alone knew has its `__del__`
    for value in gc.get_objects():
        if issubclass(type(value), _BUFFERED):
            with suppress(OSError, ValueError):  # a full disk; it is closed
                value.flush()
    with suppress(Exception):  # a user's class, which Python lets do what it likes
        sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)


def _park(state: RankState) -> None:
    """Wait to be stopped: when all ranks have parked, the agents form a larger world."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    report = state.read()
    state.report(report.step, report.committed, Phase.PARKED)
    while True:
        time.sleep(1)


def _run(program: Program) -> int:
    """Run it to its end. Returns the exit code; an exception is printed, and left in torch elastic's error file."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        if program.is_module:
            runpy.run_module(program.what, run_name="__main__", alter_sys=True)
        elif not Path(program.what).is_file():
            raise BadInput([Problem(f"script={program.what}", "there is no such file on this node")])
        else:
            runpy.run_path(program.what, run_name="__main__")
        return 0
    except BaseException as e:
        if isinstance(e, SystemExit) and (e.code is None or isinstance(e.code, int)):
            return (e.code or 0) & 0xFF
        get_error_handler().record_exception(e)
        if isinstance(e, SystemExit):
            print(e.code, file=sys.stderr)
        elif isinstance(e, BadInput | JobFailed):  # says what to do by itself
            print(f"{type(e).__name__}: {e}", file=sys.stderr)
        else:
            sys.excepthook(type(e), e.with_traceback(_of_program(e.__traceback__)), e.__traceback__)
        return 1


def _of_program(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the lines that led to the program."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    enter()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)  # it may not know this request for its stacks
    executable = Program.from_environment()
    try:
        os.execv(executable.what, [executable.what, *executable.args])
    except OSError as e:
        print(f"{executable.what}: {e.strerror}", file=sys.stderr, flush=True)
        os._exit(126)
