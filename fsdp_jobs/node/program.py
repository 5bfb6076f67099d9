"""The program that ranks run: the user's own, or the built-in trainer. No torch."""

from __future__ import annotations

import os
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir, digest_of
from fsdp_jobs.run.env import PROGRAM_ENV
from fsdp_jobs.run.leaves import modules_in
from fsdp_jobs.run.record import Record

TRAINER = "fsdp_jobs.train"  # the module that ranks run when the job names no program
_IMPORTED = re.compile(r"^[ \t]*(?:from|import)[ \t]+(torch\.distributed[\w.]*|fsdp_jobs\b)", re.MULTILINE)


@dataclass(frozen=True)
class Program(Record):
    """What ranks run."""

    what: str  # path of a file, or dotted name of a module
    is_module: bool
    folder: str  # where its imports are looked for first
    args: list[str]

    @classmethod
    def of(cls, config: JobConfig, run: RunDir) -> Program:
        """Return the program of a job, from the copy of the code in the run directory where it is in there."""
        code = run.code.absolute()
        args = shlex.split(config.script_args)
        if config.script is None:
            return cls(config.module or TRAINER, True, str(code if code.is_dir() else Path.cwd()), args)
        copied = code / config.script
        file = copied if copied.exists() and not Path(config.script).is_absolute() else Path(config.script).absolute()
        return cls(str(file), False, str(file.parent), args)

    @property
    def is_python(self) -> bool:
        """Whether it can be run in a process forked from one that has imported torch."""
        return self.is_module or self.what.endswith(".py")

    @property
    def preload(self) -> list[str]:
        """What such a process has imported before: of torch.distributed and this library, what the program names."""
        if self.what == TRAINER:
            return [f"{TRAINER}.trainer", *modules_in("rank")]
        place = Path(self.folder, *self.what.split("."))
        files = [place.with_suffix(".py"), place / "__main__.py"] if self.is_module else [Path(self.what)]
        text = ""
        with suppress(OSError):  # what cannot be read here, its ranks will tell of
            text = next((file.read_text(errors="replace") for file in files if file.is_file()), "")
        found: list[str] = _IMPORTED.findall(text)
        library = ["fsdp_jobs.job", *modules_in("rank")] if "fsdp_jobs" in found else []
        return [*(name for name in found if name != "fsdp_jobs"), *library]

    def to_environment(self) -> None:
        """Hand it on to the ranks that this process starts."""
        os.environ[PROGRAM_ENV] = self.to_json()

    @classmethod
    def from_environment(cls) -> Program:
        """Take what the agent has handed on."""
        return cls.from_json(os.environ.pop(PROGRAM_ENV))


class Edits:
    """Tells, at the beginning of a round, that a script was edited since its job was submitted."""

    def __init__(self, script: str, run: RunDir, attempt: int):
        self._script, self._run, self._attempt = script, run, attempt
        self._known = run.read_job().get("script_sha256")  # None: the file could not be read at submission

    def begin_round(self, has_rank_0: bool) -> None:
        now = digest_of(self._script) if has_rank_0 and self._known else None
        if now is not None and now != self._known:
            events.record(self._run, self._attempt, events.CodeChanged(self._script))
            self._known = now

    def close(self) -> None:
        """Nothing to end."""
