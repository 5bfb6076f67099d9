"""Show a plan: nodes and ranks by shard group, tables, reasons; in a terminal and as SVG."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import groupby

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from fsdp_jobs.plan.memory import Memory, size
from fsdp_jobs.plan.plan import Plan

TERMINAL = ("cyan", "magenta", "green", "yellow", "blue", "red")
SVG = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")  # Paul Tol's bright scheme
# More nodes are condensed: one row per leaf switch.
MOST_NODES_LISTED = 16  # in a terminal
MOST_NODES_DRAWN = 64  # in the SVG
MOST_OPTIONS_SHOWN = 10
CELL, LINE = 22, 26  # pixels of a rank's square, and from one row to the next


@dataclass(frozen=True)
class _Row:
    """One drawn line: consecutive nodes under one leaf switch, and their ranks by shard group."""

    leaf: str  # empty when the row above is under the same
    nodes: str
    runs: list[tuple[int, int, int]]  # shard group, its first and its last rank on these nodes


def render(plan: Plan) -> RenderableType:
    """Render the whole plan for a terminal of 80 columns or more."""
    head = Text()
    parts: list[RenderableType] = [head, _nodes(plan), Text()]
    if plan.memory is not None:
        head.append("FITS  " if plan.fits else "DOES NOT FIT  ", "bold green" if plan.fits else "bold red")
        parts += [_memory(plan, plan.memory), Text(), *_options(plan), Text()]
    head.append(_title(plan), "bold").append(f"\n{_summary(plan)}\n{plan.expected}\n")
    parts.append(Text("\n".join(f"- {r}" for r in plan.reasons)))
    if plan.remedies:
        lines = [f"- {' '.join(r.overrides)}   ({r.result})" for r in plan.remedies]
        parts.append(Panel("\n".join(lines), title="What would make it fit (each was planned)", border_style="yellow"))
    elif not plan.fits:
        parts.append(Text("No setting of this job and no number of nodes up to 4,096 was found to make it fit.", "red"))
    return Group(*parts)


def render_text(plan: Plan, width: int = 100) -> str:
    """Render the whole plan as plain text."""
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as captured:
        console.print(render(plan))
    return captured.get()


def _title(plan: Plan) -> str:
    layout, nodes = plan.layout, len(plan.nodes)
    replicas = f"{layout.replicas} replica{'s' if layout.replicas > 1 else ''}"
    where = f"{nodes} node{'s' if nodes > 1 else ''} x {plan.ranks_per_node} ranks"
    spares = f" + {len(plan.spares)} spare" if plan.spares else ""
    return f"{layout.strategy}: {replicas} x shard group of {layout.shard_group}, {where}{spares}"


def _summary(plan: Plan) -> str:
    time = plan.time
    if time is None:
        return f"on {plan.hardware}; memory and speed are not known: the model is the program's"
    seconds = f"{time.step:.3g} s" if time.step >= 1 else f"{time.step * 1e3:.3g} ms"
    return (
        f"{plan.parameters / 1e9:.3g} B parameters on {plan.hardware}; a step takes {seconds}: "
        f"{time.tokens_per_s:,.0f} tokens/s, {time.tokens_per_s_per_rank:,.0f} per GPU, MFU {time.mfu:.0%} (predicted)"
    )


def _rows(plan: Plan, most: int) -> list[_Row]:
    """Give each node a row; each leaf switch when there are more than `most` nodes."""
    by_leaf = groupby(range(len(plan.nodes)), plan.leaves.__getitem__ if len(plan.nodes) > most else None)
    rows, above = [], ""
    for first, *others in (list(indices) for _, indices in by_leaf):
        last, leaf, group = [first, *others][-1], plan.leaves[first], plan.layout.shard_group
        names = f"{plan.nodes[first]} .. {plan.nodes[last]} ({len(others) + 1})" if others else plan.nodes[first]
        low, high = first * plan.ranks_per_node, (last + 1) * plan.ranks_per_node - 1
        groups = range(low // group, high // group + 1)
        runs = [(g, max(low, g * group), min(high, (g + 1) * group - 1)) for g in groups]
        rows.append(_Row("" if leaf == above else leaf, names, runs))
        above = leaf
    return rows


def _nodes(plan: Plan) -> Table:
    """List the nodes with their ranks, coloured by shard group."""
    table = Table(
        Column("leaf" if any(plan.leaves) else "", style="dim"),
        "nodes",
        "ranks in shard groups",
        title="Nodes and ranks by shard group",
        title_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    rows, most = _rows(plan, MOST_NODES_LISTED), MOST_NODES_LISTED
    for i, row in enumerate(rows):
        if len(rows) <= most or not most // 2 <= i < len(rows) - most // 4:
            table.add_row(row.leaf, row.nodes, _ranks(plan, row))
        elif i == most // 2:
            table.add_row("...", f"{len(rows) - most // 2 - most // 4} more leaves", "")
    more = [f"and {len(plan.spares) - 4} more"] if len(plan.spares) > 4 else []
    for name in [*plan.spares[:4], *more]:
        table.add_row("", name, Text("spare", "dim"))
    return table


def _ranks(plan: Plan, row: _Row) -> Text:
    text, runs = Text(), row.runs
    if plan.layout.strategy == "no_shard":
        return text.append(f"{_span(runs[0][1], runs[-1][2])} each hold everything", TERMINAL[0])
    for i, (group, first, last) in enumerate(runs):
        if len(runs) <= 5 or i < 3 or i == len(runs) - 1:
            text.append(f"[{group}: {_span(first, last)}]", TERMINAL[group % len(TERMINAL)]).append(" ")
        elif i == 3:
            text.append(f".. {len(runs) - 4} more .. ", "dim")
    return text


def _span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}-{last}"


def _memory(plan: Plan, memory: Memory) -> Table:
    table = Table(
        "part",
        Column("size", justify="right"),
        Column("of usable", justify="right"),
        "",
        title=f"Peak memory per GPU: {memory.moment}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    usable = max(1, plan.usable_bytes)
    for name, value in memory.parts().items():
        if value:
            bar = Text("█" * min(40, round(40 * value / usable)), "cyan")
            table.add_row(name, size(value), f"{value / usable:.0%}", bar)
    ratio, of = f"{memory.total / usable:.0%}", f"of {size(plan.usable_bytes)} usable"
    table.add_row("total", size(memory.total), ratio, of, style="bold green" if plan.fits else "bold red")
    if memory.host:
        table.add_row("host, per rank", size(memory.host), "", "offloaded state")
    return table


def _options(plan: Plan) -> tuple[Table, Table]:
    """Table the option taken, then those that fit, fastest first, then the rest by memory; and the reasons."""
    numbers = (Column(name, justify="right", no_wrap=True) for name in ("memory", "within", "between", "tokens/s"))
    table = Table(
        Column("option", no_wrap=True),
        *numbers,
        title=f"Options considered ({len(plan.considered)}); bytes that a node sends per step over {plan.backend}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    why = Table.grid(padding=(0, 2))
    ordered = sorted(
        plan.considered, key=lambda c: (not c.taken, not c.fits, -c.tokens_per_s if c.fits else c.memory_bytes)
    )
    for c in ordered[:MOST_OPTIONS_SHOWN]:
        sizes = (c.memory_bytes, c.intra_node_bytes[plan.backend], c.inter_node_bytes[plan.backend])
        style = ("bold green" if c.fits else "bold red") if c.taken else "" if c.fits else "dim"
        table.add_row(c.name, *map(size, sizes), f"{c.tokens_per_s:,.0f}", style=style)
        why.add_row(c.name, Text(c.why, "bold" if c.taken else ""))
    return table, why


def to_svg(plan: Plan) -> str:
    """Draw nodes and ranks coloured by shard group, in one file without references."""
    condensed = len(plan.nodes) > MOST_NODES_DRAWN
    rows = _rows(plan, MOST_NODES_DRAWN)
    left, top = 100 + 7 * max(len(row.nodes) for row in rows), 64
    width = left + (700 if condensed else max(520, plan.ranks_per_node * CELL)) + 20
    bottom = top + LINE * len(rows)
    summary = _summary(plan)
    if plan.memory is not None:
        fits = "fits" if plan.fits else "does not fit"
        summary = f"{fits}: {size(plan.memory.total)} of {size(plan.usable_bytes)} per GPU; {summary}"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 56}"'
        f' width="{width}" height="{bottom + 56}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{bottom + 56}" fill="white"/>',
        _svg_text(12, 24, _title(plan), 'font-size="16" font-weight="bold"'),
        _svg_text(12, 44, summary, 'fill="#555"'),
    ]
    for y, row in zip(range(top, bottom, LINE), rows, strict=True):
        out += [_svg_text(12, y + 15, row.leaf, 'fill="#555"'), _svg_text(84, y + 15, row.nodes)]
        out += _stripes(row, left, y) if condensed else _squares(row, left, y)
    if plan.spares:
        names = ", ".join(plan.spares[:6]) + (", ..." if len(plan.spares) > 6 else "")
        out.append(_svg_text(84, bottom + 15, f"spare: {names}", 'fill="#777"'))
    return "\n".join([*out, "</svg>", ""])


def _svg_text(x: float, y: int, text: str, style: str = "") -> str:
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'


def _squares(row: _Row, x: int, y: int) -> Iterator[str]:
    """Draw a square per rank."""
    side = CELL - 2
    for group, first, last in row.runs:
        for rank in range(first, last + 1):
            at, colour = x + (rank - row.runs[0][1]) * CELL, SVG[group % len(SVG)]
            yield f'<rect x="{at}" y="{y}" width="{side}" height="{side}" rx="3" fill="{colour}"/>'
            yield _svg_text(at + side / 2, y + 14, f"{rank}", 'font-size="9" fill="white" text-anchor="middle"')


def _stripes(row: _Row, x: int, y: int) -> Iterator[str]:
    """Draw a stripe per shard group."""
    drawn = row.runs[:48]
    for i, (group, _, _) in enumerate(drawn):
        yield f'<rect x="{x + 9 * i}" y="{y}" width="8" height="{CELL - 4}" fill="{SVG[group % len(SVG)]}"/>'
    text = f"ranks {_span(row.runs[0][1], row.runs[-1][2])}, {len(row.runs)} groups"
    yield _svg_text(x + 9 * len(drawn) + 8, y + 14, text, 'fill="#555"')
