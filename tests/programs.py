"""Two programs of examples/, one with the library and one without, as every cluster runs them: killed, and done."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.jobs import ROOT, Watched

EXAMPLES = ROOT / "examples"
EVERY = 10  # steps between their saves
LIBRARY, PLAIN = "small_library.py", "plain_torchrun.py"


def copied(folder: Path) -> None:
    """Put both programs where a user has them: into the folder that jobs are submitted from."""
    for name in (LIBRARY, PLAIN):
        shutil.copy(EXAMPLES / name, folder)


def library(steps: int, where: str = "") -> tuple[str, ...]:
    """Overrides of a job that runs the program with the library."""
    return (f"script={where}{LIBRARY}", f"script_args=--steps={steps}", f"checkpoint.every_steps={EVERY}")


def plain(steps: int, checkpoints: str, where: str = "") -> tuple[str, ...]:
    """Overrides of a job that runs the program without."""
    return (f"script={where}{PLAIN}", f"script_args=--steps={steps} --save-every={EVERY} --checkpoints={checkpoints}")


def log_of(job: Watched, rank: int = 0) -> str:
    """All that a rank has said, in all attempts and on all nodes, in the order of its lives."""
    logs = sorted(job.run.path.glob(f"attempts/*/*/rank-{rank}.log"), key=lambda f: f.stat().st_mtime)
    return "".join(f.read_text(errors="replace") for f in logs)


def plain_steps(job: Watched) -> list[int]:
    """The steps that rank 0 of the program without the library has told, in its order."""
    return [int(s) for s in re.findall(r"^step (\d+) ", log_of(job), re.MULTILINE)]


def check_plain_went_on(job: Watched, steps: int) -> None:
    """It was killed once, and went on after the newest step that it had saved."""
    told = plain_steps(job)
    (again,) = [i for i in range(1, len(told)) if told[i] <= told[i - 1]]
    assert told[again] % EVERY == 1 and told[again] > EVERY, told
    assert told[-1] == steps


def check_library_went_on(job: Watched, steps: int) -> None:
    """It was killed once, and went on from a checkpoint; every step is in the metrics."""
    (resumed,) = job.events("resumed")
    assert resumed["step"] >= EVERY
    assert sorted(job.losses()) == list(range(1, steps + 1)), "every step was done"
    assert job.losses()[steps] < job.losses()[1]
    assert [e["step"] for e in job.events("checkpoint")][-1] == steps
