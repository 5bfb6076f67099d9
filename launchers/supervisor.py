"""A process of an attempt that is started again when it dies. No torch."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fsdp_jobs.run.processes import die_with_parent
from fsdp_jobs.run.tail import last_lines
from fsdp_jobs.run.verdict import Verdict

_TIMES = 3  # that a process may die young, one after the other


class Restarted:
    """A process with a log. Whoever watches it starts it again, as long as it does not die young each time."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, env: Mapping[str, str], young_s: float):
        """`env` is all of its environment; `young_s`: so many seconds after its start it is no longer young."""
        self.name, self.argv, self.log, self.env, self.young_s = name, list(argv), log, env, young_s
        self.died_young = 0
        self.start()

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                self.argv,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self.born = time.monotonic()

    def note_death(self) -> bool:
        """Count a death; False when it is not worth starting again."""
        young = time.monotonic() - self.born < self.young_s
        self.died_young = self.died_young + 1 if young else 0
        return self.died_young < _TIMES

    def given_up(self) -> Verdict:
        """The verdict on an attempt that cannot do without it."""
        reason = f"{self.name} died three times within {self.young_s:.0f} s of its start"
        return Verdict("infrastructure", "stop", reason, last_lines=last_lines(self.log, 15))
