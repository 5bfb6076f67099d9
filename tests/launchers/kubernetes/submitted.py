"""A job on Kubernetes as its user sees it, from a machine that cannot mount the claim."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.submit.submitted import describe
from tests.jobs import Watched


class Submitted(Watched):
    """All that is known of the job has come through the API."""

    def __init__(self, folder: Path, name: str):
        super().__init__(RunDir(folder / "runs" / name))

    def until_true(self, true: Callable[[], bool], what: str, seconds: float = 180) -> None:
        def asked() -> bool:
            describe([self.run.read_job()["handle"]])
            return true()

        self.until(asked, what, seconds)

    def rounds(self) -> int:
        return len(self.events("round_started"))

    def until_advanced(self, rounds: int) -> None:
        """Until there have been so many rounds, and the newest of them trains."""
        self.until_true(lambda: self.rounds() >= rounds, f"round number {rounds}")
        began = self.events("round_started")[-1]["time"]
        self.until_true(lambda: bool(self.metrics()) and self.metrics()[-1]["time"] > began, "a step of it")
