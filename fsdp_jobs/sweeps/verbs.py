"""Implement `fsdp-jobs sweep ACTION NAME`: show, cancel and resubmit all jobs of a sweep. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict

from fsdp_jobs.checkpoints.catalog import find_checkpoints
from fsdp_jobs.config.arguments import RUNS_DIR, Parser, split_folders
from fsdp_jobs.config.errors import BadInput, nearest
from fsdp_jobs.config.schema import load_config
from fsdp_jobs.config.terminal import print_json, say
from fsdp_jobs.run.directory import checkpoints_of, find_run
from fsdp_jobs.run.tail import newest_json_lines
from fsdp_jobs.submit.stop import stop
from fsdp_jobs.submit.submitted import in_folder, named
from fsdp_jobs.submit.validate import composed
from fsdp_jobs.sweeps import jobs
from fsdp_jobs.sweeps.show import counts, number, show_status, show_submitted
from fsdp_jobs.sweeps.table import Sweep, find_sweep, locked


def sweep(args: list[str]) -> int:
    """Run one action; return the exit code."""
    parser = Parser("sweep")
    parser.add_argument("action", metavar=f"{{{','.join(_ACTIONS)}}}")
    parser.add_argument("name", help="of the sweep; runs_dir=... chooses another folder of runs")
    parser.add_json("with status and best: for programs")
    parser.add_argument("--now", action="store_true", help="with cancel: at once, without checkpoints")
    folders, rest = split_folders(args, RUNS_DIR | {"sweep.dir": "sweeps"})
    flags = parser.parse_args(rest)
    if flags.action not in _ACTIONS:
        what = f"not an action; one of {', '.join(_ACTIONS)}"
        raise BadInput.at(f"sweep {flags.action}", what, nearest(flags.action, _ACTIONS))
    act, changes = _ACTIONS[flags.action]
    flags.folder = find_run(folders["sweep.dir"], flags.name).path  # a sweep's name is the prefix of its runs' names
    with locked(flags.folder) if changes else nullcontext():
        found = find_sweep(flags.name, folders["runs_dir"])
        jobs.refresh(found, found.jobs)
        return act(found, flags)


def _status(sweep: Sweep, flags: argparse.Namespace) -> int:
    if flags.json:
        print_json([asdict(row) for row in sweep.jobs])
    else:
        show_status(sweep)
    return 0


def _resume(sweep: Sweep, flags: argparse.Namespace) -> int:
    """Resubmit the rows that are neither done nor active, or only the failed ones, into their run directories."""
    undone = [row for row in sweep.jobs if row.state != "done" and not row.is_active]
    rows = [row for row in undone if row.state == "failed" or flags.action == "resume"]
    configs = composed([sweep.overrides_of(row) for row in rows])
    jobs.submit(sweep, dict(zip(rows, configs, strict=True)), flags.folder)
    if rows:
        show_submitted(sweep, rows, rows, with_commands=True)
    else:
        say(f"nothing to submit; {counts(sweep.jobs)}")
    if others := [row for row in undone if row not in rows]:
        name = in_folder(sweep.name, sweep.runs_dir)
        say(f"not submitted: {counts(others)}; for these: fsdp-jobs sweep resume {name}")
    return 0


def _cancel(sweep: Sweep, flags: argparse.Namespace) -> int:
    active = [row for row in sweep.jobs if row.is_active]
    stop([sweep.run_of(row) for row in active], flags.now)
    jobs.refresh(sweep, sweep.jobs)
    stopped = [row for row in active if row.state == "stopped"]
    say(f"{len(stopped)} stopped; {counts(sweep.jobs)}")
    return 0


def _best(sweep: Sweep, flags: argparse.Namespace) -> int:
    row = sweep.best()
    if row is None:
        what = f"no job has a finite {sweep.objective} yet"
        raise BadInput.at(f"sweep {sweep.name}", what, _measured_keys(sweep))
    run = sweep.run_of(row)
    checkpoint = next(map(str, find_checkpoints(checkpoints_of(load_config(run.config).checkpoint, run))), None)
    if flags.json:
        print_json(asdict(row) | {"checkpoint": checkpoint})
        return 0
    so_far = "" if row.state == "done" else f" ({row.state}, at step {row.step}; no job is done)"
    say(f"{row.run}: {sweep.objective} {number(row.objective)}{so_far}")
    say(f"overrides   {' '.join(row.overrides) or '-'}")
    say(f"checkpoint  {checkpoint or '-'}")
    if checkpoint:
        say(f"fsdp-jobs export {named(run)}")
    return 0


def _measured_keys(sweep: Sweep) -> str:
    """Suggest the keys that jobs do record, if no job records the objective; else the command that shows the jobs."""
    newest = [next(newest_json_lines(sweep.run_of(row).metrics), {}) for row in sweep.jobs]
    keys = sorted(set().union(*newest))
    if keys and sweep.objective not in keys:
        return f"sweep.objective: one of {', '.join(keys)}"
    return f"fsdp-jobs sweep status {in_folder(sweep.name, sweep.runs_dir)}"


def _report(sweep: Sweep, flags: argparse.Namespace) -> int:
    from fsdp_jobs.observe.report import write_page

    file = flags.folder / "report.html"
    answers = {"api/rows": {}, f"api/sweeps/{sweep.name}": sweep.content()}
    write_page(file, f"sweep/{sweep.name}", answers)
    say(str(file))
    return 0


# Action -> its function, and whether it changes the sweep and so needs its lock.
_ACTIONS: dict[str, tuple[Callable[[Sweep, argparse.Namespace], int], bool]] = {
    "status": (_status, False),
    "resume": (_resume, True),
    "retry-failed": (_resume, True),
    "cancel": (_cancel, True),
    "best": (_best, False),
    "report": (_report, False),
}
