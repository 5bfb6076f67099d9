"""Check, before any submission, whether jobs can run on a cluster from this machine. No torch."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.text import Text

from fsdp_jobs import __version__
from fsdp_jobs.config.errors import BadInput, JobFailed, Problem, one_line
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.config.terminal import say
from fsdp_jobs.launchers.base import STATE_HOME, Finding, findings, launcher_of
from fsdp_jobs.run.files import as_written
from fsdp_jobs.run.table import size

_STYLES = {"ok": "green", "warning": "yellow", "bad": "bold red"}
_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
_DRIVER_S = 10.0  # for it to answer
_LEAST_FREE = 10**9  # bytes
_NOT_MINE = "is not a folder that you may write to"


def doctor(config: JobConfig) -> Iterator[Finding]:
    """Yield findings of this machine and of the cluster's launcher; an error that ends the checks is the last one."""
    yield from _this_machine(config)
    launcher = launcher_of(config.cluster.launcher)
    try:
        home, is_mine = _existing(launcher.links)
        if not is_mine:
            yield Finding("submissions", "bad", f"{home} {_NOT_MINE}", STATE_HOME)
        yield from launcher.examine(config)
    except (BadInput, JobFailed) as e:
        yield from findings("cluster", e.problems if isinstance(e, BadInput) else [Problem(launcher.name, str(e))])


def show(finding: Finding) -> None:
    """Print a finding, and its cure if one is needed."""
    state = (f"{finding.state:9}", _STYLES[finding.state])
    say(Text.assemble(state, f"{finding.what:16}{finding.fact}"))
    if finding.cure and finding.state != "ok":
        say(f"{'':25}-> {finding.cure}")


def _this_machine(config: JobConfig) -> Iterator[Finding]:
    """Yield findings on versions and on the folder of runs."""
    versions = [f"Python {platform.python_version()}", f"fsdp_jobs {__version__}"]
    problems: list[Problem] = []
    try:
        versions.append(f"torch {version('torch')}")
    except PackageNotFoundError:
        if config.cluster.shares_environment:  # otherwise nodes have their own
            problems.append(Problem("torch", "is not installed", "pip install torch"))
    with suppress(OSError):  # there is no nvidia-smi
        smi = subprocess.Popen(_DRIVER, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            said = smi.communicate(timeout=_DRIVER_S)[0].strip()
        except subprocess.TimeoutExpired:
            smi.kill()  # not waited for: a process stuck in a driver cannot be ended
            said = f"no answer within {_DRIVER_S:.0f} s"
        if said and smi.returncode == 0:
            versions.append(f"NVIDIA's driver {said.splitlines()[0]}")
        else:
            fact = f"nvidia-smi: {one_line(said) or 'prints nothing'}"
            yield Finding("driver", "warning", fact, "no job will find a GPU here: nvidia-smi, dmesg")
    yield from findings("versions", problems, ", ".join(versions))
    runs = as_written(config.runs_dir)
    there, is_mine = _existing(runs)
    free = shutil.disk_usage(there).free
    state = "bad" if not is_mine else "warning" if free < _LEAST_FREE else "ok"
    fact = f"{runs}, {size(free)} free" if is_mine else f"{there} {_NOT_MINE}"
    yield Finding("runs_dir", state, fact, "runs_dir=... in a folder of yours with room")


def _existing(folder: Path) -> tuple[Path, bool]:
    """Return the part of a path that exists, and whether the folder can be made in it or written to."""
    there = next(part for part in (folder, *folder.parents) if part.exists())
    return there, there.is_dir() and os.access(there, os.W_OK | os.X_OK)
