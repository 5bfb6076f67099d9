"""Write a sweep's report as one HTML file: a table of its jobs, and charts of the objective over each key. No torch."""

from __future__ import annotations

from pathlib import Path

from fsdp_jobs.pages.page import render
from fsdp_jobs.run.directory import write_atomic
from fsdp_jobs.sweeps.show import counts, number
from fsdp_jobs.sweeps.table import Sweep


def write_sweep_report(sweep: Sweep) -> Path:
    """Write `report.html` into the sweep's folder. It loads nothing, and executes only the script that draws charts."""
    rows, file = sorted(sweep.jobs, key=sweep.rank), sweep.folder / "report.html"
    content = {"counts": counts(sweep.jobs), "best": sweep.best(), "rows": rows, "number": number}
    write_atomic(file, render(__package__, "report.html.j2", name=sweep.name, sweep=sweep, **content))
    return file
