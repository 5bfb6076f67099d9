"""Examine whether jobs can run on a cluster from this machine, before one is submitted. No torch."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.base import launcher_of
from fsdp_jobs.run.verdict import EXIT_DONE, EXIT_FAILED

_STYLES = {"ok": "green", "warning": "yellow", "bad": "bold red"}


def doctor(config: JobConfig, console: Console) -> int:
    """Print what the cluster's launcher finds, as it finds it; return 0, or 1 when something is bad.

    Raises:
        BadInput: this launcher has nothing to examine.
    """
    states = []
    for finding in launcher_of(config.cluster.launcher).examine(config):
        states.append(finding.state)
        row = Table.grid(padding=(0, 2))
        row.add_column(width=7)
        row.add_column(width=14)
        row.add_row(Text(finding.state, style=_STYLES[finding.state]), finding.what, Text(finding.fact))
        console.print(row)
        if finding.cure:
            console.print(Text(f"{'':25}-> {finding.cure}"), soft_wrap=True)
    if not states:
        what = "this launcher has nothing to examine"
        instead = "fsdp-jobs doctor cluster=slurm, or cluster=kubernetes; dry_run=true checks a job"
        raise BadInput([Problem(f"cluster.launcher={config.cluster.launcher}", what, instead)])
    return EXIT_FAILED if "bad" in states else EXIT_DONE
