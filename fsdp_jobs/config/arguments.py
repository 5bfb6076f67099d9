"""The arguments of verbs: wrong ones are told as all other bad input. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.habits import meant_by
from fsdp_jobs.config.terminal import console


class Parser(argparse.ArgumentParser):
    """Arguments of one verb. What does not fit is a BadInput, with the verb's usage."""

    def __init__(self, verb: str, **how: Any):
        super().__init__(prog=f"fsdp-jobs {verb}", allow_abbrev=False, **how)

    def add_switch(self, *names: str, what: str | None = None) -> None:
        """Give the verb a flag without a value."""
        self.add_argument(*names, action="store_true", help=what)

    def add_json(self, what: str = "one object, for scripts; the rest goes to stderr") -> None:
        self.add_switch("--json", what=what)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        flags, rest = super().parse_known_args(args, namespace)
        console.stderr = getattr(flags, "json", False)
        return flags, rest

    def error(self, message: str) -> NoReturn:
        raise BadInput([Problem(self.prog, message, " ".join(self.format_usage().removeprefix("usage: ").split()))])


def composing_parser(verb: str) -> Parser:
    """Make the parser of a verb that composes a job from overrides."""
    parser = Parser(verb, add_help=False)
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="a folder with options of your own")
    return parser


def flags_and_overrides(args: Sequence[str], parser: Parser | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return a verb's own flags and the overrides, `--config-dir` as the one that it stands for.

    Raises:
        BadInput: flags that there are not.
    """
    known, overrides = (parser or composing_parser("submit")).parse_known_args(args)
    if unknown := [o for o in overrides if o.startswith("-")]:
        raise BadInput([Problem(u, "there is no such flag", meant_by(u) or "fsdp-jobs --help") for u in unknown])
    return known, [*([search_path(known.config_dir)] if known.config_dir else []), *overrides]


def overrides_in(args: Sequence[str]) -> list[str]:
    """Return the overrides among arguments, as `flags_and_overrides` does."""
    return flags_and_overrides(args)[1]


def search_path(config_dir: str) -> str:
    """Return the override that adds a folder of the user's with groups of the same form.

    Raises:
        BadInput: it is not a folder.
    """
    if not Path(config_dir).is_dir():
        raise BadInput([Problem(f"--config-dir {config_dir}", "is not a folder")])
    return f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"
