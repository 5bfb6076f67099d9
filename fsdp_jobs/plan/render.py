"""Show a plan: nodes and ranks by shard group, tables, reasons; in a terminal and as SVG."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fsdp_jobs.plan.memory import Memory
from fsdp_jobs.plan.plan import Plan

TERMINAL = ("cyan", "magenta", "green", "yellow", "blue", "red")
SVG = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")  # Paul Tol's bright scheme
MOST_NODES_DRAWN = 16  # more are condensed: one line per leaf
MOST_OPTIONS_SHOWN = 10


@dataclass(frozen=True)
class _Row:
    """One drawn line: consecutive nodes under one leaf."""

    leaf: str
    first: int  # indices in plan.nodes
    last: int


def render(plan: Plan) -> RenderableType:
    """Render the whole plan for a terminal of 80 columns or more."""
    parts: list[RenderableType] = [_headline(plan), _picture(plan)]
    if plan.memory is not None:
        parts += [_memory(plan, plan.memory), _options(plan)]
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


def size(n: float) -> str:
    """Format bytes in the largest unit that leaves at least 1: 15.2 GiB."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= scale:
            return f"{n / scale:.1f} {unit}"
    return f"{n:.0f} B"


def seconds(s: float) -> str:
    """Format a duration with three digits: 2.41 s, 18.3 ms."""
    return f"{s:.3g} s" if s >= 1 else f"{s * 1e3:.3g} ms"


def _nodes(plan: Plan) -> str:
    return f"{len(plan.nodes)} node{'s' if len(plan.nodes) > 1 else ''}"


def _headline(plan: Plan) -> Text:
    layout = plan.layout
    head = Text()
    if plan.memory is not None:
        head.append("FITS  " if plan.fits else "DOES NOT FIT  ", "bold green" if plan.fits else "bold red")
    head.append(f"{layout.strategy}", "bold")
    replicas = f"{layout.replicas} replica{'s' if layout.replicas > 1 else ''}"
    head.append(f": {replicas} x shard group of {layout.shard_group}, {_nodes(plan)} x {plan.ranks_per_node} ranks")
    if plan.spares:
        head.append(f" + {len(plan.spares)} spare")
    if plan.time is None:
        return head.append(f"\non {plan.hardware}; memory and speed are not known: the model is the program's\n")
    head.append(
        f"\n{plan.parameters / 1e9:.3g} B parameters on {plan.hardware}; "
        f"a step takes {seconds(plan.time.step)}: "
        f"{plan.time.tokens_per_s:,.0f} tokens/s, {plan.time.tokens_per_s_per_rank:,.0f} per GPU, "
        f"MFU {plan.time.mfu:.0%} (predicted)\n"
    )
    return head


def _rows(plan: Plan, most: int) -> Iterator[_Row]:
    """Group consecutive nodes by leaf, at most `most` in a row."""
    first = 0
    for i in range(1, len(plan.nodes) + 1):
        if i == len(plan.nodes) or plan.leaves[i] != plan.leaves[first] or i - first == most:
            yield _Row(plan.leaves[first], first, i - 1)
            first = i


def _groups_in(plan: Plan, row: _Row) -> list[tuple[int, int, int]]:
    """List shard group, first rank and last rank of each run of a row's ranks in one group."""
    size = plan.layout.shard_group
    first, last = row.first * plan.ranks_per_node, (row.last + 1) * plan.ranks_per_node - 1
    groups = range(first // size, last // size + 1)
    return [(g, max(first, g * size), min(last, (g + 1) * size - 1)) for g in groups]


def _span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}-{last}"


def _picture(plan: Plan) -> RenderableType:
    """Draw each node with its ranks, coloured by shard group; condensed when there are many nodes."""
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        title="Nodes and ranks by shard group",
        title_justify="left",
    )
    condensed = len(plan.nodes) > MOST_NODES_DRAWN
    table.add_column("leaf" if any(plan.leaves) else "", style="dim")
    table.add_column("nodes")
    table.add_column("ranks in shard groups")
    rows = list(_rows(plan, len(plan.nodes) if condensed else 1))
    shown = rows if len(rows) <= MOST_NODES_DRAWN else [*rows[: MOST_NODES_DRAWN // 2], *rows[-MOST_NODES_DRAWN // 4 :]]
    previous = ""
    for i, row in enumerate(shown):
        if len(shown) < len(rows) and i == MOST_NODES_DRAWN // 2:
            table.add_row("...", f"{len(rows) - len(shown)} more leaves", "")
        leaf, previous = ("" if row.leaf == previous else row.leaf), row.leaf
        names = plan.nodes[row.first] + (f" .. {plan.nodes[row.last]}" if row.last > row.first else "")
        count = f" ({row.last - row.first + 1})" if row.last > row.first else ""
        table.add_row(leaf, names + count, _groups_text(plan, row))
    for name in plan.spares[:4]:
        table.add_row("", name, Text("spare", "dim"))
    if len(plan.spares) > 4:
        table.add_row("", f"and {len(plan.spares) - 4} more", Text("spare", "dim"))
    return Group(table, Text())


def _groups_text(plan: Plan, row: _Row) -> Text:
    text = Text()
    if plan.layout.strategy == "no_shard":
        first, last = row.first * plan.ranks_per_node, (row.last + 1) * plan.ranks_per_node - 1
        return text.append(f"{_span(first, last)} each hold everything", TERMINAL[0])
    runs = _groups_in(plan, row)
    shown = runs if len(runs) <= 5 else [*runs[:3], runs[-1]]
    for i, (group, first, last) in enumerate(shown):
        if len(runs) > len(shown) and i == 3:
            text.append(f".. {len(runs) - 4} more .. ", "dim")
        text.append(f"[{group}: {_span(first, last)}]", TERMINAL[group % len(TERMINAL)])
        text.append(" ")
    return text


def _memory(plan: Plan, memory: Memory) -> RenderableType:
    table = Table(
        title=f"Peak memory per GPU: {memory.moment}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("part")
    table.add_column("size", justify="right")
    table.add_column("of usable", justify="right")
    table.add_column("")
    for name, value in memory.parts().items():
        if value:
            share = value / max(1, plan.usable_bytes)
            table.add_row(name, size(value), f"{share:.0%}", Text("█" * min(40, round(40 * share)), "cyan"))
    total = memory.total
    style = "bold green" if plan.fits else "bold red"
    ratio = total / max(1, plan.usable_bytes)
    table.add_row("total", size(total), f"{ratio:.0%}", f"of {size(plan.usable_bytes)} usable", style=style)
    if memory.host:
        table.add_row("host, per rank", size(memory.host), "", "offloaded state")
    return Group(table, Text())


def _options(plan: Plan) -> RenderableType:
    """Table the option taken, then those that fit, fastest first, then the rest by memory."""
    title = f"Options considered ({len(plan.considered)}); bytes that a node sends per step over {plan.backend}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name, justify in (("option", "left"), ("memory", "right"), ("within", "right"), ("between", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("tokens/s", justify="right", no_wrap=True)
    ordered = sorted(
        plan.considered, key=lambda c: (not c.taken, not c.fits, -c.tokens_per_s if c.fits else c.memory_bytes)
    )
    shown = ordered[:MOST_OPTIONS_SHOWN]
    for c in shown:
        table.add_row(
            c.name,
            size(c.memory_bytes),
            size(c.intra_node_bytes[plan.backend]),
            size(c.inter_node_bytes[plan.backend]),
            f"{c.tokens_per_s:,.0f}",
            style=("bold green" if c.fits else "bold red") if c.taken else "" if c.fits else "dim",
        )
    why = Table.grid(padding=(0, 2))
    for c in shown:
        why.add_row(c.name, Text(c.why, "bold" if c.taken else ""))
    return Group(table, why, Text())


def to_svg(plan: Plan) -> str:
    """Draw nodes and ranks coloured by shard group, in one file without references."""
    cell, top, line = 22, 64, 26
    condensed = len(plan.nodes) > 64
    rows = list(_rows(plan, len(plan.nodes) if condensed else 1))
    longest = max(len(n) for n in plan.nodes) * (2 if condensed else 1) + (4 if condensed else 0)
    left = 84 + 7 * longest + 16
    per_row = 1 if condensed else plan.ranks_per_node
    width = left + (700 if condensed else max(520, per_row * cell)) + 20
    height = top + line * (len(rows) + (1 if plan.spares else 0)) + 30
    layout = plan.layout
    groups = f"{layout.replicas} x shard group of {layout.shard_group}"
    title = f"{layout.strategy}: {groups} on {_nodes(plan)}"
    subtitle = f"{plan.hardware}; memory and speed are not known"
    if plan.memory is not None and plan.time is not None:
        title += ", fits" if plan.fits else ", does not fit"
        subtitle = (
            f"{plan.parameters / 1e9:.3g} B parameters, {plan.hardware}; {size(plan.memory.total)} of "
            f"{size(plan.usable_bytes)} per GPU; {plan.time.tokens_per_s:,.0f} tokens/s predicted"
        )
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="12" y="24" font-size="16" font-weight="bold">{escape(title)}</text>',
        f'<text x="12" y="44" fill="#555">{escape(subtitle)}</text>',
    ]
    previous = None
    for i, row in enumerate(rows):
        y = top + i * line
        if row.leaf and row.leaf != previous:
            out.append(f'<text x="12" y="{y + 15}" fill="#555">{escape(row.leaf)}</text>')
        previous = row.leaf
        name = plan.nodes[row.first] + (f" .. {plan.nodes[row.last]}" if row.last > row.first else "")
        out.append(f'<text x="84" y="{y + 15}">{escape(name)}</text>')
        out += _svg_cells(plan, row, left, y, cell, condensed)
    if plan.spares:
        names = escape(", ".join(plan.spares[:6]) + (", ..." if len(plan.spares) > 6 else ""))
        out.append(f'<text x="84" y="{top + len(rows) * line + 15}" fill="#777">spare: {names}</text>')
    return "\n".join([*out, "</svg>", ""])


def _svg_cells(plan: Plan, row: _Row, x: int, y: int, cell: int, condensed: bool) -> Iterator[str]:
    """Draw a square per rank, or for all ranks under a leaf one bar with a stripe per shard group."""
    runs = _groups_in(plan, row)
    first, last = runs[0][1], runs[-1][2]
    if condensed:
        for i, (group, _, _) in enumerate(runs[:48]):
            colour = SVG[group % len(SVG)]
            yield f'<rect x="{x + 9 * i}" y="{y}" width="8" height="{cell - 4}" fill="{colour}"/>'
        text = f"ranks {first}-{last}, {len(runs)} groups"
        yield f'<text x="{x + 9 * min(len(runs), 48) + 8}" y="{y + 14}" fill="#555">{text}</text>'
        return
    for rank in range(first, last + 1):
        colour, at = SVG[rank // plan.layout.shard_group % len(SVG)], x + (rank - first) * cell
        yield f'<rect x="{at}" y="{y}" width="{cell - 2}" height="{cell - 2}" rx="3" fill="{colour}"/>'
        style = 'font-size="9" fill="white" text-anchor="middle"'
        yield f'<text x="{at + (cell - 2) / 2}" y="{y + 14}" {style}>{rank}</text>'
