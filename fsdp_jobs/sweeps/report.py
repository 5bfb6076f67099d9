"""Write a sweep's report as one HTML file: a table of its jobs, and charts. No torch."""

from __future__ import annotations

from pathlib import Path

from fsdp_jobs.pages.charts import to_svgs
from fsdp_jobs.pages.page import render
from fsdp_jobs.run.directory import write_atomic
from fsdp_jobs.sweeps.charts import sweep_charts
from fsdp_jobs.sweeps.show import counts, number
from fsdp_jobs.sweeps.table import Sweep


def write_sweep_report(sweep: Sweep) -> Path:
    """Write `report.html` into the sweep's folder."""
    page = render(
        __package__,
        "report.html.j2",
        name=sweep.name,
        sweep=sweep,
        counts=counts(sweep.jobs),
        best=sweep.best(),
        rows=sorted(sweep.jobs, key=sweep.rank),
        number=number,
        charts=to_svgs(sweep_charts(sweep)),
    )
    file = sweep.folder / "report.html"
    write_atomic(file, page)
    return file
