"""The charts of a report, with matplotlib. No torch."""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Iterator
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fsdp_jobs.observe.report.history import History, thinned
from fsdp_jobs.plan.plan import Plan
from fsdp_jobs.run.goodput import Ledger

CURVES = {
    "loss": "loss",
    "lr": "learning rate",
    "grad_norm": "gradient norm before clipping",
    "tokens_per_s": "tokens/s",
    "mfu": "MFU",
    "step_s": "seconds a step",
}
_NO_CURVES = {"step", "time", "seconds", "attempt", "data_s", "checkpoint_stall_s", "useful_s", "stall_s", "lost_s"}
_NO_CURVES |= {"tokens_per_s_per_gpu", "loss_scale", "peak_memory_gib"}
_MOST_OWN = 12  # curves of a program's own
LINE, FAULT, _SAVED, _RESUMED = "#1f5fa8", "#c0392b", "#7f8c8d", "#2e8b57"
_MARKED = {"fault": (FAULT, "x"), "damaged checkpoint": ("#d35400", "D"), "resumed": (_RESUMED, "^")}
_PARTS = {
    "useful": ("useful_s", "#2e8b57"),
    "checkpoint stall": ("stall_s", "#d4a017"),
    "lost and done again": ("lost_s", FAULT),
    "queue": ("queue_s", "#95a5a6"),
    "starting, restarting, leaving": ("start_s", "#6c8ebf"),
}

plt.rcParams.update(
    {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "svg.fonttype": "none",
        "svg.hashsalt": "fsdp_jobs",
    }
)


def charts(history: History, ledger: Ledger, plan: Plan | None) -> Iterator[tuple[str, str, Figure]]:
    """(file name, title, chart) of everything a run can show."""
    if any(r.get(key) is not None for r in history.steps for key in CURVES) or _own_curves(history.steps):
        yield "steps", "Over steps", over_steps(history, plan)
    if history.steps:
        yield "time", "Over time", over_time(history)
    if ledger.wall_s:
        yield "goodput", f"Where the time went: {ledger.goodput:.0%} useful", goodput(ledger)


def _own_curves(records: list[dict[str, Any]]) -> list[str]:
    """Keys with numbers that a program of the user's has logged, by name, as far as they are legible on one page."""
    numbers = {k for r in records for k, v in r.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return sorted(numbers - CURVES.keys() - _NO_CURVES)[:_MOST_OWN]


def over_steps(history: History, plan: Plan | None) -> Figure:
    """Loss, learning rate, gradient norm, speed: each step's newest record."""
    records = history.newest()
    shown = [key for key in CURVES if any(r.get(key) is not None for r in records)] + _own_curves(records)
    rows = -(-len(shown) // 2)
    figure, grid = plt.subplots(rows, 2, figsize=(11, 2.4 * rows), layout="constrained", squeeze=False)
    for axes, key in zip(grid.flat, shown, strict=False):
        axes.plot(*thinned(records, "step", key), color=LINE, linewidth=1.2)
        axes.set_title(CURVES.get(key, key), loc="left", fontsize=9)
        planned = {"tokens_per_s": plan.time.tokens_per_s, "step_s": plan.time.step} if plan and plan.time else {}
        middle = statistics.median(r[key] for r in records if r.get(key) is not None)
        if key in planned and planned[key] < 3 * middle:  # else the curve would be a line at the bottom
            axes.axhline(planned[key], color=_SAVED, linestyle="--", linewidth=1, label="planned")
            axes.legend(frameon=False, fontsize=8)
    for axes in list(grid.flat)[len(shown) :]:
        axes.set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("step")
    return figure


def over_time(history: History) -> Figure:
    """Steps and loss against the clock, with attempts, faults and checkpoints."""
    end = max(r["seconds"] for r in history.steps)
    unit, size = next((u, s) for u, s in (("hours", 3600), ("minutes", 60), ("seconds", 1)) if end >= 3 * s or s == 1)
    shown = ["step", *(["loss"] if any(r.get("loss") is not None for r in history.steps) else [])]
    figure, grid = plt.subplots(
        len(shown), 1, figsize=(11, 2.5 * len(shown)), sharex=True, layout="constrained", squeeze=False
    )
    upper, lower = grid[0, 0], grid[-1, 0]
    for axes, key in zip(grid.flat, shown, strict=True):
        for number, first, last in history.attempts:
            axes.axvspan(first / size, last / size, color=LINE, alpha=0.04 + 0.05 * (number % 2), linewidth=0)
        for life in history.lives():
            seconds, values = thinned(life, "seconds", key)
            axes.plot([s / size for s in seconds], values, color=LINE, linewidth=1.2)
        axes.set_title(key, loc="left", fontsize=9)
        _mark(axes, history, size)
    for number, first, _ in history.attempts:
        upper.annotate(f"attempt {number}", (first / size, 1), xycoords=("data", "axes fraction"), fontsize=7, va="top")
    lower.set_xlabel(f"{unit} since it was submitted")
    handles, labels = upper.get_legend_handles_labels()
    upper.legend(handles, labels, frameon=False, fontsize=8, loc="lower right")
    return figure


def _mark(axes: Axes, history: History, size: float) -> None:
    saved = [m.seconds / size for m in history.marks if m.kind == "checkpoint"]
    bottom = axes.get_xaxis_transform()
    axes.plot(saved, [0.03] * len(saved), "|", color=_SAVED, markersize=9, transform=bottom, label="checkpoint")
    for kind, (colour, sign) in _MARKED.items():
        at = [m.seconds / size for m in history.marks if m.kind == kind]
        for moment in at if kind == "fault" else []:
            axes.axvline(moment, color=colour, linewidth=0.8, alpha=0.6)
        if at:
            axes.plot(at, [0.06] * len(at), sign, color=colour, transform=bottom, label=kind)


def goodput(ledger: Ledger) -> Figure:
    """One bar whose parts add up to the wall time."""
    figure, axes = plt.subplots(figsize=(11, 1.4), layout="constrained")
    left = 0.0
    for name, (key, colour) in _PARTS.items():
        value = getattr(ledger, key)
        share = value / ledger.wall_s
        axes.barh([0], [value], left=left, color=colour, label=f"{name}: {value:,.1f} s, {share:.1%}")
        left += value
    axes.set_yticks([])
    axes.set_xlim(0, ledger.wall_s)
    axes.set_xlabel("seconds")
    axes.grid(False)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    return figure


def to_svg(figure: Figure, name: str) -> str:
    """The chart as SVG to stand in a page; ids are made its own, so that several may stand in one."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{name}-", svg)
    return re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", svg, count=1)
