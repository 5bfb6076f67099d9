"""Detect idle ranks of programs that report no steps. No torch.

A heartbeat reports in `measured`, as `silent`, how many seconds they have been idle; 0 while they work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from fsdp_jobs.config.resolve import silence_s
from fsdp_jobs.node import guard
from fsdp_jobs.node.stacks import Stack, stacks_of
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.rank_state import Phase
from fsdp_jobs.run.tail import size_of
from fsdp_jobs.run.threads import start_thread

_CPU = 0.02  # of a core: a rank that uses less is idle
_WAKES_PER_S = 0.2  # most wakes of an idle main thread, after the first `_WAKES`; signals for its stacks count
_WAKES = 10
_LOOK_S = 1.0


@dataclass(frozen=True)
class _Look:
    """CPU use and stack of a rank at one moment."""

    cpu_s: float  # used by the rank and its children
    wakes: int  # how often its main thread has begun to wait
    runs: bool  # its main thread is running or waits only for a CPU
    stack: Stack | None  # None: not collected

    @classmethod
    def at(cls, pid: int, stack: Stack | None) -> _Look | None:
        """Look at a process; None if it has ended."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            cpu_s = sum(process.cpu_times()[:4])
            for child in process.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    cpu_s += sum(child.cpu_times()[:4])
            is_running = process.status() == psutil.STATUS_RUNNING
            return cls(cpu_s, process.num_ctx_switches().voluntary, is_running, stack)
        return None

    def has_stood_still(self, before: _Look, seconds: float) -> bool:
        """Whether since an earlier look the main thread only waited for one thing or spun in a collective."""
        if self.wakes - before.wakes > _WAKES + _WAKES_PER_S * seconds:
            return False
        if self.stack is not None and self.stack != before.stack:
            return False
        is_spinning = before.stack is not None and before.stack.is_in_collective
        return is_spinning or not (self.runs or before.runs or self.cpu_s - before.cpu_s > _CPU * seconds)


class Silence:
    """Watches the ranks of one node; call `look` about once a second.

    Once they have written no output for half of the limit, it records their CPU use, their stacks, and the files in the
    run directory. If none of these has changed at the limit, the ranks are silent until something changes.
    """

    def __init__(self, limit_s: float, stacks: Callable[[], list[Stack]], files: Callable[[], object]):
        """`stacks` collects the ranks' stacks, in order; `files` returns a value that changes when files do."""
        self.limit_s, self._stacks, self._files = limit_s, stacks, files
        self._written: object = None
        self._since = 0.0
        self._noted_at: float | None = None
        self._noted: list[_Look | None] = []
        self._noted_files: object = None
        self._is_silent = False

    def look(self, pids: Sequence[int], written: object, now: float) -> float | None:
        """Return for how many seconds the ranks have been silent, None if they are not.

        Args:
            pids: process ids of the ranks.
            written: a value that changes when ranks write output or are replaced.
            now: monotonic seconds.
        """
        if written != self._written:
            self._written = written
            self._begin(now)
        quiet_s = now - self._since
        if quiet_s < self.limit_s / 2:
            return None
        if self._noted_at is None:
            self._noted_at, self._noted, self._noted_files = now, self._look_at(pids, True), self._files()
        elif quiet_s >= self.limit_s and now - self._noted_at >= self.limit_s / 2:
            looks = self._look_at(pids, not self._is_silent)
            seconds = now - self._noted_at
            still = all(
                look is None or (before is not None and look.has_stood_still(before, seconds))
                for look, before in zip(looks, self._noted, strict=True)
            )
            self._is_silent = still and (self._is_silent or self._files() == self._noted_files)
            if not self._is_silent:
                self._begin(now)
        return quiet_s if self._is_silent else None

    def _begin(self, now: float) -> None:
        self._since, self._noted_at, self._is_silent = now, None, False

    def _look_at(self, pids: Sequence[int], with_stacks: bool) -> list[_Look | None]:
        stacks: Sequence[Stack | None] = self._stacks() if with_stacks else [None] * len(pids)
        return [_Look.at(pid, stack) for pid, stack in zip(pids, stacks, strict=True)]


def files_of(run: RunDir) -> frozenset[tuple[str, int, float]]:
    """Return path, size and time of every file that the program has written to its run directory."""
    found, of_the_job = set(), {run.attempt(0).parent, run.code, run.submit, run.events, run.metrics}
    for top in run.path.iterdir():
        if top not in of_the_job:
            for file in [top, *top.rglob("*")]:
                with suppress(OSError):
                    stat = file.stat()
                    found.add((str(file), stat.st_size, stat.st_mtime))
    return frozenset(found)


class Guard(guard.Guard):
    """Adds to each heartbeat how long ranks that report no steps have been idle."""

    def start(self) -> None:
        self._silent = -1, 0.0  # a round, and for how many seconds its ranks have been idle
        if self.node.config.is_program:
            start_thread(self._watch, "silence")

    def beat(self) -> dict[str, float]:
        number, seconds = self._silent
        return {"silent": seconds} if number == self.node.running_round else {}

    def _watch(self) -> None:
        node = self.node
        watch = Silence(
            silence_s(node.config.elastic),
            lambda: stacks_of(node.pids(), node.stack_files()),
            lambda: files_of(node.run) if node.round.rank == 0 else None,
        )
        while True:
            time.sleep(_LOOK_S)
            number, pids, seconds = node.running_round, node.pids(), None
            if number >= 0 and pids and {state.read().phase for state in node.states} <= {Phase.STARTING, Phase.DONE}:
                with suppress(OSError, ValueError, psutil.Error):  # another round has begun: try again
                    written = (number, pids, [*map(size_of, node.log_files())])
                    seconds = watch.look(pids, written, time.monotonic())
            self._silent = number, seconds or 0.0
