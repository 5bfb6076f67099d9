"""The report as one HTML file: everything inline, everything that a run could have written escaped. No torch."""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from matplotlib import pyplot as plt

from fsdp_jobs.config.schema import load_config
from fsdp_jobs.observe.report.charts import charts, to_svg
from fsdp_jobs.observe.report.history import History
from fsdp_jobs.plan.layout import HYBRID, Layout
from fsdp_jobs.plan.memory import GIB
from fsdp_jobs.plan.plan import Plan
from fsdp_jobs.plan.render import to_svg as plan_to_svg
from fsdp_jobs.run.directory import RunDir, write_atomic
from fsdp_jobs.run.goodput import ledger_of
from fsdp_jobs.run.status import RunStatus

_PICTURES = 6  # newest rounds that are drawn


@dataclass
class Compared:
    """One row of planned against measured."""

    what: str
    planned: str
    measured: str
    ratio: str


templates = Environment(loader=PackageLoader("fsdp_jobs.observe.report", "."), autoescape=True)


def write_report(run: RunDir, pngs: bool = False) -> list[Path]:
    """Write `report.html` into the run directory, and a PNG a chart with `pngs`. Returns what was written."""
    written = [run.path / "report.html"]
    write_atomic(written[0], templates.get_template("page.html.j2").render(content_of(run)))
    if pngs:
        for name, _, figure in charts(History.of(run), ledger_of(run), _plan_of(run)):
            written.append(run.path / f"report-{name}.png")
            figure.savefig(written[-1], dpi=200)
            plt.close(figure)
    return written


def content_of(run: RunDir) -> dict[str, Any]:
    """What the template `run.html.j2` shows of a run, charts drawn."""
    status, history, ledger, plan = RunStatus(run), History.of(run), ledger_of(run), _plan_of(run)
    status.update()
    drawn = []
    for name, title, figure in charts(history, ledger, plan):
        drawn.append((title, Markup(to_svg(figure, name))))
        plt.close(figure)
    return {
        "name": run.name,
        "status": status,
        "config": load_config(run.config),
        "ledger": ledger,
        "charts": drawn,
        "faults": [
            {
                "when": time.strftime("%b %d %H:%M:%S", time.localtime(b.time)),
                "why": b.why,
                "lost_steps": b.lost_steps,
                "after": "-" if b.recovered_s is None else f"{b.recovered_s:.1f} s",
            }
            for b in status.breaks
        ],
        "measured": list(_compared(plan, history)) if plan is not None and history.steps else [],
        "pictures": list(_pictures(plan, history)) if plan is not None else [],
        "yaml": run.config.read_text(),
        "environment": list(_environment(run)),
    }


def _plan_of(run: RunDir) -> Plan | None:
    return Plan.from_json(run.plan.read_text()) if run.plan.exists() else None


def _compared(plan: Plan, history: History) -> Iterator[Compared]:
    records = history.newest()

    def median(key: str) -> float | None:
        values = [r[key] for r in records if r.get(key) is not None]
        return statistics.median(values) if values else None

    if plan.time is None or plan.memory is None:
        return
    rows: list[tuple[str, float, str, str]] = [
        ("seconds a step", plan.time.step, "step_s", "{:.3f}"),
        ("tokens/s, all ranks", plan.time.tokens_per_s, "tokens_per_s", "{:,.0f}"),
        ("GiB of a GPU at the peak", plan.memory.total / GIB, "peak_memory_gib", "{:.2f}"),
    ]
    for what, planned, key, form in rows:
        found = median(key)
        if found is None:
            continue
        yield Compared(what, form.format(planned), form.format(found), f"{found / planned:.2f}" if planned else "-")


def _pictures(plan: Plan, history: History) -> Iterator[tuple[str, Markup]]:
    """Nodes and shard groups of the newest rounds that differ from the one before."""
    different: list[dict[str, Any]] = []
    for event in history.rounds:
        seen = different[-1] if different else None
        if seen is None or any(seen[k] != event[k] for k in ("attempt", "nodes", "hosts", "shard_group", "strategy")):
            different.append(event)
    for event in different[-_PICTURES:]:
        group, world = event["shard_group"], event["world_size"]
        layout = Layout(event["strategy"], world, group)
        nodes = tuple(f"{n}: {h}" for n, h in zip(event["nodes"], event["hosts"], strict=True))
        placed = replace(
            plan,
            layout=layout,
            nodes=nodes,
            leaves=("",) * len(nodes),
            spares=tuple(f"node {n}" for n in event["spares"]),
            ranks_per_node=world // len(nodes),
        )
        groups = f", groups of {group}" if event["strategy"] in HYBRID else ""
        caption = (
            f"Attempt {event['attempt']}, round {event['round']}: {event['strategy']}{groups} on {len(nodes)} nodes"
        )
        yield caption, Markup(plan_to_svg(placed))


def _environment(run: RunDir) -> Iterator[tuple[str, str]]:
    job = run.read_job()
    yield "handle", str(job.get("handle", "-"))
    yield "overrides", " ".join(job.get("overrides", [])) or "-"
    if "submitted" in job:
        yield "submitted", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job["submitted"]))
    yield "written by", f"fsdp_jobs {importlib.metadata.version('fsdp_jobs')} on Python {platform.python_version()}"
