"""Entry point of a rank's process: make it die with its agent, redirect its output to its log, and run its program.

`run_program` runs a Python program, such as the built-in trainer, in a process forked from one that has imported
torch. For other programs, `python -m fsdp_jobs.node.worker` replaces itself by the program.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import errno
import faulthandler
import gc
import io
import logging
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from fsdp_jobs.config.errors import BadInput, JobFailed
from fsdp_jobs.node.program import Program
from fsdp_jobs.run.env import AGENT_PID_ENV, LOG_ENV, PROGRAM_ENV, RANK_STATE_ENV, STACKS_ENV
from fsdp_jobs.run.failure import reports_lost_peer
from fsdp_jobs.run.processes import STACKS_SIGNAL, die_with_parent, set_title
from fsdp_jobs.run.rank_state import Phase, RankState, Request
from fsdp_jobs.run.tail import is_cut
from fsdp_jobs.run.term import LOOK_S, Lease
from fsdp_jobs.run.verdict import EXIT_DONE, EXIT_REQUEUE


def enter() -> None:
    """Die when the parent dies (Linux), lead a session, and append stdout and stderr to the rank's log."""
    die_with_parent()
    if os.getpid() != os.getsid(0):
        os.setsid()  # as torchrun does: a program that signals its group, such as `kill 0`, means its own processes
    if os.getppid() == 1 and os.environ.get(AGENT_PID_ENV) != "1":
        os._exit(1)  # the parent died before `die_with_parent`
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # the fork server blocks it
    log = Path(os.environ[LOG_ENV])
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    if is_cut(descriptor):
        with suppress(OSError):  # a full disk
            os.write(descriptor, b"\n")  # a killed process may leave its last line unfinished, as a progress bar does
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


_ENDS_S = 300.0  # after its failure a rank has ended; a thread may be saving a checkpoint
_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


class _Log(io.FileIO):
    """A rank's log as stdout and stderr of its program; output is dropped while the disk is full or read-only."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise
            return memoryview(data).nbytes


def _die_with_lease() -> None:
    """Kill this process when its node's lease expires, in case its agent is blocked and cannot."""
    lease = Lease(os.environ[RANK_STATE_ENV])
    while (left := lease.left_s()) > 0:
        time.sleep(min(left, LOOK_S))
    print("no answer from the coordinator for too long: this rank must stop", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def run_program() -> None:
    """Run a rank's Python program in the same state as `python program.py` or `python -m program` would."""
    enter()
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.BufferedWriter(_Log(n, "w", closefd=False)), f.encoding, f.errors, line_buffering=True)
        for n, f in ((1, sys.stdout), (2, sys.stderr))
    )
    stacks = open(os.environ[STACKS_ENV], "a")  # noqa: SIM115 - stays open for as long as the rank lives
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    _thread.start_new_thread(_die_with_lease, ())  # not one of `threading.enumerate()`, which a program may join
    program = Program.from_json(os.environ.pop(PROGRAM_ENV))
    set_title(f"rank {os.environ['RANK']}/{os.environ['WORLD_SIZE']} {Path(program.what).name}")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.set_start_method(None, force=True)  # Python's own default again
    multiprocessing.current_process().name = "MainProcess"
    multiprocessing.current_process()._identity = ()  # else its children share a number
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    if sys.flags.safe_path:
        sys.path.insert(0, program.folder)
    else:
        sys.path[0] = program.folder  # replaces the agent's
    sys.argv = [program.what, *program.args]
    sys.orig_argv = [sys.executable, *["-m"] * program.is_module, *sys.argv]  # with which a program starts itself again
    atexit.register(_end_children)
    for module in ("torch", "numpy.random"):  # else ranks share the fork server's random state; Python reseeds its own
        if module in sys.modules:
            sys.modules[module].seed()
    logging.root.handlers, logging.root.level = [], logging.WARNING  # drop the agent's: the program configures its own
    # An exception in a process that the program forks is not its rank's failure.
    os.register_at_fork(after_in_child=lambda: os.environ.pop("TORCHELASTIC_ERROR_FILE", None))
    rank, state = os.getpid(), RankState(os.environ[RANK_STATE_ENV], int(os.environ["LOCAL_RANK"]))
    frozen = gc.get_freeze_count()
    exit_code = _run(program)
    if not exit_code and state.read().phase == Phase.TRAINING:
        with suppress(OSError, ValueError):  # the program may have closed it
            print("without job.finish() the last step is neither recorded nor saved", file=sys.stderr, flush=True)
    if exit_code not in (EXIT_DONE, EXIT_REQUEUE):
        _thread.start_new_thread(_end_soon, (exit_code,))
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()  # an interpreter does this at exit, a forked process does not
    _flush_open_files(frozen)
    is_leaving = exit_code in (0, EXIT_REQUEUE) and state.read().phase == Phase.LEAVING
    if is_leaving and state.requested() is Request.PARK and os.getpid() == rank:  # else it is a fork of the program
        _park(state)
    os._exit(exit_code)  # torch's agent would keep the process, and its sockets, until its node's ranks have ended


def _end_soon(exit_code: int) -> None:
    """End this process after a while, whatever its threads, children and functions of atexit do.

    Until it has ended, its peers wait in their collectives, and its agent does not know of the failure.
    """
    time.sleep(_ENDS_S)
    with suppress(OSError):  # a full disk
        os.write(2, f"this rank still runs {_ENDS_S:.0f} s after its failure: it ends now\n".encode())
    os._exit(exit_code)


def _end_children() -> None:
    """Kill daemonic processes: Python would send SIGTERM, which they ignore if the rank does."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise for each DataLoader's worker
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def _flush_open_files(frozen: int) -> None:
    """End the program's objects and flush the files that it has not closed, as an interpreter does at exit.

    It skips objects that were frozen before the program began: they are the fork server's, and a look copies memory.
    """
    threading.excepthook = lambda _: None  # drops errors of daemonic threads, which an interpreter would have stopped
    main = vars(sys.modules["__main__"])
    for name in main.keys() - {"__builtins__"}:
        main[name] = None
    gc.collect()  # runs `__del__` of objects that only the program referred to
    if gc.get_freeze_count() > frozen:  # by the program
        gc.unfreeze()  # `get_objects` leaves out frozen objects
    for value in gc.get_objects():
        if issubclass(type(value), _BUFFERED):
            with suppress(OSError, ValueError):  # a full disk, or a closed file
                value.flush()
    with suppress(Exception):  # it may be a user's class, which can raise anything
        sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)


def _park(state: RankState) -> None:
    """Wait to be stopped: once all ranks have parked, the coordinator forms a larger round."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    report = state.read()
    state.report(report.step, report.committed, Phase.PARKED)
    while True:
        time.sleep(1)


def _run(program: Program) -> int:
    """Run the program. Returns its exit code; prints an exception and writes it to torch's error file."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    record = get_error_handler().record_exception
    # It stays in place: threads and atexit functions that outlive the program may pickle its classes.
    main = sys.modules["__main__"] = ModuleType("__main__")
    try:
        if program.is_module:
            runpy._run_module_as_main(program.what)  # type: ignore[attr-defined]
        elif not Path(program.what).is_file():
            raise BadInput.at(f"script={program.what}", "there is no such file on this node")
        else:
            script = compile(Path(program.what).read_bytes(), program.what, "exec", dont_inherit=True)
            runpy._run_code(script, vars(main), mod_name="__main__", script_name=program.what)  # type: ignore[attr-defined]
        return 0
    except BaseException as e:
        if isinstance(e, SystemExit) and isinstance(e.code, int | None):
            code = (e.code or 0) & 0xFF
            if code not in (EXIT_DONE, EXIT_REQUEUE) and isinstance(e.__context__, Exception):
                record(_reason(e.__context__))  # the program's handler has shown it, as Hydra's does
            return code
        try:
            record(_reason(e))
            if isinstance(e, SystemExit):
                print(e.code, file=sys.stderr)
            elif isinstance(e, BadInput | JobFailed):  # its message says what to do
                print(f"{type(e).__name__}: {e}", file=sys.stderr)
            else:
                sys.excepthook(type(e), e.with_traceback(_of_program(e.__traceback__)), e.__traceback__)
        except Exception:  # raised by the program's hook, or by the exception's own text
            traceback.print_exc()  # prints both
        return 1


def _reason(error: BaseException) -> BaseException:
    """Return the cause of an exception that the program may have wrapped: a lost peer, or a lost DataLoader's worker.

    Without one, return the exception itself; of a group, its first.
    """
    from torch._C import _error_if_any_worker_fails

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise once more for each worker that ends
    time.sleep(0.1)  # a worker that has closed its pipe may not have ended
    try:
        _error_if_any_worker_fails()
    except RuntimeError as of_worker:
        return of_worker
    chain = [error]
    for e in chain:
        if isinstance(e, RuntimeError) and reports_lost_peer(str(e)):
            return e
        causes = (e.__cause__, e.__context__, *getattr(e, "exceptions", ()))
        chain += [cause for cause in causes if cause is not None and cause not in chain]
    return next(e for e in chain if not isinstance(e, BaseExceptionGroup))


def _of_program(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames that led to the program."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    enter()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the program would inherit that
        signal.signal(ignored, signal.SIG_DFL)
    executable = Program.from_json(os.environ.pop(PROGRAM_ENV))
    command = [executable.what, *executable.args]
    try:
        os.execv(executable.what, command)
    except OSError as e:
        if e.errno == errno.ENOEXEC:  # no interpreter in its first line: shells read it themselves
            os.execv("/bin/sh", ["sh", *command])
        print(f"{executable.what}: {e.strerror}", file=sys.stderr, flush=True)
        os._exit(126)
