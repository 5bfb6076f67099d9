"""Find steps and losses in lines that programs print. No torch.

Without a setting it recognizes lines with a step and a loss, as torchtitan, lingua, nanoGPT and most scripts print
them; lines with an epoch, its steps and a loss, as timm's and Lightning's bar; the bar of diffusers; and transformers'
Trainer, which shows its steps only in its progress bar.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fsdp_jobs.run.failure import CONTROL

_HIGHEST = 1 << 53  # steps are lower
# Not `2,31` or `1,234`, which may be either, nor the beginning of `12ms` or of `information`.
_NUMBER = r"(?:[-+]?(?:\d{1,3}(?:,\d{3})+\.\d++|\d++(?!,\d)(?:\.\d*+)?+(?:e[-+]?\d++)?+|inf(?:inity)?)|nan)(?![\w%])"
_BEFORE_LOSS = r"(?:(?!loss).)*?"
_BEFORE_STEPS = r"(?:(?!\b(?:step|iter|batch|epoch|loss)).)*?"
_EVALUATING = "val eval test valid validate validation evaluate evaluation dev h[eo]ldout h[eo]ld.out"
_NO_TRAINING = "".join(f"(?<!{word}[ .-])" for word in _EVALUATING.split())
_EVALUATES = r"""(?:
    val|eval|valid|validat\w+|evaluat\w+|testing|inference|h[eo]ld[-_ ]?out  # `test` may be a program's own name
    |cv(?=[ ](?:batch|\|[ ](?:epoch|step)))  # WeNet's, no fold of a cross-validation
)\b"""
_FIELD_END = r"(?:\s*+[])|]|\s+-\s|:\s*+(?![-+\d\s]|n/?a)|\s(?:set|split)\b|\s(?:avg|mean|total)[ _]loss\b)"
_WENET = r"(?<=debug[ ])train(?:[ ]\|[ ]steps/sec[ ][\d.]+\|)?[ ]batch[ ]"  # epoch/step


def _pattern(text: str) -> re.Pattern[str]:
    """Compile a pattern in which `[ ]` is a blank; other blanks, and comments behind `#`, are ignored."""
    return re.compile(text, re.IGNORECASE | re.VERBOSE)


_EVALUATION = _pattern(rf"""
    ^(?=.*(?:val(?!_)|test|inference|h[eo]ld|cv))(?:  # most lines have none of them
        # At the beginning of a line or of its message, before any step,
        {_BEFORE_STEPS}(?:^\W*|(?:[\[\]:|>]|[ ]-[ ]|[ ](?:INFO|DEBUG)[ ])\s*+){_EVALUATES}(?![-=/.])
        # as a word by itself before the loss,
        |{_BEFORE_LOSS}(?<![\w/.-]){_EVALUATES}{_FIELD_END}
        # or as `test`, if it is a field behind a step, or begins a message as a title,
        |(?:(?!loss|step|iter|batch|epoch).)*?
        (?:(?:step|iter|batch|epoch){_BEFORE_LOSS}[\[(|]|(?:^|[\[(|])(?=\s*+(?-i:T)))\s*+test{_FIELD_END}
        # or as JSON's object or truth,
        |{_BEFORE_LOSS}\b{_EVALUATES}['"]?\s*+[:=]\s*+(?:\{{|true)
        # or as the part of the data that a key names, anywhere.
        |.*\b(?:split|mode|phase|stage|subset|type|event)['"]?\s*+[:=]\s*+['"]?(?:{_EVALUATES}|test\b)
    )
""")
_RESTORED = _pattern(rf"""
    # Step and loss of the checkpoint with which a program begins, maybe those of another training.
    ^(?=.*(?:load|resum|restor))(?!.*%\|){_BEFORE_STEPS}
    \b(?:loaded|resum(?:ed|ing)|restor(?:ed|ing)|loading[ ](?:checkpoint|model|weights))\b(?!\s*+[])=]|\W*\d)
""")
_LOSS = _pattern(rf"""
    (?<![\w/])(?=[almrst]){_NO_TRAINING}
    (?<!aux[ ])(?<!balance[ ])(?<!best[ ])(?<!z-)  # parts of a loss that has several
    (?:(?:train(?:ing)?|step|total|avg|avr|mean|running|lm|reduced_train)[_ /-])?
    (?:crossentropy)?loss(?:_step|[ ]train|(?:/(?!val|eval|test)\w++)++(?!/))?
    ['"]?\s*+[:=]?\s*+['"]?(?:(?:tensor|array|[\w.]*float\d+)\()?
    (?!0(?![.\d'"]))(?P<loss>{_NUMBER})  # 0 is a sum that has not begun
""")
_STEP = _pattern(rf"""
    \b(?=[begins-t\d]){_NO_TRAINING}  # first letters, checked before the slower look-behinds
    (?<!micro[ -])(?<!accumulation[ ])(?<!warmup[ -])(?<!s/)  # `s/step 3`
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
        (?:s(?!=\d+[,) ]|.*\b(?:step|iter)['"]?\s*+[:=]?\s*+\d))?  # not of `steps=9,` or `steps 9 | step 1`
        ['"]?\s*+[:=#]?\s*+['"\[]?
    )
    (?:\d+%\|.*\|\s*+)?  # a bar
    (?P<step>\d[\d,]*)(?![\d.]*(?!batch:)[\w%])(?:\s*+(?:/|of)\s*+(?P<steps>\d[\d,]*))?
""")
_WORD_END = re.compile(r"[^\W\d][ /:-]")  # `max steps 9` and `train.py:step:9` are no step if there is another
_RANK = _pattern(r"(?:^|[\[(|])\s*+rank[ :=]*(\d+)\s*+[\])|:]")
_PART = _pattern(r"loss/(?!train|total)")
_VALIDATION = _pattern(rf"(?<![^\W_])(?:{'|'.join(_EVALUATING.split())})(?![^\W_])")
_WORDS = ("loss", "step", "iter", "epoch", "[batch", "%|")  # a line with none of them shows nothing
_BAR = _pattern(r"""
    ^\s*+(?:(?:(?:(?:train(?:ing)?[ ])?loss[^\w.]+[\d.]++|train(?:ing)?):?[ ]+)?(?:\d+%)?\|.*\|[ ]+)?
    (?P<step>[1-9]\d*)/(?:(?P<steps>\d+)|\?)[ ][\[━]  # without an end: Lightning's, in the epoch in which it resumed
""")
_EPOCH = _pattern(rf"""
    \b(?:epoch['"]?\s*+[:=]?\s*+\[?|{_WENET}|info:[ ](?=\d+epoch:)|(?=\d+,[ ]+\d+\][ ]loss))(?P<epoch>\d+)(?!\.?\d)
""")
_EPOCH_TITLE = _pattern(r"""  # a line or a message of its own: the epoch of the steps below, if it is not the only one
    (?:^\W*|[\]:|>][ ]?|[ ]-[ ]|[ ]INFO[ ])(?:(?:training|start\w*|begin\w*)[ ])*
    epoch\W*(?P<epoch>\d+)(?:[^\w/]*+(?:/|of)\W*+(?!1\b)\d+)?(?:[ ](?:start|begin)\w*)?\W*$
""")
_OF_EPOCH = _pattern(rf"""
    \b(?=[et]){_NO_TRAINING}(?:epoch(?::[ ]\[|\(train\)[ ]+\[|[ ]+\[?)|train:[ ]\[?)
    (?P<epoch>\d++)(?!%)(?:/\d+)?[\]:\s]*+(?:[\[(]?train(?:ing)?[\])]?:\s*+)?
    (?:\W*(?:train(?:ing)?[ ])?(?>loss\W+?[\d.]).*?:\s*+(?=\d+%\|))?  # in the name of a bar
    (?:
        \d+%\|.*\|(?!\s*+0/)  # a bar
        |\|[^|]*\|(?=\s*+[1-9]\d*/\?)|(?=[1-9]\d*it[ ]\[)  # bars without an end
        |[\[|]  # not `Train Epoch: 1 [640/60000 (1%)]`, which are samples
    )
    \s*+(?P<step>\d+)(?:/\s*+(?:(?P<steps>\d+)|\?)|it[ ]\[)
""")


@dataclass(frozen=True)
class Reading:
    """Step and loss in a line."""

    step: int
    steps: int | None = None  # the total; beside an epoch, the epoch's last
    loss: float | None = None
    epoch: int | None = None  # -1: that in which the program began or resumed, -2: the next


class Reader:
    """Finds steps and losses in lines."""

    def __init__(self, pattern: str | None):
        """`pattern`: `program.metrics`, which replaces the known formats."""
        self._pattern = re.compile(pattern) if pattern is not None else None
        self._loss: dict[str, str | None] = {}  # printed by the Trainer; its progress bar shows the step next
        self._step: dict[str, str | None] = {}  # of the line above, or above the indented ones; its loss may follow
        self._is_heading = False  # whether that line has nothing else, so that its loss need not be indented
        self._broken = ""  # the line above, if Rich broke it before its loss
        self._epoch: dict[str, str | None] = {}  # of the last title
        self._bars: dict[str | None, int] = {}  # last -> newest step of progress bars without a name
        self._last: str | None = None  # of the first such bar with a loss
        self._bar_epoch = -1  # that bar's
        self._rank = math.inf  # the lowest that lines name: a program that starts its ranks itself has one log for all
        self._evaluated: tuple[int | None, int] | None = None  # epoch and step of the last line with a validation
        self._is_shown_again = False  # whether another line has shown that step, too, as nanoGPT's `iter`

    def read(self, line: str) -> Reading | None:
        """Parse a line; None if it shows no step."""
        broken, self._broken = self._broken, line.rstrip() if line.rstrip().endswith("Loss:") else ""
        if line[:1].isspace():
            line = broken + line
        if self._pattern is None and not any(map(line.lower().__contains__, _WORDS)):  # patterns take ten times as long
            is_title = line.rstrip().endswith((":", "{")) and _VALIDATION.search(line)
            self._step = self._step if line[:1].isspace() and not is_title else {}
            return None
        with suppress(ValueError):  # thousands of digits, or a user's pattern matches something else than a number
            line = CONTROL.sub("", line)
            if self._pattern is not None:
                return _reading(_groups(self._pattern, line))
            if (reading := self._read(line)) is None:
                return None
            if of_rank := _RANK.search(line):
                self._rank = min(self._rank, rank := int(of_rank[1]))
                if rank > self._rank:
                    return None
            return None if self._is_evaluation(reading, line) else reading
        return None

    def _is_evaluation(self, reading: Reading, line: str) -> bool:
        """Whether a line has a validation beside its loss, and the step of the last such line was shown once more."""
        at = reading.epoch, reading.step
        if not _VALIDATION.search(line):
            self._is_shown_again |= at == self._evaluated
            return False
        was_shown_again, self._evaluated, self._is_shown_again = self._is_shown_again, at, False
        return was_shown_again

    def _read(self, line: str) -> Reading | None:
        if title := _groups(_EPOCH_TITLE, line):
            self._epoch, self._step, self._loss = title, {}, {}
            return None
        loss, is_indented = _plain(_LOSS, line), line[:1].isspace()
        if _EVALUATION.search(line) or _RESTORED.search(line):
            self._step = self._step if is_indented else {}
            return None
        if (of_epoch := _groups(_OF_EPOCH, line)) and (loss or "%|" in line):
            of_epoch["steps"] = of_epoch["steps"] or of_epoch["step"]  # a bar without an end
            return _reading(of_epoch | loss)
        if bar := _groups(_BAR, line):
            at, reached = int(bar["step"] or 0), self._bars.get(bar["steps"], 0)
            told = self._loss if at >= reached else {}  # one that begins anew is an epoch's, not the Trainer's
            self._bars[bar["steps"]], self._loss = at, {}
            if loss and not told and not self._epoch and line.rstrip().endswith("]"):
                self._last = self._last or bar["steps"]
                if bar["steps"] != self._last:  # maybe an evaluation's
                    return None
                self._bar_epoch -= at < reached
                bar["epoch"] = str(self._bar_epoch)
            if told := told or (loss if "epoch" in self._epoch | bar else {}):
                return _reading(self._epoch | bar | told)
        if "'train_runtime'" in line:
            loss = {"loss": None}  # it is a mean over the run
        if step := _plain(_STEP, line, or_first=bool(loss)):
            step = self._epoch | step | _groups(_EPOCH, line)
        if line.lstrip().startswith("{"):
            self._loss = {} if step else loss
        if loss:
            before, self._step = self._step if is_indented or self._is_heading else {}, {}
            return _reading((step or before) | loss)
        if not (is_indented and self._step):
            self._step, self._is_heading = step, bool(_STEP.fullmatch(line.strip()))
        return None


def _groups(pattern: re.Pattern[str], line: str) -> dict[str, str | None]:
    """Return what the groups of a pattern have found; without names they are the step and the loss."""
    found = pattern.search(line)
    return found.groupdict() or dict(zip(("step", "loss"), found.groups(), strict=False)) if found else {}


def _plain(pattern: re.Pattern[str], line: str, or_first: bool = True) -> dict[str, str | None]:
    """Return the groups of the first match behind no word (2 in `kl loss 1 | loss 2`), or else of the first match.

    Of a loss that has only parts (`kl loss 1 | policy loss 2`) none is taken.
    """
    parts = []
    for found in pattern.finditer(line):
        if not _WORD_END.match(line, max(found.start() - 2, 0), found.start()) and not _PART.search(found[0]):
            return found.groupdict()
        parts.append(found.groupdict())
    if pattern is _LOSS and len(parts) > 1:
        return {"loss": None}
    return parts[0] if parts and or_first else {}


def _reading(groups: dict[str, str | None]) -> Reading | None:
    numbers: dict[str, Any] = {
        name: (float if name == "loss" else int)(text.replace(",", "")) for name, text in groups.items() if text
    }
    if numbers.get("steps", 0) < numbers.get("step", 0):
        numbers.pop("steps", None)  # an epoch's, while the step counts over all
    is_step = max(numbers.get("step", _HIGHEST), numbers.get("steps", 0)) < _HIGHEST
    return Reading(**numbers) if is_step else None
