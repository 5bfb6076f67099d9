"""The verb `doctor`: can jobs run on a cluster from here? Asked before one is submitted. No torch.

A launcher that has something to look at names its module here; that has `examine(config)`, which yields findings.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.run.verdict import EXIT_FAILED

EXAMINERS = {"slurm_fsdp": "fsdp_jobs.launchers.slurm.doctor"}

_STYLES = {"ok": "green", "warning": "yellow", "bad": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    state: str  # ok | warning: works, with a drawback | bad: jobs will not run
    told: str
    instead: str = ""  # what to do about it


def doctor(config: JobConfig, console: Console) -> int:
    """Print what is found as it is found. Returns 0, or 1 when something is bad.

    Raises:
        BadInput: there is nothing to look at on this kind of cluster.
    """
    launcher = config.cluster.launcher
    if launcher not in EXAMINERS:
        what = f"there is nothing to examine; doctor knows {', '.join(sorted(EXAMINERS))}"
        raise BadInput([Problem(f"cluster.launcher={launcher}", what, "fsdp-jobs doctor cluster=slurm")])
    examine = importlib.import_module(EXAMINERS[launcher]).examine
    findings: Iterator[Finding] = examine(config)
    worst = 0
    for finding in findings:
        row = Table.grid(padding=(0, 2))
        row.add_column(width=7)
        row.add_column(width=14)
        row.add_row(Text(finding.state, style=_STYLES[finding.state]), finding.what, Text(finding.told))
        console.print(row)
        if finding.instead:
            console.print(Text(f"{'':25}-> {finding.instead}"), soft_wrap=True)
        worst = EXIT_FAILED if finding.state == "bad" else worst
    return worst
