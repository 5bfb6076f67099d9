"""Draw a run's charts: curves over steps and over time, and where the time went. No torch."""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from markupsafe import Markup
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fsdp_jobs.observe.report.history import History
from fsdp_jobs.plan.plan import Plan
from fsdp_jobs.run.goodput import Goodput

_WIDTH = 11.0  # inches of every chart
_LINE, _FAULT = "#1f5fa8", "#c0392b"

_CURVES = {
    "loss": "loss",
    "lr": "learning rate",
    "grad_norm": "gradient norm before clipping",
    "tokens_per_s": "tokens/s",
    "mfu": "MFU",
    "step_s": "seconds per step",
}
_NO_CURVES = {"step", "time", "seconds", "attempt", "data_s", "checkpoint_stall_s", "useful_s", "stall_s", "lost_s"}
_NO_CURVES |= {"recover_s", "capture_s", "captures", "tokens_per_s_per_gpu", "loss_scale", "peak_memory_gib"}
_MAX_OWN_CURVES = 12  # of keys that a user's program logs: what is legible on one page
_CHECKPOINT = "#7f8c8d"
_MARKS = {"fault": (_FAULT, "x"), "damaged checkpoint": ("#d35400", "D"), "resumed": ("#2e8b57", "^")}
_MARKS["loss spike"] = ("#8e44ad", "*")
_PARTS = {
    "useful": ("useful_s", "#2e8b57"),
    "checkpoint stall": ("stall_s", "#d4a017"),
    "lost and repeated": ("lost_s", _FAULT),
    "recovering": ("recover_s", "#d35400"),
    "queue": ("queue_s", "#95a5a6"),
    "starting, stopping": ("start_s", "#6c8ebf"),
}


plt.style.use(Path(__file__).with_name("charts.mplstyle"))


def charts(history: History, goodput: Goodput, plan: Plan | None) -> Iterator[tuple[str, str, Figure]]:
    """Yield (file name, title, chart) of everything the run has recorded."""
    if curves := _curves_of(history.steps):
        yield "steps", "Over steps", _over_steps(history, curves, plan)
    if history.steps:
        yield "time", "Over time", _over_time(history)
    if goodput.wall_s:
        yield "goodput", f"Where the time went: {goodput.fraction:.0%} useful", _goodput(goodput)


def _curves_of(records: list[dict[str, Any]]) -> list[str]:
    """Keys to draw: the trainer's, then those that a user's program has logged numbers for."""
    numbers = {k for r in records for k, v in r.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    own = sorted(numbers - _CURVES.keys() - _NO_CURVES)
    return [key for key in _CURVES if key in numbers] + own[:_MAX_OWN_CURVES]


def _over_steps(history: History, curves: list[str], plan: Plan | None) -> Figure:
    """Draw the newest record of each step, beside what was planned."""
    records = history.newest()
    planned = {"tokens_per_s": plan.time.tokens_per_s, "step_s": plan.time.step} if plan and plan.time else {}
    figure, axes_of = _grid([_CURVES.get(key, key) for key in curves], columns=2, height=2.4)
    for axes, key in zip(axes_of, curves, strict=True):
        steps, values = zip(*[(r["step"], r[key]) for r in records if r.get(key) is not None], strict=True)
        axes.plot(steps, values, color=_LINE, linewidth=1.2)
        if key in planned and planned[key] < 3 * statistics.median(values):  # else the curve is a line at the bottom
            axes.axhline(planned[key], color=_CHECKPOINT, linestyle="--", linewidth=1, label="planned")
            axes.legend()
    for axes in axes_of[-2:]:
        axes.set_xlabel("step; of a long run, about 2,000 of them are drawn")
    return figure


def _over_time(history: History) -> Figure:
    """Draw steps and loss against the clock, with attempts, faults and checkpoints."""
    end = max(r["seconds"] for r in history.steps)
    unit, size = next((u, s) for u, s in (("hours", 3600), ("minutes", 60), ("seconds", 1)) if end >= 3 * s or s == 1)
    curves = [key for key in ("step", "loss") if any(r.get(key) is not None for r in history.steps)]
    figure, axes_of = _grid(curves, columns=1, height=2.5, sharex=True)
    for axes, key in zip(axes_of, curves, strict=True):
        for number, first, last in history.attempts:
            axes.axvspan(first / size, last / size, color=_LINE, alpha=0.04 + 0.05 * (number % 2), linewidth=0)
        for stretch in history.stretches():
            known = [r for r in stretch if r.get(key) is not None]
            axes.plot([r["seconds"] / size for r in known], [r[key] for r in known], color=_LINE, linewidth=1.2)
        _draw_marks(axes, {kind: [s / size for s in at] for kind, at in history.marks.items()})
    for number, first, _ in history.attempts:
        place = (first / size, 1)
        axes_of[0].annotate(f"attempt {number}", place, xycoords=("data", "axes fraction"), fontsize=7, va="top")
    axes_of[-1].set_xlabel(f"{unit} since the first submission")
    axes_of[0].legend(loc="lower right")
    return figure


def _draw_marks(axes: Axes, marks: dict[str, list[float]]) -> None:
    bottom = axes.get_xaxis_transform()
    saved = marks.get("checkpoint", [])
    axes.plot(saved, [0.03] * len(saved), "|", color=_CHECKPOINT, markersize=9, transform=bottom, label="checkpoint")
    for moment in marks.get("fault", []):
        axes.axvline(moment, color=_FAULT, linewidth=0.8, alpha=0.6)
    for kind, (colour, sign) in _MARKS.items():
        if at := marks.get(kind):
            axes.plot(at, [0.06] * len(at), sign, color=colour, transform=bottom, label=kind)


def _goodput(goodput: Goodput) -> Figure:
    """Draw one bar whose parts add up to the wall time."""
    figure, (axes,) = _grid([""], columns=1, height=1.4)
    left = 0.0
    for name, (key, colour) in _PARTS.items():
        value = getattr(goodput, key)
        axes.barh([0], [value], left=left, color=colour, label=f"{name}: {value:,.1f} s, {value / goodput.wall_s:.1%}")
        left += value
    axes.set_yticks([])
    axes.set_xlim(0, goodput.wall_s)
    axes.set_xlabel("seconds")
    axes.grid(False)
    axes.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    return figure


def _grid(titles: Sequence[str], columns: int, height: float, sharex: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure with one chart per title, in rows of so many columns, each `height` inches high."""
    rows = -(-len(titles) // columns)
    size = (_WIDTH, height * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, sharex=sharex, layout="constrained", squeeze=False)
    for chart, title in zip(axes.flat, titles, strict=False):
        chart.set_title(title)
    for unused in axes.flat[len(titles) :]:
        unused.set_visible(False)
    return figure, list(axes.flat[: len(titles)])


def to_svgs(charts: Iterable[tuple[str, str, Figure]]) -> list[tuple[str, Markup]]:
    """Return (title, SVG) of charts that are given as (name, title, figure); the figures are closed.

    Ids begin with the chart's name, so that several can stand in one page.
    """
    drawn = []
    for name, title, figure in charts:
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
        plt.close(figure)
        svg = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{name}-", file.getvalue().partition("<svg")[2])
        sized = re.sub(r' width="[^"]*" height="[^"]*"', "", svg, count=1)
        drawn.append((title, Markup(f'<svg role="img" aria-label="{escape(title)}"{sized}')))
    return drawn
