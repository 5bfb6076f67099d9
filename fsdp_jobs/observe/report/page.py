"""Write a run's report as one HTML file that loads nothing and executes nothing. No torch."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib import pyplot as plt

from fsdp_jobs import __version__
from fsdp_jobs.observe.report.charts import charts, to_svgs
from fsdp_jobs.observe.report.history import History
from fsdp_jobs.pages.page import render
from fsdp_jobs.pages.plan_svg import to_svg as plan_to_svg
from fsdp_jobs.plan.layout import HYBRID, Layout
from fsdp_jobs.plan.memory import GIB
from fsdp_jobs.plan.plan import Plan
from fsdp_jobs.run.directory import RunDir, write_atomic
from fsdp_jobs.run.goodput import Costs, Goodput, costs_of
from fsdp_jobs.run.status import RunStatus, steps_done

_MAX_PICTURES = 6  # newest rounds that are drawn


def write_report(run: RunDir, pngs: bool = False) -> list[Path]:
    """Write `report.html`, with `pngs` also each chart as a file, into the run directory; return the files."""
    status, history, plan = RunStatus(run), History.of(run), Plan.of(run)
    status.update()
    goodput, written = status.goodput, [run.report]
    content = {
        "name": run.name,
        "status": status,
        "steps": steps_done(status.step, status.steps),
        "goodput": goodput,
        "charts": to_svgs(charts(history, goodput, plan)),
        "comparison": list(_comparison(plan, history.newest(), goodput, costs_of(run))) if plan is not None else [],
        "rounds": list(_rounds(plan, history)) if plan is not None else [],
        "yaml": run.config.read_text(),
        "environment": _environment(run.read_job()),
        "strftime": time.strftime,
        "localtime": time.localtime,
    }
    write_atomic(run.report, render(__package__, "report.html.j2", **content))
    for name, _, figure in charts(history, goodput, plan) if pngs else ():
        written.append(run.chart(name))
        figure.savefig(written[-1], dpi=200)
        plt.close(figure)
    return written


def _comparison(
    plan: Plan, records: list[dict[str, Any]], goodput: Goodput, costs: Costs | None
) -> Iterator[tuple[str, str, str, str]]:
    """Yield (quantity, planned, measured, measured / planned) of what was planned and has been measured."""
    compared: list[tuple[str, str, float, list[float]]] = []
    if goodput.wall_s:
        compared.append(("goodput", "{:.1%}", plan.expected.goodput, [goodput.fraction]))
    if costs is not None and costs.restart_s:
        compared.append(("seconds to recover", "{:.1f}", plan.expected.restart_s, [costs.restart_s]))
    for tier in plan.expected.tiers:
        if tier.place == "memory" and costs is not None and costs.capture_s:
            compared.append(("steps between captures in memory", "{:.3g}", tier.every_steps, [costs.capture_steps]))
            compared.append(("seconds that steps wait for each", "{:.4f}", tier.stall_s, [costs.capture_s]))
    if plan.time is not None and plan.memory is not None:
        for what, form, planned, key in (
            ("seconds per step", "{:.3f}", plan.time.step, "step_s"),
            ("tokens/s, all ranks", "{:,.0f}", plan.time.tokens_per_s, "tokens_per_s"),
            ("peak GiB per GPU", "{:.2f}", plan.memory.total / GIB, "peak_memory_gib"),
        ):
            compared.append((what, form, planned, [r[key] for r in records if r.get(key) is not None]))
    for what, form, planned, values in compared:
        if values:
            measured = statistics.median(values)
            ratio = f"{measured / planned:.2f}" if planned else "-"
            yield what, form.format(planned), form.format(measured), ratio


def _rounds(plan: Plan, history: History) -> Iterator[tuple[str, Markup]]:
    """Yield (caption, picture of nodes and shard groups) of the newest rounds that changed something."""
    same = attrgetter("attempt", "nodes", "hosts", "shard_group", "strategy")
    different = [next(rounds) for _, rounds in groupby(history.rounds, same)]
    for event in different[-_MAX_PICTURES:]:
        layout = Layout(event.strategy, event.world_size, event.shard_group)
        nodes = tuple(f"{n}: {h}" for n, h in zip(event.nodes, event.hosts, strict=True))
        placed = replace(
            plan,
            layout=layout,
            nodes=nodes,
            leaves=("",) * len(nodes),
            spares=tuple(f"node {n}" for n in event.spares),
            ranks_per_node=layout.world_size // len(nodes),
        )
        groups = f", groups of {layout.shard_group}" if layout.strategy in HYBRID else ""
        where = f"{layout.strategy}{groups} on {len(nodes)} nodes"
        yield f"Attempt {event.attempt}, round {event.round}: {where}", Markup(plan_to_svg(placed))


def _environment(job: dict[str, Any]) -> dict[str, str]:
    """Collect what was submitted, and what has written the report; `job` is the content of job.json."""
    submitted = time.localtime(job["submitted"]) if "submitted" in job else None
    return {
        "handle": job.get("handle", "-"),
        "overrides": " ".join(job.get("overrides", [])) or "-",
        "submitted": time.strftime("%Y-%m-%d %H:%M:%S", submitted) if submitted else "-",
        "written by": f"fsdp_jobs {__version__} on Python {platform.python_version()}",
    }
