"""`fsdp-jobs status` and `list`: runs in a table, once, watched, or as JSON; one run with its story. No torch."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.live import Live
from rich.text import Text

from fsdp_jobs.cli.runs import console, existing_run, take_runs_dir
from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.run.directory import RunDir, runs_in
from fsdp_jobs.run.goodput import goodput_of
from fsdp_jobs.run.status import ENDED, RunStatus
from fsdp_jobs.run.table import table_lines

if TYPE_CHECKING:
    from fsdp_jobs.submit.overview import RunSummary

_WATCH_S = 2.0
_NUMBERS = ("step", "loss", "tok/s", "eta", "goodput")  # columns that are aligned to the right


def status(args: list[str]) -> int:
    args, runs_dir = take_runs_dir(args)
    parser = argparse.ArgumentParser(prog="fsdp-jobs status", allow_abbrev=False)
    parser.add_argument("name", nargs="?", help="of the run, or its handle; all runs when left out")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--watch", action="store_true", help="go on until all have ended, or Ctrl-C")
    how.add_argument("--json", action="store_true", help="a list of objects, for scripts")
    flags = parser.parse_args(args)
    runs = runs_in(runs_dir) if flags.name is None else [existing_run(flags.name, runs_dir)]
    if not runs and not flags.json:
        console.print(f"no runs under {runs_dir}/")
    elif flags.watch:
        with suppress(KeyboardInterrupt):
            _watch(runs, named=flags.name is not None)
    else:
        _show(runs, flags.json)
    if flags.name is not None and not flags.watch and not flags.json:
        _show_story(runs[0])
    return 0


def list_runs(args: list[str]) -> int:
    rest, _ = take_runs_dir(args)
    if names := [a for a in rest if not a.startswith("-")]:
        raise BadInput([Problem(names[0], "list shows all runs", f"fsdp-jobs status {names[0]}")])
    return status(args)


def _show(runs: Sequence[RunDir], as_json: bool) -> None:
    from fsdp_jobs.submit.overview import Overview

    rows = Overview().look(runs)
    if as_json:
        sys.stdout.write(json.dumps([asdict(row) for row in rows]) + "\n")
    else:
        sys.stdout.write(_table(rows, console.width if console.is_terminal else None) + "\n")


def _table(rows: Sequence[RunSummary], width: int | None) -> str:
    cells = [row.cells() for row in rows]
    return "\n".join(table_lines(list(cells[0]), [list(row.values()) for row in cells], _NUMBERS, width))


def _watch(runs: Sequence[RunDir], named: bool) -> None:
    """The table, again and again; runs that had ended before are left out, unless the user named one."""
    from fsdp_jobs.submit.overview import Overview

    overview = Overview()
    rows = overview.look(runs)
    live = [run for run, row in zip(runs, rows, strict=True) if named or row.state not in ENDED]
    if not live:
        console.print("all runs have ended")
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as shown:
        while True:
            rows = overview.look(live)
            shown.update(Text(_table(rows, console.width)), refresh=True)
            if all(row.state in ENDED for row in rows):
                return
            time.sleep(_WATCH_S)


def _show_story(run: RunDir) -> None:
    """What went wrong in a run, what each failure cost, what it does now, and where its time went."""
    status = RunStatus(run)
    status.update()
    for b in status.breaks:
        stamp = time.strftime("%b %d %H:%M:%S", time.localtime(b.time))
        again = "no step since" if b.recovered_s is None else f"training again after {b.recovered_s:.1f} s"
        console.print(f"{stamp}  {b.why}: {b.lost_steps} steps lost, {again}", soft_wrap=True)
    for host, why in run.excluded_hosts().items():
        console.print(f"without {host}: {why}", soft_wrap=True)
    console.print(f"now      {status.doing}")
    if status.step or not status.is_program:
        console.print(f"goodput  {goodput_of(run)}")
