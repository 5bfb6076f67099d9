"""Validate `script`, `module` and `script_args`: the user's own program instead of the trainer. No torch."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path

from fsdp_jobs.config.errors import Problem, nearest
from fsdp_jobs.config.habits import meant_by
from fsdp_jobs.config.schema import JobConfig, NoModelConfig

_LAUNCHERS = (  # programs and modules that start a node's ranks
    *("torchrun", "accelerate", "composer", "deepspeed", "trl"),
    *("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "composer.cli.launcher"),
)
_STARTED = re.compile(  # as a command in a shell script
    r"^[ \t]*(?:\w+=\S*[ \t]+|exec[ \t]+)*(?:srun[ \t][^#\n]*?)?(?:\S*/|python3?[ \t]+-m[ \t]+)?"
    rf"({'|'.join(_LAUNCHERS)})[ \t\n]",
    re.MULTILINE,
)


def program_problems(config: JobConfig, files: bool, shares_files: bool) -> Iterator[Problem]:
    """Check which program a job runs and with which arguments; with `files`, also that it exists."""
    script, module = config.script, config.module
    if script is not None and module is not None:
        yield Problem(f"module={module}", f"script={script} is given, too", "one of the two")
    if not config.is_program:
        if config.script_args:
            yield Problem(f"script_args={config.script_args}", "the trainer takes no arguments", "script=train.py")
        if isinstance(config.model, NoModelConfig):
            yield Problem("model=none", "the trainer needs a model", "script=train.py, or another model")
        return
    program = module or Path(script or "").name
    if program in _LAUNCHERS and config.nproc_per_node != 1:
        what = "starts a node's ranks itself, and each rank of this job would start it"
        cure = meant_by(program) or "leave it out: the launcher starts the program"
        yield Problem(program, what, f"{cure}; or nproc_per_node=1")
    if config.program.metrics is not None:
        yield from _pattern(config.program.metrics)
    try:
        shlex.split(config.script_args)
    except ValueError as e:
        yield Problem(f"script_args={config.script_args}", f"{str(e).lower()}, as a shell reads it", "close the quote")
    if files and script is not None and config.cluster.runs_program_of_this_machine(script, shares_files):
        yield from _file(script)
    if files and module is not None and shares_files and not _can_be_found(module):
        what = "there is no such module here"
        yield Problem(f"module={module}", what, "as for python -m, submitted from the folder that it is in; or script=")


def launcher_in(config: JobConfig) -> str:
    """Return the launcher that a shell script may start in each rank, or the empty string."""
    if config.script is None or config.script.endswith(".py") or config.nproc_per_node == 1:
        return ""
    with suppress(OSError), Path(config.script).open(errors="replace") as f:  # else the nodes have it
        if found := _STARTED.search(f.read(1 << 16)):
            return found[1]
    return ""


def _pattern(pattern: str) -> Iterator[Problem]:
    where, example = f"program.metrics={pattern}", r"'program.metrics=step (?P<step>\d+).*loss (?P<loss>[\d.]+)'"
    try:
        compiled = re.compile(pattern)
    except re.error as e:
        yield Problem(where, f"not a regular expression: {e}", example)
        return
    if unknown := compiled.groupindex.keys() - {"step", "steps", "loss", "epoch"}:
        yield Problem(where, f"a group {min(unknown)}, and lines have step, steps, loss and epoch", example)
    elif not compiled.groups or (compiled.groupindex and "step" not in compiled.groupindex):
        yield Problem(where, "no group for the step", example)


def _file(script: str) -> Iterator[Problem]:
    path, where = Path(script), f"script={script}"
    if path.is_dir():
        yield Problem(where, "is a folder", f"a file in it, or module={path.name}")
    elif not path.exists():
        files = [f.name for f in path.parent.glob("*") if f.is_file()]
        what = f"there is no such file in {Path.cwd()}" if not path.is_absolute() else "there is no such file"
        yield Problem(where, what, f"script={found}" if (found := shutil.which(script)) else nearest(path.name, files))
    elif not script.endswith(".py") and not os.access(path, os.X_OK):
        yield Problem(where, "is neither Python (.py) nor executable", f"chmod +x {shlex.quote(script)}")


def _can_be_found(module: str) -> bool:
    """Return whether Python finds a module from here, without importing it."""
    first, *rest = module.split(".")
    spec = PathFinder.find_spec(first, [str(Path.cwd()), *sys.path])
    try:
        spec = spec or importlib.util.find_spec(first)
    except (ImportError, ValueError):
        return False
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return False
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return spec is not None
