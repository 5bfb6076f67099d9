"""Start the processes of an attempt and restart those that die. For supervisors, batch scripts, pods. No torch."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from fsdp_jobs.run import events, log
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import SUBMISSION_ENV
from fsdp_jobs.run.files import look_again
from fsdp_jobs.run.processes import die_with_parent, record_process
from fsdp_jobs.run.tail import last_lines
from fsdp_jobs.run.threads import start_thread, wait_until
from fsdp_jobs.run.verdict import Verdict

_Answer = TypeVar("_Answer")

_MAX_EARLY_DEATHS = 3  # in a row
_AGAIN_S = 0.2  # between two tries to use storage that fails
MOMENT_S = 30.0  # for storage to work again at the start of an attempt, which another machine may do better

logger = logging.getLogger(__name__)


def is_superseded(run: RunDir) -> bool:
    """Whether the run was submitted again after the submission of this process, which must then end."""
    return os.environ.get(SUBMISSION_ENV, run.submission) != run.submission


class StorageErrors:
    """A context that suppresses errors of the storage, for a block that is repeated. The same error is logged once."""

    def __init__(self, patience_s: float = math.inf):
        """`patience_s` is how long they are suppressed until the block works again."""
        self._patience_s, self._told, self._since = patience_s, "", math.inf

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if not isinstance(error, OSError):
            self._since = math.inf
            return False
        if str(error) != self._told:
            logger.warning("trying again: %s", error)
        self._told, self._since = str(error), min(self._since, time.monotonic())
        return time.monotonic() - self._since < self._patience_s


def patiently(work: Callable[[], _Answer]) -> _Answer:
    """Return what `work` does, which is repeated while storage fails for a moment."""
    storage_errors = StorageErrors(MOMENT_S)
    while True:
        with storage_errors:
            return work()
        time.sleep(_AGAIN_S)


@dataclass(eq=False)
class Process:
    """A process with a log, which can be started more than once."""

    name: str
    argv: Sequence[str]
    log: Path
    env: Mapping[str, str]  # its whole environment
    hosts: Sequence[str] = ()  # the machines it runs on, if not this one
    echo: bool = False  # its output is also copied to this process's stdout
    early_deaths: int = 0
    _copying: threading.Thread | None = None

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab", buffering=0) as log:
            self.popen = subprocess.Popen(
                self.argv,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if self.echo else log,
                stderr=subprocess.STDOUT,
                start_new_session=not self.echo,
                preexec_fn=die_with_parent,
            )
        self.started = time.monotonic()
        if self.echo:
            self._copying = start_thread(partial(_copy_output, self.popen, self.log), "output")

    @property
    def has_ended(self) -> bool:
        """Whether it has ended; if so, all its output is in the log."""
        if self.popen.poll() is not None and self._copying is not None:
            self._copying.join(1)  # takes longer only if a child of the process keeps the pipe open
            self._copying = None
        return self.popen.returncode is not None

    def failed(self, reason: str) -> Verdict:
        """Return the verdict on an attempt that cannot continue without it, with the last lines of its log."""
        return Verdict("infrastructure", "stop", reason, last_lines=last_lines(self.log, 15))


class Attempt:
    """An attempt's processes on this machine, kept alive until the coordinator or a launcher gives the verdict.

    Launchers override `restarts`, `give_up`, `on_poll` and `is_over`.
    """

    poll_s = 0.1
    early_s = 10.0  # a death so soon after the start is early; three in a row, and the process is given up
    echo = False

    def __init__(self, run: RunDir, number: int | None = None):
        """`number` is by default that of the next attempt."""
        self.run, self.number = run, patiently(run.last_attempt) + 1 if number is None else number
        self.processes: list[Process] = []

    @property
    def verdict(self) -> Verdict | None:
        return Verdict.read(self.run, self.number)

    def begin(self, started: events.AttemptStarted) -> None:
        """Record that the attempt begins."""
        patiently(partial(events.begin_attempt, self.run, self.number, started))

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str], hosts: Sequence[str] = ()) -> Process:
        """Start the coordinator, a node's agent or another process of the attempt."""
        log = self.run.process_log(self.number, name)
        process = Process(name, argv, log, env, hosts, self.echo)
        patiently(process.start)
        self.processes.append(process)
        return process

    def supervise(self) -> Verdict | None:
        """Restart processes that die until the attempt is over; return its verdict.

        After an error of the run directory's storage it tries again.
        """
        storage_errors = StorageErrors()
        while True:
            with storage_errors:
                if self.is_over():
                    return self.verdict
                self.on_poll()
                for process in [p for p in self.processes if p.has_ended and self.restarts(p)]:
                    look_again(self.run.verdict(self.number))
                    if self.verdict is None:
                        self._on_death(process)
            time.sleep(self.poll_s)

    def finish(self, seconds: float) -> None:
        """Wait until all processes have ended, and kill those that have not in time; their children die with them.

        If the coordinator was killed after it had written the verdict, this process records and notifies in its place.
        """
        wait_until(lambda: all(p.has_ended for p in self.processes), seconds, self.poll_s)
        for process in self.processes:
            if not process.has_ended:
                process.popen.kill()
                process.popen.wait()
        with suppress(OSError):
            if any(p.name == "coordinator" for p in self.processes) and (verdict := self.verdict) is not None:
                verdict.complete(self.run, self.number)

    def is_over(self) -> bool:
        return self.verdict is not None

    def on_poll(self) -> None:
        """Do the launcher's own work before each check of the processes."""

    def restarts(self, process: Process) -> bool:
        """Whether a process that has ended is restarted; an agent that ended with 0 has done its work."""
        return process.name == "coordinator" or process.popen.returncode != 0

    def give_up(self, process: Process, verdict: Verdict) -> None:
        """End the attempt, which cannot continue without this process."""
        verdict.close(self.run, self.number)

    def _on_death(self, process: Process) -> None:
        if self.run.last_attempt() > self.number:
            sys.exit(f"attempt {self.number} is over: a later attempt has begun elsewhere")
        is_early = time.monotonic() - process.started < self.early_s
        early_deaths, exit_code = process.early_deaths + 1 if is_early else 0, process.popen.returncode
        if early_deaths >= _MAX_EARLY_DEATHS:
            reason = f"{process.name} died three times within {self.early_s:.0f} s of its start"
            self.give_up(process, process.failed(reason))
            self.processes.remove(process)
            return
        process.start()
        process.early_deaths = early_deaths
        events.record(self.run, self.number, events.ProcessRestarted(process.name, exit_code))


def main(supervise: Callable[[RunDir], int | None]) -> NoReturn:
    """Supervise the job of the run directory that the command line names."""
    log.configure()
    run = RunDir(sys.argv[1])
    record_process(record_file(run))
    sys.exit(supervise(run))


def staged(run: RunDir) -> dict[str, Any]:
    """Return the request of a run's newest job, as its launcher staged it."""
    return dict(json.loads(staged_file(run).read_text()))


def staged_file(run: RunDir) -> Path:
    return run.submit / "staged.json"


def record_file(run: RunDir) -> Path:
    """Return the file that names the run's supervisor process."""
    return run.submit / "supervisor.json"


def _copy_output(process: subprocess.Popen[bytes], log: Path) -> None:
    """Copy a process's output to this process's stdout, and into its log while the disk has room."""
    assert process.stdout is not None
    with log.open("ab", buffering=0) as file:
        while chunk := os.read(process.stdout.fileno(), 1 << 16):
            os.write(sys.stdout.fileno(), chunk)
            try:
                file.write(chunk)
            except OSError as e:
                os.write(sys.stderr.fileno(), f"WARNING output not written to {log}: {e.strerror}\n".encode())
