"""Programs of examples/ as every cluster runs them: killed once after their first save, and done."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.jobs import ROOT, Watched

EXAMPLES = ROOT / "examples"
EVERY = 10  # steps between their saves


@dataclass(frozen=True)
class Program:
    """One of examples/, which saves every 10 steps."""

    file: str
    args: str  # with places for the steps and for a folder that outlives its processes
    told: Callable[[Watched], list[int]]  # the steps it has said that it did, in order, those done again too
    keys: tuple[str, ...] = ()
    has_library: bool = False
    times: int = 1  # as many steps as the others: they are short

    def overrides(self, steps: int, folder: str = "own", where: str = "") -> tuple[str, ...]:
        """Overrides of a job that runs it, from the folder `where`."""
        args = self.args.format(steps=steps * self.times, folder=folder)
        return (f"script={where}{self.file}", f"script_args={args}", f"checkpoint.every_steps={EVERY}", *self.keys)

    def has_saved(self, job: Watched) -> bool:
        """Whether it is some steps after its first save."""
        return max(self.told(job), default=0) >= EVERY + 4

    def check_went_on(self, job: Watched, steps: int, kills: int = 1) -> None:
        """It was killed, each time went on after a step that it had saved, and did the last one."""
        told, steps = self.told(job), steps * self.times
        again = [
            (last, first) for last, first in pairwise(told) if first != last + 1
        ]  # none: it had saved the last one
        assert len(job.events("round_started")) == 1 + kills, job.story()
        assert len(again) <= kills and all(EVERY < first <= last for last, first in again), told
        assert told[0] == 1 and told[-1] == steps, told
        if self.has_library:
            (resumed,) = job.events("resumed")
            assert resumed["step"] >= EVERY
            assert job.losses()[steps] < job.losses()[1]
            assert [e["step"] for e in job.events("checkpoint")][-1] == steps


def log_of(job: Watched, rank: int = 0) -> str:
    """All that a rank has said, in all attempts and on all nodes, in the order of its lives."""
    logs = sorted(job.run.path.glob(f"attempts/*/*/rank-{rank}.log"), key=lambda f: f.stat().st_mtime)
    return "".join(f.read_text(errors="replace") for f in logs)


def _said(pattern: str) -> Callable[[Watched], list[int]]:
    return lambda job: [int(step) for step in re.findall(pattern, log_of(job), re.MULTILINE)]


def _in_metrics(job: Watched) -> list[int]:
    return [m["step"] for m in job.metrics()]


def _counted(job: Watched) -> list[int]:
    """Steps of transformers' Trainer, which names none: counted from the checkpoint that it begins with."""
    told, step = [], 0
    for begun in re.findall(r"^begins with (.*)$|^.*'loss'", log_of(job), re.MULTILINE):
        step = int(begun.rpartition("-")[2]) if "-" in begun else 0 if begun else step + 1
        told += [] if begun else [step]
    return told


PLAIN = Program(
    "plain_torchrun.py", f"--steps={{steps}} --save-every={EVERY} --checkpoints={{folder}}", _said("^step (\\d+) ")
)
LIBRARY = Program("small_library.py", "--steps={steps}", _in_metrics, has_library=True)
MORE = {  # killed everywhere, too, but not in every run of the tests
    "fsdp1": Program("fsdp1_library.py", "--steps={steps}", _in_metrics, ("fsdp=full_shard",), has_library=True),
    "elastic": Program(
        "torch_elastic.py", "--epochs={steps} --snapshot={folder}.pt", _said(r"^epoch (\d+) loss"), times=10
    ),
    "accelerate": Program(
        "accelerate_llama.py", f"--steps={{steps}} --every={EVERY}", _said(r"^step (\d+) loss"), ("fsdp=full_shard",)
    ),
    "trainer": Program("transformers_trainer.py", f"--steps={{steps}} --every={EVERY}", _counted, ("fsdp=full_shard",)),
}


def copied(folder: Path) -> None:
    """Put the programs where a user has them: into the folder that jobs are submitted from."""
    for program in (PLAIN, LIBRARY, *MORE.values()):
        shutil.copy(EXAMPLES / program.file, folder)
