"""In the agent: read steps and losses that the user's program prints, if it does not report them. No torch."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

from fsdp_jobs.node.lines import Reader, Reading
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.events import RoundStarted, append_lines, newest_of
from fsdp_jobs.run.goodput import StepClock
from fsdp_jobs.run.messages import Round
from fsdp_jobs.run.rank_state import RankState
from fsdp_jobs.run.record import JsonObject
from fsdp_jobs.run.tail import Tail, newest_json_lines, size_of
from fsdp_jobs.run.term import job_time
from fsdp_jobs.run.threads import start_thread

_EVERY_S = 0.5  # between two reads of the log
_PATIENCE_S = 30.0  # to wait for the last lines at the end: storage may not answer
_MOST = 1 << 21  # bytes read at once
_LONGEST_LINE = 1 << 12  # bytes of a line that are parsed


class OutputMetrics:
    """A thread that records in `metrics.jsonl` the steps that a rank prints, while no rank reports steps itself.

    The rank is 0 or, as in Megatron, the last one: whichever prints a step first.
    """

    def __init__(self, pattern: str | None, run: RunDir, attempt: int, node: int, states: Sequence[RankState]):
        self._pattern, self._run, self._states = pattern, run, states
        self._attempt, self._node = attempt, node
        self._lock = threading.Lock()
        self._followed: list[_Followed] = []  # none while rank 0 is on another node
        self._over = threading.Event()
        self._thread = start_thread(self._watch, "output")

    def begin_round(self, round_: Round) -> None:
        """Read output from now on, if rank 0 is here."""
        with self._lock:
            self._look(is_end=True)  # of the previous round
            ranks = {0: self._node, round_.size * len(self._states) - 1: round_.last} if round_.rank == 0 else {}
            logs = [self._run.rank_log(self._attempt, node, rank) for rank, node in ranks.items()]
            self._followed = [
                _Followed(
                    self._run,
                    Tail(log, size_of(log), has_bars=True),
                    Reader(self._pattern),
                    StepClock(self._run),
                    job_time(),
                )
                for log in logs
            ]

    def settle(self) -> None:
        """Record the rest of what was printed, unless storage does not answer: then a thread goes on."""
        start_thread(self._finish, "output").join(_PATIENCE_S)

    def _finish(self) -> None:
        with self._lock:
            self._look(is_end=True)

    def close(self) -> None:
        self._over.set()
        self._thread.join(_PATIENCE_S)

    def _watch(self) -> None:
        while not self._over.wait(0.01 if any(followed.is_behind for followed in self._followed) else _EVERY_S):
            with self._lock:
                self._look()
        self._finish()

    def _look(self, is_end: bool = False) -> None:
        if any(state.read().step >= 0 for state in self._states):
            self._followed = []  # for the whole round: the ranks' states are cleared when they end
        for followed in self._followed:
            with suppress(OSError):  # no log yet, or no disk; the next call tries again
                now = job_time()
                # A killed rank's lines are older than now.
                end = min(now, followed.log.path.stat().st_mtime + now - time.time())
                start = followed.newest.get("time", end - (now - followed.looked_at))
                readings = list(followed.new(is_end))
                followed.looked_at = now
                if readings:  # spread evenly since the last one, or the last read
                    each = max(0.0, end - start) / len(readings)
                    lines = (followed.line(reading, start + each * i) for i, reading in enumerate(readings, 1))
                    append_lines(self._run.metrics, *(line | {"attempt": self._attempt} for line in lines))
                    self._followed = [followed]
                    return


@dataclass
class _Followed:
    """State of a round, as read from a rank's output."""

    run: RunDir
    log: Tail
    reader: Reader
    clock: StepClock
    looked_at: float  # seconds since 1970
    is_behind: bool = False  # the log had more than is read at once
    newest: dict[str, Any] = field(default_factory=dict)  # line of metrics.jsonl in this round
    epoch: int | None = None  # of the newest line that has one, and over all epochs its step and its epoch's end
    step: int = -1
    end: int = 0
    before: int = 0  # steps of the epochs before, if each begins with the first step
    left_out: int | None = None  # steps, by the first bar without an epoch
    is_over_all: bool = False  # whether the program counts steps, and their total, over all epochs

    @cached_property
    def recorded(self) -> list[JsonObject]:
        """The two newest lines of earlier rounds, the newest first."""
        return [*islice(newest_json_lines(self.run.metrics), 2), {}, {}][:2]

    @property
    def between(self) -> int:
        """Steps between two lines of earlier rounds, at least 1."""
        last, before = self.recorded
        between: int = last.get("step", 0) - before.get("step", 0)
        return max(1, between)

    def new(self, is_end: bool) -> Iterator[Reading]:
        """Yield later steps in new lines, including an unfinished last line at the end of the log.

        A program that resumes may pass steps over, still without a loss; they are left out.
        """
        reached = self.newest.get("step", -1)
        for line in self._lines(is_end):
            reading = self.reader.read(line[:_LONGEST_LINE].decode(errors="replace"))
            if reading is None or (counted := self._over_epochs(reading)).step <= reached:
                continue
            if reached >= 0 or counted.loss is not None or "loss" not in self.recorded[0]:
                reached = counted.step
                yield counted

    def _over_epochs(self, reading: Reading) -> Reading:
        """Return a reading whose step counts over all epochs, even if the program counts from the start of each.

        It does if a step is not higher than the last of an earlier epoch, or if an earlier round recorded this epoch:
        steps of programs that count over all epochs are recorded without one. An epoch of unknown length ends with the
        last step printed.
        """
        last = self.recorded[0]
        if (epoch := reading.epoch) is None:
            steps = last.get("steps", 0)
            if self.left_out is None:
                self.left_out = self._left_out(reading, last, begin=0)
            is_rest = reading.steps == steps - self.left_out
            return replace(reading, step=reading.step + self.left_out, steps=steps) if is_rest else reading
        if epoch < 0:  # counted from that in which the program resumed, which is not later than those recorded
            if last.get("epoch", 0) > 0:
                return replace(reading, step=-1)
            epoch = -1 - epoch
            reading = replace(reading, epoch=epoch, steps=reading.steps or last.get("epoch_end"))
        is_recorded = False
        if self.epoch is None:
            lines = (line for line in newest_json_lines(self.run.metrics) if line.get("epoch", epoch + 1) <= epoch)
            newest = last = next(lines, dict[str, Any]())
            while last.get("epoch") == epoch:
                is_recorded = True
                last = next(lines, {})
            self.epoch, self.step, self.end = last.get("epoch"), last.get("step", -1), last.get("epoch_end", 0)
        if epoch != self.epoch:
            begins_anew = is_recorded or reading.step <= self.step
            self.before = self.end if begins_anew else 0
            if is_recorded:
                self.before += self._left_out(reading, newest, begin=self.end)
            self.is_over_all = not begins_anew and self.epoch is not None
        elif self.before + reading.step <= self.step:
            return replace(reading, step=-1)  # maybe of an evaluation
        self.epoch, self.step = epoch, self.before + reading.step
        self.end = self.before + reading.steps if reading.steps else self.step + 1
        return replace(reading, epoch=None) if self.is_over_all else replace(reading, step=self.step, steps=self.end)

    def _left_out(self, reading: Reading, earlier: JsonObject, begin: int) -> int:
        """Return how many steps a bar leaves out that counts from where the program resumed: `tqdm(range(start, end))`.

        It ends so much earlier than in the round of an earlier line, since which all rounds had as many ranks, and
        which has reached its start. `begin` is the step before the bar's first.
        """
        last = earlier.get("steps" if reading.epoch is None else "epoch_end", 0) - begin
        left_out: int = last - (reading.steps or last)
        begins = reading.step <= self.between and reading.step != reading.steps  # equal in a bar without an end
        if not (begins and 0 < left_out <= earlier.get("step", 0) - begin):
            return 0
        recorded, sizes = (earlier.get("attempt", 0), earlier.get("time", 0.0)), set()
        for i, round_ in enumerate(newest_of(self.run, RoundStarted)):
            sizes.add(round_.world_size)
            if i and (round_.attempt, round_.time) <= recorded:  # the newest is this round
                break
        return left_out if len(sizes) < 2 else 0

    def _lines(self, is_end: bool) -> Iterator[bytes]:
        """Yield up to 2 MiB of new lines, all at the end. A progress bar ends its line only when it prints the next."""
        until = math.inf if is_end else self.log.offset + _MOST
        yield from self.log.lines(until)
        with suppress(OSError):  # the lines above have been read
            self.is_behind = size_of(self.log.path) > until
            last = b"" if self.is_behind else self.log.unfinished()
            if is_end or last.endswith(b"]"):
                yield last

    def line(self, reading: Reading, at: float) -> dict[str, Any]:
        """Return the line of `metrics.jsonl` for a reading."""
        line: dict[str, Any] = {"step": reading.step, "loss": reading.loss, "epoch": reading.epoch}
        line["steps" if reading.epoch is None else "epoch_end"] = reading.steps
        if not self.newest:
            line["resumed"] = max(0, min(reading.step - 1, self.before), reading.step - self.between)
            step_s = self.recorded[0].get("step_s", 0.0)
            self.clock.resume(line["resumed"], at - (reading.step - line["resumed"]) * step_s)
        else:
            step_s = (at - self.newest["time"]) / (reading.step - self.newest["step"])
        sums = self.clock.add(reading.step, at, step_s, 0.0)
        line |= {"step_s": step_s, **sums}
        rounded = {k: float(f"{v:.9g}") if isinstance(v, float) else v for k, v in line.items() if v is not None}
        self.newest = rounded | {"time": at}
        return self.newest
