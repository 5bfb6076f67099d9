"""`fsdp-jobs sweep ACTION NAME`: all jobs of a sweep seen, stopped and submitted again. No torch but for a report."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict

from rich.console import Console

from fsdp_jobs.checkpoints.catalog import find_checkpoints, home_of
from fsdp_jobs.config.errors import BadInput, Problem, nearest
from fsdp_jobs.config.schema import load_config
from fsdp_jobs.submit.stop import stop
from fsdp_jobs.sweeps import jobs
from fsdp_jobs.sweeps.identity import key_of
from fsdp_jobs.sweeps.show import counts, number, show_status, show_submitted
from fsdp_jobs.sweeps.table import Row, Sweep, existing_sweep, locked

console = Console(highlight=False, markup=False)  # what runs and launchers say is shown as it is


def sweep(args: list[str]) -> int:
    """Run one action."""
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "status": _status,
        "resume": lambda flags: _submit(flags, lambda row: row.state != "done" and not row.is_active),
        "retry-failed": lambda flags: _submit(flags, lambda row: row.state == "failed"),
        "cancel": _cancel,
        "best": _best,
        "report": _report,
    }
    given = [a.partition("=")[2] for a in args if key_of(a) == "sweep.dir" and "=" in a]
    parser = argparse.ArgumentParser(prog="fsdp-jobs sweep", allow_abbrev=False)
    parser.add_argument("action", metavar=f"{{{','.join(actions)}}}")
    parser.add_argument("name", help="of the sweep; sweep.dir=... chooses another folder")
    parser.add_argument("--json", action="store_true", help="with status and best: for programs")
    parser.add_argument("--now", action="store_true", help="with cancel: at once, without checkpoints")
    flags = parser.parse_args([a for a in args if not a.startswith("sweep.dir=")])
    if flags.action not in actions:
        what = f"there are {', '.join(actions)}"
        raise BadInput([Problem(f"sweep {flags.action}", what, nearest(flags.action, actions))])
    flags.dir = given[-1] if given else "sweeps"
    return actions[flags.action](flags)


def _observed(flags: argparse.Namespace) -> Sweep:
    found = existing_sweep(flags.name, flags.dir)
    jobs.refresh(found)
    return found


def _status(flags: argparse.Namespace) -> int:
    found = _observed(flags)
    if flags.json:
        sys.stdout.write(json.dumps([asdict(row) for row in found.jobs], indent=2) + "\n")
    else:
        show_status(console, found)
    return 0


def _submit(flags: argparse.Namespace, wanted: Callable[[Row], bool]) -> int:
    """Submit those rows again, each into its own run directory."""
    with locked(existing_sweep(flags.name, flags.dir).folder, console.print):
        found = _observed(flags)
        rows = [row for row in found.jobs if wanted(row)]
        configs = jobs.composed(found, rows)
        jobs.submit(found, {row.run: config for row, config in zip(rows, configs, strict=True)})
    if rows:
        show_submitted(console, found, rows, {row.run for row in rows}, with_commands=True)
    else:
        console.print(f"nothing to submit; {counts(found.jobs)}")
    return 0


def _cancel(flags: argparse.Namespace) -> int:
    with locked(existing_sweep(flags.name, flags.dir).folder, console.print):
        found = _observed(flags)
        active = [row for row in found.jobs if row.is_active]
        stop([found.run_of(row) for row in active], flags.now, lambda text: console.print(text, style="yellow"))
        jobs.refresh(found)
        found.write()
    console.print(f"{len(active)} stopped; {counts(found.jobs)}")
    return 0


def _best(flags: argparse.Namespace) -> int:
    found = _observed(flags)
    row = found.best()
    if row is None:
        raise BadInput([Problem(f"sweep {found.name}", f"no job has a {found.objective} yet", _measured(found))])
    run = found.run_of(row)
    newest = next(iter(find_checkpoints(home_of(load_config(run.config).checkpoint, run))), None)
    checkpoint = None if newest is None else str(newest)
    if flags.json:
        sys.stdout.write(json.dumps({**asdict(row), "checkpoint": checkpoint}, indent=2) + "\n")
        return 0
    so_far = "" if row.state == "done" else f" ({row.state}, at step {row.step}; none is done)"
    console.print(f"{row.run}: {found.objective} {number(row.objective)}{so_far}")
    console.print(f"overrides   {' '.join(row.overrides) or '-'}", soft_wrap=True)
    console.print(f"checkpoint  {checkpoint or '-'}", soft_wrap=True)
    console.print(f"fsdp-jobs export {row.run}", soft_wrap=True)
    return 0


def _measured(found: Sweep) -> str:
    """Keys that jobs do measure."""
    keys: set[str] = set()
    for row in found.jobs:
        metrics = found.run_of(row).metrics
        first = next(iter(metrics.open()), "") if metrics.exists() else ""
        keys |= set(json.loads(first)) if first.endswith("\n") else set()
    return f"sweep.objective: one of {', '.join(sorted(keys))}" if keys else f"fsdp-jobs sweep status {found.name}"


def _report(flags: argparse.Namespace) -> int:
    found = _observed(flags)
    try:
        from fsdp_jobs.observe.report.sweep_page import write_sweep_report
    except ImportError as e:
        raise BadInput([Problem("sweep report", str(e), "pip install 'fsdp_jobs[report]'")]) from e
    console.print(str(write_sweep_report(found)), soft_wrap=True)
    return 0
