"""A sweep in the terminal. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from rich.console import Console
from rich.table import Table

from fsdp_jobs.submit.submit import Prepared
from fsdp_jobs.sweeps.identity import key_of
from fsdp_jobs.sweeps.table import Row, Sweep


def told(row: Row) -> str:
    """One line of a job that has ended."""
    what = number(row.objective) if row.state == "done" else row.reason
    return f"{row.run} {row.state}: {what}   {' '.join(row.overrides)}"


def number(value: float | None) -> str:
    """An objective, as short as it can be told apart; a dash for none."""
    return "-" if value is None else f"{value:.5g}"


def swept_keys(sweep: Sweep) -> list[str]:
    """Keys that stand in any row, in the order they came."""
    return list(dict.fromkeys(key_of(o) for row in sweep.jobs for o in row.overrides))


def values_of(row: Row) -> dict[str, str]:
    """Key -> value, as written, of what a row differs in."""
    return {key_of(o): o.partition("=")[2] for o in row.overrides}


def show_status(console: Console, sweep: Sweep) -> None:
    """A row a job."""
    table = Table(box=None, pad_edge=False)
    keys = swept_keys(sweep)
    for heading in ("run", *keys, "state", "step", sweep.objective, "what happened last"):
        right = heading in ("step", sweep.objective)
        table.add_column(heading, justify="right" if right else "left", no_wrap=heading != "what happened last")
    table.columns[0].min_width = max((len(row.run) for row in sweep.jobs), default=0)
    for row in sweep.jobs:
        values = values_of(row)
        shown = [values.get(key, "") for key in keys]
        table.add_row(row.run, *shown, row.state, str(row.step), number(row.objective), row.reason)
    console.print(table)
    console.print(f"{sweep.name}: {counts(sweep.jobs)}")


def counts(rows: Sequence[Row]) -> str:
    """`20 jobs: 15 running, 5 done`."""
    found = Counter(row.state for row in rows)
    return f"{len(rows)} job{'' if len(rows) == 1 else 's'}: " + ", ".join(f"{n} {state}" for state, n in found.items())


def show_submitted(
    console: Console, sweep: Sweep, rows: Sequence[Row], submitted: Collection[str], with_commands: bool
) -> None:
    """What became of a batch, and how to follow it."""
    table = Table.grid(padding=(0, 2))
    asked = list({row.run: row for row in rows}.values())
    done = [row for row in asked if row.run not in submitted and not row.is_active]
    parts = (
        ("submitted", [row for row in asked if row.run in submitted]),
        ("running or waiting", [row for row in asked if row.run not in submitted and row.is_active]),
        ("done", done),
    )
    for what, found in parts:
        if found:
            runs = found[0].run if len(found) == 1 else f"{found[0].run} ... {found[-1].run}"
            table.add_row(str(len(found)), what, runs)
    console.print(f"sweep {sweep.name}, {sweep.file}", soft_wrap=True)
    console.print(table)
    if with_commands:
        console.print(
            f"fsdp-jobs sweep status {sweep.name}    fsdp-jobs logs -f {asked[0].run}    "
            f"fsdp-jobs sweep cancel {sweep.name}",
            soft_wrap=True,
        )


def show_dry_run(console: Console, sweep: Sweep, rows: Sequence[Row], prepared: Sequence[Prepared]) -> None:
    """What a command would submit."""
    plans = {job.run.name: job.plan for job in prepared}
    table = Table(box=None, pad_edge=False)
    for heading in ("run", "overrides", "what would be done", "plan"):
        table.add_column(heading, no_wrap=heading == "run")
    for row in {row.run: row for row in rows}.values():
        plan = plans.get(row.run)
        what = f"nothing: it is {row.state}" if plan is None else "go on" if row.handle else "submit"
        layout = f"{plan.layout.strategy} over {plan.layout.shard_group} of {plan.layout.world_size}" if plan else ""
        table.add_row(row.run, " ".join(row.overrides), what, layout)
    console.print(table)
    console.print("dry run: nothing was submitted", style="yellow")
