"""Show a plan in a terminal: nodes and ranks by shard group, tables, reasons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from fsdp_jobs.plan.memory import Memory
from fsdp_jobs.plan.plan import Plan
from fsdp_jobs.run.table import counted, duration, size

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
MOST_NODES_LISTED = 16  # more are condensed: one row per leaf switch
MOST_OPTIONS_SHOWN = 10
LONG_STEP_S = 1000.0  # a step from here on is shown in minutes, hours and days


@dataclass(frozen=True)
class Row:
    """One drawn line: consecutive nodes under one leaf switch, and their ranks by shard group."""

    leaf: str  # empty when the row above is under the same
    nodes: str
    runs: list[tuple[int, int, int]]  # shard group, its first and its last rank on these nodes


def render(plan: Plan, in_brief: bool = False) -> RenderableType:
    """Render a plan for a terminal; in brief, its verdict, reasons and remedies, without the tables."""
    head = Text()
    if plan.memory is not None:
        head.append("FITS  " if plan.fits else "DOES NOT FIT  ", "bold green" if plan.fits else "bold red")
    head.append(title_of(plan), "bold").append(f"\n{summary_of(plan)}\n")
    if plan.time is not None:  # nothing is predicted of an unknown model
        head.append(f"{plan.expected}\n")
    parts: list[RenderableType] = [head, *([] if in_brief else _tables(plan))]
    parts.append(Text("\n".join(f"- {r}" for r in plan.reasons)))
    if plan.remedies:
        lines = [f"- {' '.join(r.overrides)}   ({r.result})" for r in plan.remedies]
        parts.append(Panel("\n".join(lines), title="What would make it fit (each was planned)", border_style="yellow"))
    elif not plan.fits:
        nodes = "" if plan.backend == "gloo" else " and no number of nodes up to 4,096"
        parts.append(Text(f"No setting of this job{nodes} was found to make it fit.", "red"))
    return Group(*parts)


def _tables(plan: Plan) -> Iterator[RenderableType]:
    yield from (_title("Nodes and ranks by shard group"), _nodes(plan), Text())
    if plan.memory is not None:
        yield _title(f"Peak memory per {device_of(plan)}, during: {plan.memory.moment}")
        yield from (_memory(plan, plan.memory), Text())
        sent = f"bytes that a node sends per step over {plan.backend}"
        yield _title(f"Options considered ({len(plan.considered)}); {sent}")
        yield from (*_options(plan), Text())


def device_of(plan: Plan) -> str:
    """Return the plan's word for the device of one rank."""
    return "GPU" if plan.backend == "nccl" else "rank"


def title_of(plan: Plan) -> str:
    layout, nodes = plan.layout, len(plan.nodes)
    where = f"{counted(nodes, 'node')} x {counted(plan.ranks_per_node, 'rank')}"
    spares = f" + {len(plan.spares)} spare" if plan.spares else ""
    groups = f"{counted(layout.replicas, 'replica')} x shard group of {layout.shard_group}"
    return f"{layout.strategy}: {groups}, {where}{spares}"


def summary_of(plan: Plan) -> str:
    time = plan.time
    if time is None:
        return f"on {plan.hardware}; memory and speed are not known: the model is the program's"
    share = f"{time.mfu:.0%}" if time.mfu >= 0.01 else "below 1%"
    mfu = f", MFU {share}" if plan.backend == "nccl" else ""
    step, weights = (float(f"{n:.3g}") for n in (time.step, plan.parameters))
    if step >= LONG_STEP_S:
        seconds = duration(time.step)
    else:
        seconds = f"{step:g} s" if step >= 1 else f"{step * 1e3:g} ms"
    parameters = f"{weights / 1e9:,g} B" if weights >= 1e9 else f"{weights / 1e6:g} M"
    tokens = time.tokens_per_s * time.step
    return (
        f"{parameters} parameters on {plan.hardware}; a step of {tokens:,.0f} tokens takes {seconds}: "
        f"{time.tokens_per_s:,.0f} tokens/s, {time.tokens_per_s_per_rank:,.0f} per {device_of(plan)}{mfu} (predicted)"
    )


def rows_of(plan: Plan, most: int) -> list[Row]:
    """Give each node a row; each leaf switch when there are more than `most` nodes."""
    by_leaf = groupby(range(len(plan.nodes)), plan.leaves.__getitem__ if len(plan.nodes) > most else None)
    rows, above = [], ""
    for _, indices in by_leaf:
        under = list(indices)
        first, last = under[0], under[-1]
        leaf, group = plan.leaves[first], plan.layout.shard_group
        names = f"{plan.nodes[first]} .. {plan.nodes[last]} ({len(under)})" if last > first else plan.nodes[first]
        low, high = first * plan.ranks_per_node, (last + 1) * plan.ranks_per_node - 1
        groups = range(low // group, high // group + 1)
        runs = [(g, max(low, g * group), min(high, (g + 1) * group - 1)) for g in groups]
        rows.append(Row("" if leaf == above else leaf, names, runs))
        above = leaf
    return rows


def _title(text: str) -> Text:
    """Return a line above a table, whose own title would break at the table's width."""
    return Text(text, "italic")


def _nodes(plan: Plan) -> Table:
    """List the nodes with their ranks, coloured by shard group."""
    columns = (Column("leaf" if any(plan.leaves) else "", style="dim"), "nodes", "ranks in shard groups")
    table = Table(*columns, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    rows, most = rows_of(plan, MOST_NODES_LISTED), MOST_NODES_LISTED
    for i, row in enumerate(rows):
        if len(rows) <= most or not most // 2 <= i < len(rows) - most // 4:
            table.add_row(row.leaf, row.nodes, _ranks(plan, row))
        elif i == most // 2:
            table.add_row("...", f"{len(rows) - most // 2 - most // 4} more leaves", "")
    more = [f"and {len(plan.spares) - 4} more"] if len(plan.spares) > 4 else []
    for name in [*plan.spares[:4], *more]:
        table.add_row("", name, Text("spare", "dim"))
    return table


def _ranks(plan: Plan, row: Row) -> Text:
    text, runs = Text(), row.runs
    if plan.layout.strategy == "no_shard":
        return text.append(f"{span(runs[0][1], runs[-1][2])} each hold everything", COLOURS[0])
    for i, (group, first, last) in enumerate(runs):
        if len(runs) <= 5 or i < 3 or i == len(runs) - 1:
            text.append(f"[{group}: {span(first, last)}]", COLOURS[group % len(COLOURS)]).append(" ")
        elif i == 3:
            text.append(f".. {len(runs) - 4} more .. ", "dim")
    return text


def span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}-{last}"


def _memory(plan: Plan, memory: Memory) -> Table:
    sizes, bars = (Column(name, justify="right") for name in ("size", "of usable")), Column(overflow="crop")
    table = Table("part", *sizes, bars, box=box.SIMPLE_HEAD, pad_edge=False)
    for name, value in memory.parts().items():
        if value:
            bar = Text("█" * min(40, round(40 * value / plan.usable_bytes)), "cyan")
            table.add_row(name, size(value), f"{value / plan.usable_bytes:.0%}", bar)
    ratio, of = f"{memory.total / plan.usable_bytes:.0%}", f"of {size(plan.usable_bytes)} usable"
    table.add_row("total", size(memory.total), ratio, of, style="bold green" if plan.fits else "bold red")
    if memory.host:
        table.add_row("host, per rank", size(memory.host), "", "offloaded")
    if memory.snapshots:
        table.add_row("host, per rank", size(memory.snapshots), "", "snapshots in memory")
    return table


def _options(plan: Plan) -> tuple[Table, Table]:
    """Table the option taken, then those that fit, fastest first, then the rest by memory; and the reasons."""
    numbers = (Column(name, justify="right", no_wrap=True) for name in ("memory", "within", "between", "tokens/s"))
    columns = (Column("option", overflow="fold"), *numbers)  # in a narrow terminal names wrap, so no number is cut
    table = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    why = Table.grid(padding=(0, 2))
    ordered = sorted(
        plan.considered, key=lambda c: (not c.taken, not c.fits, -c.tokens_per_s if c.fits else c.memory_bytes)
    )
    for c in ordered[:MOST_OPTIONS_SHOWN]:
        sizes = (c.memory_bytes, c.traffic[plan.backend].intra_node, c.traffic[plan.backend].inter_node)
        style = ("bold green" if c.fits else "bold red") if c.taken else "" if c.fits else "dim"
        table.add_row(c.name, *map(size, sizes), f"{c.tokens_per_s:,.0f}", style=style)
        why.add_row(c.name, Text(c.why, "bold" if c.taken else ""))
    if len(ordered) > MOST_OPTIONS_SHOWN:
        why.add_row(f"and {len(ordered) - MOST_OPTIONS_SHOWN} more", "plan --json shows all")
    return table, why
