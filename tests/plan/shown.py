"""A plan as the terminal shows it."""

from __future__ import annotations

from rich.console import Console

from fsdp_jobs.plan.plan import Plan
from fsdp_jobs.plan.render import render


def render_text(plan: Plan, width: int = 100, in_brief: bool = False) -> str:
    """Render the plan as plain text."""
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as captured:
        console.print(render(plan, in_brief))
    return captured.get()
