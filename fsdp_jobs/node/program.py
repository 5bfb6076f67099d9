"""The program that ranks run: the user's own, or the built-in trainer. No torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import digest_of, exists
from fsdp_jobs.run.leaves import modules_in
from fsdp_jobs.run.messages import Round
from fsdp_jobs.run.record import Record

TRAINER = "fsdp_jobs.train"  # the module that ranks run when the job names no program
_IMPORTED = re.compile(r"^[ \t]*(?:from|import)[ \t]+(torch\.distributed[\w.]*|fsdp_jobs\b)", re.MULTILINE)


@dataclass(frozen=True)
class Program(Record):
    """What ranks run."""

    what: str  # path of a file, or dotted name of a module
    is_module: bool
    folder: str  # first on its import path
    args: list[str]

    @classmethod
    def of(cls, config: JobConfig, run: RunDir) -> Program:
        """Return the program of a job, from the run directory's copy of the code if the program is in it."""
        code = run.code.absolute()
        args = shlex.split(config.script_args)
        if config.script is None:
            return cls(config.module or TRAINER, True, str(code if exists(code) else Path.cwd()), args)
        copied = code / config.script
        file = copied if exists(copied) else Path(config.script).absolute()
        return cls(str(file), False, str((file.resolve() if file.is_symlink() else file).parent), args)

    @property
    def is_python(self) -> bool:
        """Whether a fork of a process that has imported torch can run it."""
        return self.is_module or self.what.endswith(".py")

    @property
    def preload(self) -> list[str]:
        """Modules to import before the fork: those of torch.distributed and this library that the program imports."""
        if self.what == TRAINER:
            return [f"{TRAINER}.trainer", *modules_in("rank")]
        place = Path(self.folder, *self.what.split("."))
        files = [place.with_suffix(".py"), place / "__main__.py"] if self.is_module else [Path(self.what)]
        text = ""
        with suppress(OSError):  # the ranks will report a file that cannot be read
            text = next((file.read_text(errors="replace") for file in files if file.is_file()), "")
        found: list[str] = _IMPORTED.findall(text)
        library = ["fsdp_jobs.job", *modules_in("rank")] if "fsdp_jobs" in found else []
        return found + library


def watch_edits(script: str, run: RunDir, attempt: int) -> Callable[[Round], None]:
    """Return a function that records at the start of a round if the script was edited since its job was submitted."""
    known = run.read_job().get("script_sha256")  # None: the file could not be read at submission

    def begin_round(round_: Round) -> None:
        nonlocal known
        now = digest_of(script) if round_.rank == 0 and known else None
        if now is not None and now != known:
            events.record(run, attempt, events.CodeChanged(script))
            known = now

    return begin_round
