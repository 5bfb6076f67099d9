"""Show a sweep in the terminal. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from rich.table import Table

from fsdp_jobs.config.terminal import say, show_table
from fsdp_jobs.run.table import counted
from fsdp_jobs.submit.submit import Prepared
from fsdp_jobs.submit.submitted import in_folder
from fsdp_jobs.sweeps.table import Row, Sweep


def number(value: float | None) -> str:
    """Format an objective; None as a dash."""
    return "-" if value is None else f"{value:.5g}"


def counts(rows: Sequence[Row]) -> str:
    """Count jobs by state: `20 jobs: 15 running, 5 done`."""
    states = Counter(row.state for row in rows)
    return f"{counted(len(rows), 'job')}: " + ", ".join(f"{n} {state}" for state, n in states.items())


def ended_line(row: Row) -> str:
    """Describe a job that has ended in one line."""
    result = number(row.objective) if row.state == "done" else row.reason
    return f"{row.run} {row.state}: {result}   {' '.join(row.overrides)}"


def show_status(sweep: Sweep) -> None:
    """Print a line per job, and the number of jobs in each state."""
    headings = ["run", *sweep.keys, "state", "step", sweep.objective, "reason"]
    rows = []
    for row in sweep.jobs:
        values = [row.values.get(key, "") for key in sweep.keys]
        rows.append([row.run, *values, row.state, str(row.step), number(row.objective), row.reason])
    show_table(headings, rows, ("step", sweep.objective))
    say(f"{sweep.name}: {counts(sweep.jobs)}")


def show_submitted(sweep: Sweep, rows: Sequence[Row], submitted: Collection[Row], with_commands: bool) -> None:
    """Print which jobs of a batch were submitted and which were not, then how to follow them."""
    groups: dict[str, list[str]] = {"submitted": [], "running or waiting": [], "done": []}
    for row in dict.fromkeys(rows):
        group = "submitted" if row in submitted else "running or waiting" if row.is_active else "done"
        groups[group].append(row.run)
    table = Table.grid(padding=(0, 2))
    for group, names in groups.items():
        if names:
            table.add_row(str(len(names)), group, names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}")
    say(f"sweep {sweep.name}, in {sweep.runs_dir}/")
    say(table)
    if with_commands:
        name, first = (in_folder(word, sweep.runs_dir) for word in (sweep.name, rows[0].run))
        commands = (f"sweep status {name}", f"logs -f {first}", f"sweep cancel {name}")
        say("    ".join(f"fsdp-jobs {command}" for command in commands))


def show_dry_run(rows: Sequence[Row], prepared: Sequence[Prepared]) -> None:
    """Print the jobs that a command would submit."""
    plans = {job.run.name: job.plan for job in prepared}
    lines = []
    for row in dict.fromkeys(rows):
        plan = plans.get(row.run)
        action = f"none: it is {row.state}" if plan is None else "resume" if row.handle else "submit"
        layout = f"{plan.layout.strategy} over {plan.layout.shard_group} of {plan.layout.world_size}" if plan else ""
        lines.append([row.run, action, layout, " ".join(row.overrides)])
    show_table(["run", "action", "plan", "overrides"], lines)
    say("dry run: nothing was submitted", "yellow")
