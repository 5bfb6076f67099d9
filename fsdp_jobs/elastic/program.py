"""A user's own torchrun program in place of the trainer: what is run, and what is wrong with it. No torch."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from fsdp_jobs.config.clusters import DockerClusterConfig
from fsdp_jobs.config.errors import Problem, nearest
from fsdp_jobs.config.schema import JobConfig, NoModelConfig
from fsdp_jobs.run.directory import RunDir


@dataclass(frozen=True)
class Program:
    """What ranks run."""

    what: str  # path of a file, or dotted name of a module
    is_module: bool
    folder: str  # where its imports are looked for first
    args: list[str]

    @classmethod
    def of(cls, config: JobConfig, run: RunDir) -> Program:
        """The program of a job on a node: from the copy of the code in the run directory, where it is in there."""
        code = run.path.resolve() / "code"
        args = shlex.split(config.script_args)
        if config.module is not None:
            return cls(config.module, True, str(code if code.is_dir() else Path.cwd()), args)
        assert config.script is not None
        copied = code / config.script
        file = copied if copied.exists() and not Path(config.script).is_absolute() else Path(config.script).absolute()
        return cls(str(file), False, str(file.parent), args)

    @property
    def is_python(self) -> bool:
        """Whether it can be run in a process that has Python and torch in it already."""
        return self.is_module or self.what.endswith(".py")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Program:
        return cls(**json.loads(text))


def check_program(config: JobConfig, files: bool) -> Iterator[Problem]:
    """What is wrong with `script`, `module` and `script_args`; without `files`, nothing is looked for on disk."""
    script, module = config.script, config.module
    if script is not None and module is not None:
        yield Problem(f"module={module}", f"script={script} is given, too", "one of the two")
    if not config.is_program:
        if config.script_args:
            yield Problem(f"script_args={config.script_args}", "there is no program to give them to", "script=train.py")
        if isinstance(config.model, NoModelConfig):
            yield Problem("model=none", "the trainer needs a model", "script=train.py, or another model")
        return
    try:
        shlex.split(config.script_args)
    except ValueError as e:
        yield Problem(f"script_args={config.script_args}", f"{str(e).lower()}, as a shell reads it", "close the quote")
    if files and script is not None and _is_here(config, script):
        yield from _file(script)
    if files and module is not None and config.cluster.shares_files and not _is_there(module):
        what = "there is no such module here"
        yield Problem(f"module={module}", what, "as for python -m, submitted from the folder that it is in; or script=")


def _is_here(config: JobConfig, script: str) -> bool:
    """Whether the nodes run a file of this machine, or a copy of it, and not one of an image."""
    cluster = config.cluster
    if isinstance(cluster, DockerClusterConfig):
        return cluster.snapshot_mb > 0 and not Path(script).is_absolute()
    in_image = getattr(cluster, "container", None) is not None and Path(script).is_absolute()
    return cluster.shares_files and not in_image


def _file(script: str) -> Iterator[Problem]:
    path, where = Path(script), f"script={script}"
    if path.is_dir():
        yield Problem(where, "is a folder", f"a file in it, or module={path.name}")
    elif not path.exists():
        known = [str(f) for f in path.parent.glob("*") if f.is_file()]
        what = f"there is no such file in {Path.cwd()}" if not path.is_absolute() else "there is no such file"
        yield Problem(where, what, nearest(script, known))
    elif not script.endswith(".py") and not os.access(path, os.X_OK):
        yield Problem(where, "is neither Python (.py) nor executable", f"chmod +x {shlex.quote(script)}")


def _is_there(module: str) -> bool:
    """Whether Python finds a module from here; nothing is imported for it."""
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
