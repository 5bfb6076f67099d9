"""Write a sweep's report as one HTML file: a table of its jobs, and charts of the objective over each key. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from fsdp_jobs.pages.charts import FAULT, LINE, grid, to_svgs
from fsdp_jobs.pages.page import render
from fsdp_jobs.run.directory import write_atomic
from fsdp_jobs.sweeps.show import counts, number
from fsdp_jobs.sweeps.table import Row, Sweep

_DECADE = 10.0  # values further apart than this factor are drawn on a logarithmic axis
_MAX_TICKS = 6  # labelled values of a numeric axis
_MAX_LETTERS = 22  # of the label of a word


def write_sweep_report(sweep: Sweep) -> Path:
    """Write `report.html` into the sweep's folder."""
    content = {"counts": counts(sweep.jobs), "best": sweep.best(), "rows": sorted(sweep.jobs, key=sweep.rank)}
    charts, file = to_svgs(sweep_charts(sweep)), sweep.folder / "report.html"
    template = "report.html.j2"
    write_atomic(
        file, render(__package__, template, name=sweep.name, sweep=sweep, number=number, charts=charts, **content)
    )
    return file


@dataclass(frozen=True)
class Scale:
    """The axis of a key: numbers as they are or by their logarithm, words side by side."""

    key: str
    places: dict[str, float]  # value as written -> its place on the axis
    is_log: bool = False
    has_words: bool = False

    @classmethod
    def of(cls, key: str, values: Sequence[str]) -> Scale:
        numbers = {value: _number(value) for value in values}
        if not all(map(math.isfinite, numbers.values())):
            return cls(key, {value: float(i) for i, value in enumerate(numbers)}, has_words=True)
        low, high = min(numbers.values()), max(numbers.values())
        if low > 0 and high / low >= _DECADE:
            return cls(key, {value: math.log10(number) for value, number in numbers.items()}, is_log=True)
        return cls(key, numbers)

    @property
    def title(self) -> str:
        return f"{self.key} (log)" if self.is_log else self.key

    def ticks(self) -> list[tuple[float, str]]:
        """Return (place, label) of all values, or of some where numbers are many."""
        if self.has_words:
            return [(at, _shortened(value)) for value, at in self.places.items()]
        places, digits = sorted(set(self.places.values())), 6
        if len(places) > _MAX_TICKS:
            step = (places[-1] - places[0]) / (_MAX_TICKS - 1)
            places, digits = [places[0] + i * step for i in range(_MAX_TICKS)], 4
        return [(at, f"{10**at if self.is_log else at:.{digits}g}") for at in places]

    def height(self, place: float) -> float:
        """Scale a place to 0 ... 1."""
        low, high = min(self.places.values()), max(self.places.values())
        return (place - low) / (high - low) if high > low else 0.5


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _shortened(word: str) -> str:
    return word if len(word) <= _MAX_LETTERS else f"{word[: _MAX_LETTERS - 3]}..."


def sweep_charts(sweep: Sweep) -> Iterator[tuple[str, str, Figure]]:
    """Yield (file name, title, chart); rows without an objective are not drawn."""
    rows = [row for row in sweep.jobs if row.is_measured]
    columns = {key: [row.values[key] for row in rows if key in row.values] for key in sweep.keys}
    scales = [Scale.of(key, values) for key, values in columns.items() if values]
    if scales:
        yield "keys", f"{sweep.objective} over each key", _over_keys(sweep, rows, scales)
    complete = [row for row in rows if all(scale.key in row.values for scale in scales)]
    if len(scales) >= 2 and complete:
        yield "parallel", "All keys together: one line per job", _parallel(sweep, complete, scales)


def _over_keys(sweep: Sweep, rows: Sequence[Row], scales: Sequence[Scale]) -> Figure:
    """Draw a chart per key; a job that is not done is a ring, the best one a star."""
    columns = min(3, len(scales))
    figure, axes_of = grid([scale.title for scale in scales], columns, height=3)
    best = sweep.best()
    for axes, scale in zip(axes_of, scales, strict=True):
        for row in rows:
            if scale.key not in row.values:
                continue
            point = (scale.places[row.values[scale.key]], row.objective or 0.0)
            fill = LINE if row.state == "done" else "none"
            axes.scatter(*point, s=28, facecolors=fill, edgecolors=LINE, alpha=0.8)
            if row is best:
                axes.scatter(*point, s=130, marker="*", color=FAULT, zorder=3)
        _draw_ticks(axes, scale)
    for axes in axes_of[::columns]:
        axes.set_ylabel(sweep.objective)
    return figure


def _draw_ticks(axes: Axes, scale: Scale) -> None:
    ticks = scale.ticks()
    is_long = scale.has_words and sum(len(label) for _, label in ticks) > 36
    axes.set_xticks([at for at, _ in ticks], [label for _, label in ticks], rotation=30 if is_long else 0)
    if scale.has_words:
        axes.set_xlim(-0.5, len(scale.places) - 0.5)


def _parallel(sweep: Sweep, rows: Sequence[Row], scales: Sequence[Scale]) -> Figure:
    """Draw an axis per key and one for the objective, which gives the colour: the darker the better."""
    objectives = {str(row.objective): row.objective or 0.0 for row in rows}
    scales = [*scales, Scale(sweep.objective, objectives)]
    colours = colormaps["viridis" if sweep.direction == "minimize" else "viridis_r"]
    shade = Normalize(min(objectives.values()), max(objectives.values()))
    figure, (axes,) = grid([""], columns=1, height=4)
    best = sweep.best()
    for row in sorted(rows, key=lambda row: row is best):  # the best one on top
        values = {**row.values, sweep.objective: str(row.objective)}
        heights = [scale.height(scale.places[values[scale.key]]) for scale in scales]
        colour, width = (FAULT, 2.6) if row is best else (colours(shade(row.objective or 0.0)), 1.1)
        axes.plot(range(len(scales)), heights, color=colour, linewidth=width, alpha=0.8)
    box = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.8}
    for x, scale in enumerate(scales):
        axes.axvline(x, color="#444444", linewidth=0.8)
        for at, label in scale.ticks():
            axes.annotate(label, (x, scale.height(at)), (5, 0), textcoords="offset points", va="center", bbox=box)
    axes.set_xticks(range(len(scales)), [scale.key for scale in scales])
    axes.set_xlim(-0.1, len(scales) - 0.6)
    axes.set_yticks([])
    axes.grid(False)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    return figure
