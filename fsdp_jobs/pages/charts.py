"""Style and grid of charts, and charts as SVG in a page, with matplotlib. No torch."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from markupsafe import Markup
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

LINE, FAULT = "#1f5fa8", "#c0392b"
_WIDTH = 11.0  # inches of every chart

plt.style.use(Path(__file__).with_name("charts.mplstyle"))


def grid(titles: Sequence[str], columns: int, height: float, sharex: bool = False) -> tuple[Figure, list[Axes]]:
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
    """(title, SVG) of charts that are given as (name, title, figure); the figures are closed."""
    drawn = []
    for name, title, figure in charts:
        drawn.append((title, Markup(_to_svg(figure, name))))
        plt.close(figure)
    return drawn


def _to_svg(figure: Figure, name: str) -> str:
    """A chart for a page; its ids begin with its name, so that several can stand in one page."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{name}-", svg)
    return re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", svg, count=1)
