"""The verbs that look at runs or act on them. No torch but for export."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from types import ModuleType

from rich.console import Console

from fsdp_jobs.config.errors import BadInput, JobFailed, Problem
from fsdp_jobs.config.schema import load_config
from fsdp_jobs.run.directory import RunDir, pending_in, rank_logs, runs_in
from fsdp_jobs.run.identity import check_may_act
from fsdp_jobs.run.status import RunStatus
from fsdp_jobs.run.table import table_lines
from fsdp_jobs.run.tail import follow_files, label, looks_like_error
from fsdp_jobs.submit.overview import Overview, RunSummary, story_of
from fsdp_jobs.submit.stop import stop
from fsdp_jobs.submit.submitted import activity_of, check_own, existing_run, has_ended, job_of, kill, settle

errors = Console(stderr=True, highlight=False, markup=False)
console = Console(highlight=False, markup=False)  # what runs and launchers say is shown as it is

_WATCH_S = 2.0  # between two looks of `status --watch`
_NUMBERS = ("step", "loss", "tok/s", "eta", "goodput")  # columns that are aligned to the right


class VerbParser(argparse.ArgumentParser):
    """Arguments of a verb; every verb understands `runs_dir=...`, too."""

    def __init__(self, verb: str):
        super().__init__(prog=f"fsdp-jobs {verb}", allow_abbrev=False)

    def parse(self, args: Sequence[str]) -> argparse.Namespace:
        """Return the flags, with `runs_dir`, and with the `run` that the argument `name` names.

        Raises:
            BadInput: there is no such run.
        """
        given = [a for a in args if a.startswith("runs_dir=")]
        flags = self.parse_args([a for a in args if a not in given])
        flags.runs_dir = given[-1].removeprefix("runs_dir=") if given else "runs"
        if getattr(flags, "name", None) is not None:
            flags.run = existing_run(flags.name, flags.runs_dir)
        return flags


def run_parser(verb: str) -> VerbParser:
    """Make the parser of a verb that takes the name of a run."""
    parser = VerbParser(verb)
    parser.add_argument("name", help="of the run, or its handle")
    return parser


def status(args: list[str]) -> int:
    parser = VerbParser("status")
    parser.add_argument("name", nargs="?", help="of the run, or its handle; all runs when left out")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--watch", action="store_true", help="go on until all have ended, or Ctrl-C")
    how.add_argument("--json", action="store_true", help="a list of objects, for scripts")
    flags = parser.parse(args)
    if flags.name is None:
        settle(pending_in(flags.runs_dir))
    runs = runs_in(flags.runs_dir) if flags.name is None else [flags.run]
    overview = Overview()
    rows = overview.look(runs)
    if flags.json:
        sys.stdout.write(json.dumps([asdict(row) for row in rows]) + "\n")
    elif not runs:
        console.print(f"no runs under {flags.runs_dir}/")
    elif flags.watch:
        _watch(overview, [run for run, row in zip(runs, rows, strict=True) if flags.name or not row.is_over])
    else:
        sys.stdout.write(_table(rows, console.width if console.is_terminal else None) + "\n")
        if flags.name is not None:
            told = RunStatus(runs[0])
            told.update()
            for heading, sentence in story_of(told, rows[0].state):
                console.print(f"{heading:<7}  {sentence}", soft_wrap=True)
    return 0


def list_runs(args: list[str]) -> int:
    if names := [a for a in args if not a.startswith(("-", "runs_dir="))]:
        raise BadInput([Problem(names[0], "list shows all runs", f"fsdp-jobs status {names[0]}")])
    return status(args)


def _table(rows: Sequence[RunSummary], width: int | None) -> str:
    cells = [row.cells() for row in rows]
    return "\n".join(table_lines(list(cells[0]), [list(row.values()) for row in cells], _NUMBERS, width))


def _watch(overview: Overview, runs: Sequence[RunDir]) -> None:
    """Show runs again and again, until all of them have ended or the user has seen enough."""
    from fsdp_jobs.cli.follow import LiveView

    if not runs:
        console.print("all runs have ended")
        return
    with suppress(KeyboardInterrupt), LiveView(console) as view:
        while True:
            rows = overview.look(runs)
            view.show(runs, rows)
            if all(row.is_over for row in rows):
                return
            time.sleep(_WATCH_S)


def logs(args: list[str]) -> int:
    parser = run_parser("logs")
    parser.add_argument("-f", "--follow", action="store_true")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--node", type=int)
    parser.add_argument("--attempt", type=int)
    parser.add_argument("--errors", action="store_true", help="only lines that look like an error")
    flags = parser.parse(args)
    active = activity_of(flags.run)
    pattern = rank_logs(flags.attempt, flags.node, flags.rank)
    if not any(flags.run.path.glob(pattern)):
        (row,) = Overview().look([flags.run])  # its launcher may fetch them
        why = f": {row.reason}" if row.reason else ""
        if not any(flags.run.path.glob(pattern)):
            errors.print(f"nothing is written there yet; {flags.run.name} is {row.state}{why}", soft_wrap=True)
    # the launcher is asked once in any case: it may have to fetch the logs
    for file, line in follow_files(flags.run.path, pattern, lambda: active() and flags.follow):
        if not flags.errors or looks_like_error(line):
            sys.stdout.write(f"[{label(file)}] {line}\n")
            sys.stdout.flush()
    return 0


def cancel(args: list[str]) -> int:
    parser = run_parser("cancel")
    parser.add_argument("--now", action="store_true", help="at once, without a checkpoint")
    flags = parser.parse(args)
    check_may_act(flags.run)
    check_own(flags.run)
    if has_ended(flags.run, job_of(flags.run)):
        with suppress(BadInput, JobFailed):  # its launcher does not answer here
            kill([flags.run.read_job()["handle"]])  # whatever its end has left
        console.print(f"{flags.run.name} is not running")
        return 0
    stop([flags.run], flags.now, lambda text: console.print(text, style="yellow"))
    status = RunStatus(flags.run)
    status.update()
    console.print(f"{flags.run.name} {status.state}: {status.reason}")
    return 0


def export(args: list[str]) -> int:
    parser = run_parser("export")
    parser.add_argument("--format", choices=("safetensors", "pt"), default="safetensors")
    parser.add_argument("--step", type=int, help="of the checkpoint; the newest sound one when left out")
    parser.add_argument("--out", help="folder to write; <run directory>/export when left out")
    flags = parser.parse(args)
    from fsdp_jobs.hub.export import export

    for file in export(flags.run, load_config(flags.run.config), flags.format, flags.step, flags.out):
        console.print(str(file), soft_wrap=True)
    return 0


def report(args: list[str]) -> int:
    parser = run_parser("report")
    parser.add_argument("--png", action="store_true", help="also a picture of it, drawn by Chromium or Chrome")
    flags = parser.parse(args)
    from fsdp_jobs.observe.report import write_report

    for file in write_report(flags.run, flags.png):
        console.print(str(file), soft_wrap=True)
    return 0


def dashboard(args: list[str]) -> int:
    from fsdp_jobs.sweeps.jobs import measured
    from fsdp_jobs.sweeps.table import sweep_names

    parser = VerbParser("dashboard")
    parser.add_argument("--port", type=int, default=8265, help="0 takes a free one")
    where = "address to listen on; any other than this machine's own needs a token"
    parser.add_argument("--host", default="127.0.0.1", help=where)
    flags = parser.parse(args)
    leaf = _leaf("dashboard", "fsdp_jobs.observe.dashboard.serve")
    shown = leaf.Dashboard(flags.runs_dir, sweep_names, measured)
    return int(leaf.serve(shown, flags.host, flags.port, lambda url: console.print(url, soft_wrap=True)))


def _leaf(verb: str, module: str) -> ModuleType:
    """Import what a verb needs; the verb's name is that of the extra that installs its libraries.

    Raises:
        BadInput: they are not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise BadInput([Problem(verb, str(e), f"pip install 'fsdp_jobs[{verb}]'")]) from e
