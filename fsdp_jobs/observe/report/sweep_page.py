"""A sweep as one HTML file: a table of its jobs, and what they reached by what was swept. No torch."""

from __future__ import annotations

import math
from pathlib import Path

from markupsafe import Markup
from matplotlib import pyplot as plt

from fsdp_jobs.observe.report.charts import to_svg
from fsdp_jobs.observe.report.page import templates
from fsdp_jobs.observe.report.sweep_charts import sweep_charts
from fsdp_jobs.run.directory import write_atomic
from fsdp_jobs.sweeps.show import counts, number, swept_keys, values_of
from fsdp_jobs.sweeps.table import Row, Sweep


def write_sweep_report(sweep: Sweep) -> Path:
    """Write `report.html` into the sweep's folder."""
    drawn = []
    for name, title, figure in sweep_charts(sweep):
        drawn.append((title, Markup(to_svg(figure, name))))
        plt.close(figure)
    sign = 1 if sweep.direction == "minimize" else -1

    def rank(row: Row) -> float:
        measured = row.objective is not None and math.isfinite(row.objective)
        return sign * (row.objective or 0.0) if measured else math.inf

    content = {
        "sweep": sweep,
        "counts": counts(sweep.jobs),
        "best": sweep.best(),
        "keys": swept_keys(sweep),
        "rows": [(row, values_of(row)) for row in sorted(sweep.jobs, key=rank)],
        "number": number,
        "charts": drawn,
    }
    file = sweep.folder / "report.html"
    write_atomic(file, templates.get_template("sweep.html.j2").render(content))
    return file
