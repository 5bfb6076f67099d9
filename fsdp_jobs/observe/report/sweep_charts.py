"""The charts of a sweep: what its jobs have reached by what was swept. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matplotlib import colormaps
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator

from fsdp_jobs.observe.report.charts import FAULT, LINE
from fsdp_jobs.sweeps.show import swept_keys, values_of
from fsdp_jobs.sweeps.table import Row, Sweep

_DECADE = 10.0  # values that lie further apart than this factor are drawn on a logarithmic axis
_MOST_TICKS = 6  # values that are named on an axis of parallel coordinates
_SHORT = 22  # letters of a value that is a word


@dataclass
class Scale:
    """How the values of a key lie on an axis: numbers as they are or by their logarithm, words side by side."""

    key: str
    values: list[str]  # all there are, as written
    is_log: bool = False
    words: dict[str, int] | None = None  # word -> place

    @classmethod
    def of(cls, key: str, values: Sequence[str]) -> Scale:
        numbers = [_number(v) for v in values]
        if any(n is None for n in numbers):
            return cls(key, list(values), words={v: i for i, v in enumerate(dict.fromkeys(values))})
        found = [n for n in numbers if n is not None]
        is_log = min(found) > 0 and max(found) / min(found) >= _DECADE
        return cls(key, list(values), is_log)

    def place(self, value: str) -> float:
        """Where a value lies, in units of its axis."""
        if self.words is not None:
            return float(self.words[value])
        number = _number(value)
        assert number is not None
        return math.log10(number) if self.is_log else number

    def ticks(self) -> list[tuple[float, str]]:
        """(place, text) of the values that are named: all, or some where they are many."""
        distinct = sorted(dict.fromkeys(self.values), key=self.place)
        if len(distinct) > _MOST_TICKS and self.words is None:
            low, high = self.place(distinct[0]), self.place(distinct[-1])
            places = [low + i * (high - low) / (_MOST_TICKS - 1) for i in range(_MOST_TICKS)]
            return [(place, f"{10**place if self.is_log else place:.4g}") for place in places]
        return [(self.place(v), _short(v) if self.words is not None else f"{_number(v):g}") for v in distinct]


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _short(word: str) -> str:
    return word if len(word) <= _SHORT else f"{word[: _SHORT - 3]}..."


def sweep_charts(sweep: Sweep) -> Iterator[tuple[str, str, Figure]]:
    """(file name, title, chart) of what a sweep can show; rows without an objective are not drawn."""
    rows = [row for row in sweep.jobs if row.objective is not None and math.isfinite(row.objective)]
    keys = swept_keys(sweep)
    scales = []
    for key in keys:
        mine = [values[key] for row in rows if key in (values := values_of(row))]
        if mine:
            scales.append(Scale.of(key, mine))
    if rows and scales:
        yield "keys", f"{sweep.objective} over each key", _over_keys(sweep, rows, scales)
        whole = [row for row in rows if all(scale.key in values_of(row) for scale in scales)]
        if len(scales) >= 2 and whole:
            yield "parallel", "All keys together: a line a job", _parallel(sweep, whole, scales)


def _over_keys(sweep: Sweep, rows: Sequence[Row], scales: Sequence[Scale]) -> Figure:
    columns = min(3, len(scales))
    lines = -(-len(scales) // columns)
    figure, grid = plt.subplots(lines, columns, figsize=(11, 3 * lines), layout="constrained", squeeze=False)
    best = sweep.best()
    for axes, scale in zip(grid.flat, scales, strict=False):
        for done in (True, False):
            mine = [r for r in rows if (r.state == "done") == done and scale.key in values_of(r)]
            places = [scale.place(values_of(r)[scale.key]) for r in mine]
            fill = LINE if done else "none"
            axes.scatter(places, [r.objective for r in mine], s=28, facecolors=fill, edgecolors=LINE, alpha=0.8)
        if best is not None and scale.key in values_of(best):
            place = scale.place(values_of(best)[scale.key])
            axes.scatter([place], [best.objective], s=130, marker="*", color=FAULT, zorder=3)
        _name_ticks(axes, scale)
        axes.set_title(f"{scale.key}{' (log)' if scale.is_log else ''}", loc="left", fontsize=9)
    for axes in grid[:, 0]:
        axes.set_ylabel(sweep.objective)
    for axes in list(grid.flat)[len(scales) :]:
        axes.set_visible(False)
    return figure


def _name_ticks(axes: Axes, scale: Scale) -> None:
    ticks = scale.ticks()
    long = scale.words is not None and sum(len(text) for _, text in ticks) > 36
    axes.set_xticks([place for place, _ in ticks], [text for _, text in ticks], rotation=30 if long else 0)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    if scale.words is not None:
        axes.set_xlim(-0.5, len(scale.words) - 0.5)


def _parallel(sweep: Sweep, rows: Sequence[Row], scales: Sequence[Scale]) -> Figure:
    """A vertical axis a key and one for the objective, which also gives the colour: the darker the better."""
    reached = Scale(sweep.objective, [str(row.objective) for row in rows])
    stand = [*scales, reached]
    figure, axes = plt.subplots(figsize=(11, 4), layout="constrained")
    objectives = [row.objective or 0.0 for row in rows]
    colour = Normalize(min(objectives), max(objectives))
    map_ = colormaps["viridis" if sweep.direction == "minimize" else "viridis_r"]
    best = sweep.best()
    for row in sorted(rows, key=lambda r: r is best):  # the best one on top
        values = {**values_of(row), sweep.objective: str(row.objective)}
        heights = [_height(scale, scale.place(values[scale.key])) for scale in stand]
        shade, width = (FAULT, 2.6) if row is best else (map_(colour(row.objective or 0.0)), 1.1)
        axes.plot(range(len(stand)), heights, color=shade, linewidth=width, alpha=0.8)
    for x, scale in enumerate(stand):
        axes.axvline(x, color="#444444", linewidth=0.8)
        for place, text in scale.ticks():
            box = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.8}
            axes.annotate(text, (x, _height(scale, place)), (5, 0), textcoords="offset points", va="center", bbox=box)
    axes.set_xticks(range(len(stand)), [scale.key for scale in stand])
    axes.set_xlim(-0.1, len(stand) - 0.6)
    axes.set_yticks([])
    axes.grid(False)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    return figure


def _height(scale: Scale, place: float) -> float:
    """Between 0 and 1."""
    places = [scale.place(value) for value in scale.values]
    low, high = min(places), max(places)
    return (place - low) / (high - low) if high > low else 0.5
