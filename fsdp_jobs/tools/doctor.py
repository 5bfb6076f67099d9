"""Examine whether jobs can run on a cluster from this machine, before one is submitted. No torch."""

from __future__ import annotations

from rich.console import Console
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
        state = (f"{finding.state:9}", _STYLES[finding.state])
        console.print(Text.assemble(state, f"{finding.what:16}{finding.fact}"), soft_wrap=True)
        if finding.cure:
            console.print(Text(f"{'':25}-> {finding.cure}"), soft_wrap=True)
    if not states:
        what = "this launcher has nothing to examine"
        instead = "fsdp-jobs doctor cluster=slurm, or cluster=kubernetes; dry_run=true checks a job"
        raise BadInput([Problem(f"cluster.launcher={config.cluster.launcher}", what, instead)])
    return EXIT_FAILED if "bad" in states else EXIT_DONE
