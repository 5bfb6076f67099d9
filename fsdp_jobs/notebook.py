"""Run jobs from a notebook: `from fsdp_jobs import Job`. Its methods do the same as the verbs. No torch."""

from __future__ import annotations

import io
from html import escape
from typing import Any

from rich.console import Console

from fsdp_jobs.config.arguments import overrides_in
from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.plan.plan import Plan
from fsdp_jobs.plan.render import render
from fsdp_jobs.plan.svg import to_svg
from fsdp_jobs.run.directory import RunDir, rank_logs
from fsdp_jobs.run.status import ENDED
from fsdp_jobs.run.tail import label, last_lines, read_json_lines
from fsdp_jobs.submit import submit as submission
from fsdp_jobs.submit.overview import Overview, RunSummary
from fsdp_jobs.submit.stop import stop
from fsdp_jobs.submit.submitted import existing_run
from fsdp_jobs.submit.validate import composed, job_without_files

_COLUMNS = 120  # width of the plan's tables in a cell
_PRE = '<pre style="line-height: normal; overflow-x: auto">{code}</pre>'


class Job:
    """A job from overrides, as on the command line: `Job("nodes=4", "cluster=slurm", "optim.lr=3e-4")`.

    Every method raises BadInput where the command line refuses, with the same message.
    """

    def __init__(self, *overrides: str):
        self.overrides = overrides_in(overrides)
        self._run: RunDir | None = None
        self._changes: tuple[str, ...] = ()  # of a run that exists

    @classmethod
    def of(cls, name: str, *changes: str, runs_dir: str = "runs") -> Job:
        """Return the job of an existing run, by its name or handle; `submit` continues the run with the changes."""
        run = existing_run(name, runs_dir)
        job = cls(*submission.overrides_again(run, changes))
        job._run, job._changes = run, changes
        return job

    @property
    def run(self) -> RunDir:
        """Return the run directory.

        Raises:
            BadInput: nothing has been submitted.
        """
        if self._run is None:
            what = "has no run: it has not been submitted here"
            raise BadInput.at(repr(self), what, "job.submit(); Job.of(NAME) for a run that exists")
        return self._run

    def plan(self) -> PlanShown:
        """Plan the job, as `fsdp-jobs plan` does. Nothing is written."""
        submission.forget()
        planned, _ = submission.plan_of(job_without_files(self.overrides))
        return PlanShown(**vars(planned))

    def submit(self) -> str:
        """Submit the job and return its handle at once; with `dry_run=true`, return what would be submitted."""
        if self._run is not None:
            submission.check_left(self._run, self._changes)
        submission.forget()
        (config,) = composed([self.overrides])
        (job,) = submission.prepare([config])
        if config.dry_run:
            return str(job.request)
        (handle,) = submission.submit([job], [self.overrides])
        self._run = job.run
        return handle

    def status(self) -> RunShown:
        """Return the run's status, as `fsdp-jobs status` shows it."""
        return RunShown(**vars(Overview().look([self.run])[self.run]))

    def metrics(self) -> list[dict[str, Any]]:
        """Return the values of every step, of a repeated step the newest: `pd.DataFrame(job.metrics())`."""
        self.status()  # the launcher may have to fetch the metrics
        by_step = {record["step"]: record for record in read_json_lines(self.run.metrics) if "step" in record}
        return [by_step[step] for step in sorted(by_step)]

    def logs(self, lines: int = 60) -> str:
        """Return the last lines of every rank in the newest attempt; `fsdp-jobs logs` prints and follows all."""
        self.status()
        files = sorted(self.run.path.glob(rank_logs(self.run.last_attempt())))
        return "\n".join(f"== {label(file)}\n{last_lines(file, lines)}\n" for file in files)

    def cancel(self) -> RunShown:
        """Save a checkpoint and stop the job; return its status when it has stopped."""
        if self.status().state not in ENDED:
            stop([self.run])
        return self.status()

    def __repr__(self) -> str:
        return f"Job({', '.join(map(repr, self.overrides))})"


class PlanShown(Plan):
    """A plan that a cell shows as its picture and its tables."""

    def __repr__(self) -> str:
        return self._drawn().export_text()

    def _repr_html_(self) -> str:
        return to_svg(self) + self._drawn().export_html(inline_styles=True, code_format=_PRE)

    def _drawn(self) -> Console:
        console = Console(record=True, file=io.StringIO(), width=_COLUMNS, force_jupyter=False)
        console.print(render(self))
        return console


class RunShown(RunSummary):
    """The present state of a run, which a cell shows as a table."""

    def _repr_html_(self) -> str:
        rows = (f"<tr><th>{escape(what)}</th><td>{escape(text)}</td></tr>" for what, text in self.cells().items())
        return f"<table>{''.join(rows)}</table>"
