"""Draw a plan as SVG: nodes and ranks coloured by shard group."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from fsdp_jobs.plan.plan import Plan
from fsdp_jobs.plan.render import Row, device_of, rows_of, span, summary_of, title_of
from fsdp_jobs.run.table import listed, size

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")  # Paul Tol's bright scheme
MOST_NODES_DRAWN = 64  # more are condensed: one row per leaf switch
CELL, LINE, LETTER = 22, 26, 7  # pixels of a rank's square, from one row to the next, and of a letter at most


def to_svg(plan: Plan) -> str:
    """Draw nodes and ranks coloured by shard group, in one file without references."""
    condensed = len(plan.nodes) > MOST_NODES_DRAWN
    rows = rows_of(plan, MOST_NODES_DRAWN)
    left, top = 100 + LETTER * max(len(row.nodes) for row in rows), 64
    bottom = top + LINE * len(rows)
    summary = summary_of(plan)
    if plan.memory is not None:
        fits = "fits" if plan.fits else "does not fit"
        summary = f"{fits}: {size(plan.memory.total)} of {size(plan.usable_bytes)} per {device_of(plan)}; {summary}"
    width = max(left + (700 if condensed else plan.ranks_per_node * CELL), 12 + LETTER * len(summary)) + 20
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 56}"'
        f' width="{width}" height="{bottom + 56}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{bottom + 56}" fill="white"/>',
        _svg_text(12, 24, title_of(plan), 'font-size="16" font-weight="bold"'),
        _svg_text(12, 44, summary, 'fill="#555"'),
    ]
    for y, row in zip(range(top, bottom, LINE), rows, strict=True):
        out += [_svg_text(12, y + 15, row.leaf, 'fill="#555"'), _svg_text(84, y + 15, row.nodes)]
        out += _stripes(row, left, y) if condensed else _squares(row, left, y)
    if plan.spares:
        out.append(_svg_text(84, bottom + 15, f"spare: {listed(plan.spares)}", 'fill="#777"'))
    return "\n".join([*out, "</svg>", ""])


def _svg_text(x: float, y: int, text: str, style: str = "") -> str:
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'


def _squares(row: Row, x: int, y: int) -> Iterator[str]:
    """Draw a square per rank."""
    side = CELL - 2
    for group, first, last in row.runs:
        for rank in range(first, last + 1):
            at, colour = x + (rank - row.runs[0][1]) * CELL, COLOURS[group % len(COLOURS)]
            yield f'<rect x="{at}" y="{y}" width="{side}" height="{side}" rx="3" fill="{colour}"/>'
            yield _svg_text(at + side / 2, y + 14, f"{rank}", 'font-size="9" fill="white" text-anchor="middle"')


def _stripes(row: Row, x: int, y: int) -> Iterator[str]:
    """Draw a stripe per shard group."""
    drawn = row.runs[:48]
    for i, (group, _, _) in enumerate(drawn):
        yield f'<rect x="{x + 9 * i}" y="{y}" width="8" height="{CELL - 4}" fill="{COLOURS[group % len(COLOURS)]}"/>'
    text = f"ranks {span(row.runs[0][1], row.runs[-1][2])}, {len(row.runs)} groups"
    yield _svg_text(x + 9 * len(drawn) + 8, y + 14, text, 'fill="#555"')
