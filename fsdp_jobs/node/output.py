"""In the agent: read steps and losses that the user's program prints, if it does not report them. No torch.

Without a setting it recognizes lines with a step and a loss, as torchtitan, lingua, nanoGPT and most scripts print
them; lines with an epoch, its steps and a loss, as timm's and Lightning's bar; the bar of diffusers; and transformers'
Trainer, which shows its steps only in its progress bar.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.events import append_line
from fsdp_jobs.run.failure import CONTROL
from fsdp_jobs.run.goodput import StepClock
from fsdp_jobs.run.messages import Round
from fsdp_jobs.run.rank_state import RankState
from fsdp_jobs.run.tail import newest_json_lines, size_of
from fsdp_jobs.run.term import job_time
from fsdp_jobs.run.threads import start_thread

_EVERY_S = 0.5  # between two reads of the log
_MOST = 1 << 20  # bytes read at once
_HIGHEST = 1 << 53  # steps are lower
_LONGEST_LINE = 1 << 12  # bytes of a line that are parsed
_NUMBER = r"[-+]?\d{1,3}(?:,\d{3})+\.\d+|[-+]?\d+\.?\d*(?:e[-+]?\d+)?|[-+]?inf|nan"
_BEFORE_LOSS = r"(?:(?!loss).)*?"
_BEFORE_STEPS = r"(?:(?!\b(?:step|iter|batch|epoch|loss)).)*?"
_EVALUATING = "val eval test valid validate validation evaluate evaluation dev h[eo]ldout h[eo]ld.out"
_NO_TRAINING = "".join(f"(?<!{word}[ .-])" for word in _EVALUATING.split())
_EVALUATES = r"""(?:
    val|eval|valid|validat\w+|evaluat\w+|testing|inference|h[eo]ld[-_ ]?out  # `test` may be a program's own name
    |cv(?=[ ](?:batch|\|[ ](?:epoch|step)))  # WeNet's, no fold of a cross-validation
)\b"""
_FIELD_END = r"(?:\s*[])|]|\s+-\s|:\s*(?![-+\d\s]|n/?a)|\s(?:set|split)\b|\s(?:avg|mean|total)[ _]loss\b)"
_WENET = r"(?<=debug[ ])train(?:[ ]\|[ ]steps/sec[ ][\d.]+\|)?[ ]batch[ ]"  # epoch/step


def _pattern(text: str) -> re.Pattern[str]:
    """Compile a pattern in which `[ ]` is a blank; other blanks, and comments behind `#`, are ignored."""
    return re.compile(text, re.IGNORECASE | re.VERBOSE)


_EVALUATION = _pattern(rf"""
    ^(?=.*(?:val(?!_)|test|inference|h[eo]ld|cv))(?:  # most lines have none of them
        # At the beginning of a line or of its message, before any step,
        {_BEFORE_STEPS}(?:^\W*|(?:[\[\]:|>]|[ ]-[ ]|[ ](?:INFO|DEBUG)[ ])\s*){_EVALUATES}(?![-=/.])
        # as a word by itself before the loss,
        |{_BEFORE_LOSS}(?<![\w/.-]){_EVALUATES}{_FIELD_END}
        # or as `test`, if it is a field behind a step, or begins a message as a title,
        |(?:(?!loss|step|iter|batch|epoch).)*?
        (?:(?:step|iter|batch|epoch){_BEFORE_LOSS}[\[(|]|(?:^|[\[(|])(?=\s*(?-i:T)))\s*test{_FIELD_END}
        # or as JSON's object or truth,
        |{_BEFORE_LOSS}\b{_EVALUATES}['"]?\s*[:=]\s*(?:\{{|true)
        # or as the part of the data that a key names, anywhere.
        |.*\b(?:split|mode|phase|stage|subset|type|event)['"]?\s*[:=]\s*['"]?(?:{_EVALUATES}|test\b)
    )
""")
_RESTORED = _pattern(rf"""
    # Step and loss of the checkpoint with which a program begins, maybe those of another training.
    ^(?=.*(?:load|resum|restor))(?!.*%\|){_BEFORE_STEPS}
    \b(?:loaded|resum(?:ed|ing)|restor(?:ed|ing)|loading[ ](?:checkpoint|model|weights))\b(?!\s*[])=]|\W*\d)
""")
_LOSS = _pattern(rf"""
    (?<![\w/])(?=[almrst]){_NO_TRAINING}
    (?<!aux[ ])(?<!balance[ ])(?<!best[ ])(?<!z-)  # parts of a loss that has several
    (?:(?:train(?:ing)?|step|total|avg|avr|mean|running|lm|reduced_train)[_ /])?
    (?:crossentropy)?loss(?:_step|[ ]train|(?:/(?!val|eval|test)\w+)+(?!/))?
    ['"]?\s*[:=]?\s*['"]?(?:tensor\()?
    (?!0(?![.\d'"]))(?P<loss>{_NUMBER})  # 0 is a sum that has not begun
""")
_STEP = _pattern(rf"""
    \b(?=[begins-t\d]){_NO_TRAINING}  # first letters, checked before the slower look-behinds
    (?<!micro[ -])(?<!accumulation[ ])(?<!warmup[ -])
    (?:
        training[ ]+\[[ ]*(?=\d+/\d+\][ ]+eta)  # DINOv2
        |iter\(train\)[ ]+\[[ ]*  # MMEngine
        |(?<!\|)\d+(?:\||,[ ]+)(?=\d+(?:\||\][ ])loss)  # torchtune, PyTorch's first tutorial
        |{_WENET}\d+/
        |train:\d+-(?=\d+batch:)  # ESPnet
        |(?:
            global[_ ]?step(?:/max_steps)?|step|iter(?:ation)?|num_update
            |(?<=\[)batch|batch(?=\W+\d+/\d)|epoch\W+\d+(?:/\d+)?\W+batch(?!.*\b(?:step|iter))
        )
        (?:s(?!.*\b(?:step|iter)['"]?\s*[:=]?\s*\d))?  # not of `steps 9 | step 1`
        ['"]?\s*[:=#]?\s*['"\[]?
    )
    (?:\d+%\|.*\|\s*)?  # a bar
    (?P<step>\d[\d,]*)(?![\d.]*(?!batch:)[\w%])(?:\s*(?:/|of)\s*(?P<steps>\d[\d,]*))?
""")
_WORD_END = re.compile(r"[^\W\d][ /-]")  # `max steps 9` and `ms/step 9` are no step if there is another
_HEADING = re.compile(r"\[(?:step|batch)=[^]]*\]:?$")  # the indented lines below it belong to its step
_WORDS = ("loss", "step", "iter", "epoch", "[batch", "%|")  # a line with none of them shows nothing
_BAR = _pattern(r"^\s*(?:(?:train(?:ing)?:?[ ]+)?\d+%\|.*\|[ ]+)?(?P<step>[1-9]\d*)/(?P<steps>\d+)[ ][\[━]")
_EPOCH = _pattern(rf"""
    \b(?:epoch['"]?\s*[:=]?\s*\[?|{_WENET}|info:[ ](?=\d+epoch:)|(?=\d+,[ ]+\d+\][ ]loss))(?P<epoch>\d+)(?!\.?\d)
""")
_EPOCH_TITLE = _pattern(r"""  # a line or a message of its own: the epoch of the steps below, if it is not the only one
    (?:^\W*|[\]:|>][ ]?|[ ]-[ ]|[ ]INFO[ ])(?:(?:training|start|starting)[ ])?
    epoch\W*(?P<epoch>\d+)(?:\W*(?:/|of)\W*(?!1\b)\d+)?\W*$
""")
_OF_EPOCH = _pattern(rf"""
    \b(?=[et]){_NO_TRAINING}(?:epoch(?::[ ]\[|\(train\)[ ]+\[|[ ]+\[?)|train:[ ]\[?)
    (?P<epoch>\d+)(?!\d*%)(?:/\d+)?[\]:\s]*(?:[\[(]?train(?:ing)?[\])]?:\s*)?
    (?:\W*(?:train(?:ing)?[ ])?loss\W+[\d.].*?:\s*(?=\d+%\|))?  # in the name of a bar
    (?:
        \d+%\|.*\|(?!\s*0/)  # a bar
        |\|[^|]*\|(?=\s*[1-9]\d*/\?)|(?=[1-9]\d*it[ ]\[)  # bars without an end
        |[\[|]  # not `Train Epoch: 1 [640/60000 (1%)]`, which are samples
    )
    \s*(?P<step>\d+)(?:/\s*(?:(?P<steps>\d+)|\?)|it[ ]\[)
""")
_RESUMED = re.compile(r"^Training: \|.*\| (?P<step>[1-9]\d*)/\? \[")  # Lightning's bar up to the end of the epoch


@dataclass(frozen=True)
class Reading:
    """Step and loss in a line."""

    step: int
    steps: int | None = None  # the total; beside an epoch, the epoch's last
    loss: float | None = None
    epoch: int | None = None  # -1: that in which the program has resumed


class Reader:
    """Finds steps and losses in lines."""

    def __init__(self, pattern: str | None):
        """`pattern`: `program.metrics`, which replaces the known formats."""
        self._pattern = re.compile(pattern) if pattern is not None else None
        self._loss: dict[str, str | None] = {}  # printed by the Trainer; its progress bar shows the step next
        self._step: dict[str, str | None] = {}  # all of the last line, or of a heading; its loss may follow
        self._epoch: dict[str, str | None] = {}  # of the last title

    def read(self, line: str) -> Reading | None:
        """Parse a line; None if it shows no step."""
        if self._pattern is None and not any(map(line.lower().__contains__, _WORDS)):  # patterns take ten times as long
            self._step = self._step if line[:1].isspace() else {}
            return None
        with suppress(ValueError):  # thousands of digits, or a user's pattern matches something else than a number
            return self._read(CONTROL.sub("", line))
        return None

    def _read(self, line: str) -> Reading | None:
        if self._pattern is not None:
            return _reading(_groups(self._pattern, line))
        if title := _groups(_EPOCH_TITLE, line):
            self._epoch, self._step = title, {}
            return None
        loss = _plain(_LOSS, line)
        if loss and (_EVALUATION.search(line) or _RESTORED.search(line)):
            return None
        if (of_epoch := _groups(_OF_EPOCH, line)) and (loss or "%|" in line):
            of_epoch["steps"] = of_epoch["steps"] or of_epoch["step"]  # a bar without an end
            return _reading(of_epoch | loss)
        if loss and (resumed := _groups(_RESUMED, line)):
            return _reading(resumed | loss | {"epoch": "-1"})
        if (told := self._loss or (loss if self._epoch else {})) and (bar := _groups(_BAR, line)):
            self._loss = {}
            return _reading(self._epoch | bar | told)
        if "'train_runtime'" in line:
            loss = {"loss": None}  # it is a mean over the run
        is_heading = _STEP.fullmatch(line.strip()) or _HEADING.search(line.rstrip())
        step = _plain(_STEP, line) if loss or is_heading else {}
        if step:
            step = self._epoch | step | _groups(_EPOCH, line)
        if line.lstrip().startswith("{"):
            self._loss = {} if step else loss
        before = self._step
        if is_heading:
            self._step = step
        elif not line[:1].isspace():
            self._step = {}
        return _reading((step or before) | loss) if loss else None


def _groups(pattern: re.Pattern[str], line: str) -> dict[str, str | None]:
    """Return what the groups of a pattern have found; without names they are the step and the loss."""
    found = pattern.search(line)
    return found.groupdict() or dict(zip(("step", "loss"), found.groups(), strict=False)) if found else {}


def _plain(pattern: re.Pattern[str], line: str) -> dict[str, str | None]:
    """Return the groups of the first match behind no word (2 in `kl loss 1 | loss 2`), or else of the first match."""
    first = found = pattern.search(line)
    while found and _WORD_END.match(line, max(found.start() - 2, 0), found.start()):
        found = pattern.search(line, found.end())
    return (found or first).groupdict() if first else {}


def _reading(groups: dict[str, str | None]) -> Reading | None:
    numbers: dict[str, Any] = {
        name: (float if name == "loss" else int)(text.replace(",", "")) for name, text in groups.items() if text
    }
    if numbers.get("steps", 0) < numbers.get("step", 0):
        numbers.pop("steps", None)  # an epoch's, while the step counts over all
    is_step = max(numbers.get("step", _HIGHEST), numbers.get("steps", 0)) < _HIGHEST
    return Reading(**numbers) if is_step else None


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
                _Followed(self._run, log, Reader(self._pattern), StepClock(self._run), size_of(log), job_time())
                for log in logs
            ]

    def settle(self) -> None:
        """Record the rest of what was printed."""
        with self._lock:
            self._look(is_end=True)

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_EVERY_S):
            with self._lock:
                self._look()
        self.settle()

    def _look(self, is_end: bool = False) -> None:
        if any(state.read().step >= 0 for state in self._states):
            self._followed = []  # for the whole round: the ranks' states are cleared when they end
        for followed in self._followed:
            with suppress(OSError):  # no log yet, or no disk; the next call tries again
                now = job_time()
                # A killed rank's lines are older than now.
                end = min(now, followed.log.stat().st_mtime + now - time.time())
                start = followed.newest.get("time", end - (now - followed.looked_at))
                readings = list(followed.new(is_end))
                followed.looked_at = now
                for i, reading in enumerate(readings, 1):  # spread evenly since the last one, or the last read
                    line = followed.line(reading, start + max(0.0, end - start) * i / len(readings))
                    append_line(self._run.metrics, line | {"attempt": self._attempt})
                if readings:
                    self._followed = [followed]
                    return


@dataclass
class _Followed:
    """State of a round, as read from a rank's output."""

    run: RunDir
    log: Path
    reader: Reader
    clock: StepClock
    offset: int  # bytes of the log already read
    looked_at: float  # seconds since 1970
    newest: dict[str, Any] = field(default_factory=dict)  # line of metrics.jsonl in this round
    epoch: int | None = None  # of the newest line that has one, and over all epochs its step and its epoch's end
    step: int = -1
    end: int = 0
    before: int = 0  # steps of the epochs before, if each begins with the first step
    is_over_all: bool = False  # whether the program counts steps, and their total, over all epochs

    def new(self, is_end: bool) -> Iterator[Reading]:
        """Yield later steps in new lines, including an unfinished last line at the end of the log."""
        reached = self.newest.get("step", -1)
        for line in self._lines(is_end):
            reading = self.reader.read(line[:_LONGEST_LINE].decode(errors="replace"))
            if reading is not None and (counted := self._over_epochs(reading)).step > reached:
                reached = counted.step
                yield counted

    def _over_epochs(self, reading: Reading) -> Reading:
        """Return a reading whose step counts over all epochs, even if the program counts from the start of each.

        It does if a step is not higher than the last of an earlier epoch, or if an earlier round recorded this epoch:
        steps of programs that count over all epochs are recorded without one. An epoch of unknown length ends with the
        last step printed.
        """
        if (epoch := reading.epoch) is None:
            return reading
        if epoch < 0:  # the program resumed in it: it is not later than those recorded
            newest = next(newest_json_lines(self.run.metrics), {})
            if newest.get("epoch") != 0:
                return replace(reading, step=-1)
            epoch = 0
            reading = replace(reading, epoch=0, steps=newest.get("epoch_end"))
        is_recorded = False
        if self.epoch is None:
            lines = (line for line in newest_json_lines(self.run.metrics) if line.get("epoch", epoch + 1) <= epoch)
            last = next(lines, {})
            while last.get("epoch") == epoch:
                is_recorded = True
                last = next(lines, {})
            self.epoch, self.step, self.end = last.get("epoch"), last.get("step", -1), last.get("epoch_end", 0)
        if epoch != self.epoch:
            begins_anew = is_recorded or reading.step <= self.step
            self.before = self.end if begins_anew else 0
            self.is_over_all = not begins_anew and self.epoch is not None
        elif self.before + reading.step <= self.step:
            return replace(reading, step=-1)  # maybe of an evaluation
        self.epoch, self.step = epoch, self.before + reading.step
        self.end = self.before + reading.steps if reading.steps else self.step + 1
        return replace(reading, epoch=None) if self.is_over_all else replace(reading, step=self.step, steps=self.end)

    def _lines(self, is_end: bool) -> Iterator[bytes]:
        """Yield up to 1 MiB of new lines, all at the end. A progress bar ends its line only when it prints the next."""
        with self.log.open("rb") as f:
            if f.seek(0, os.SEEK_END) < self.offset:  # the log was truncated
                self.offset = 0
            f.seek(self.offset)
            while piece := f.read(_MOST):
                *whole, rest = re.split(rb"[\r\n]", piece)
                self.offset += len(piece) - len(rest) or len(rest) // _MOST * _MOST  # an endless line
                is_last = len(piece) < _MOST
                yield from whole
                if rest.endswith(b"]") or (is_end and is_last):
                    yield rest
                if is_last or not is_end:
                    return
                f.seek(self.offset)

    def line(self, reading: Reading, at: float) -> dict[str, Any]:
        """Return the line of `metrics.jsonl` for a reading."""
        line: dict[str, Any] = {"step": reading.step, "loss": reading.loss, "epoch": reading.epoch}
        line["steps" if reading.epoch is None else "epoch_end"] = reading.steps
        if not self.newest:
            last, before = [*islice(newest_json_lines(self.run.metrics), 2), {}, {}][:2]
            between = last.get("step", 0) - before.get("step", 0)
            line["resumed"] = max(0, min(reading.step - 1, self.before), reading.step - max(1, between))
            step_s = last.get("step_s", 0.0)
            self.clock.resume(line["resumed"], at - (reading.step - line["resumed"]) * step_s)
        else:
            step_s = (at - self.newest["time"]) / (reading.step - self.newest["step"])
        sums = self.clock.add(reading.step, at, step_s, 0.0)
        line |= {"step_s": step_s, **sums}
        rounded = {k: round(v, 6) if isinstance(v, float) else v for k, v in line.items() if v is not None}
        self.newest = rounded | {"time": at}
        return self.newest
