"""Parse the arguments of verbs; wrong ones are reported as all other bad input. No torch."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.groups import choosing
from fsdp_jobs.config.habits import meant_by, one_text
from fsdp_jobs.config.terminal import console

RUNS_DIR = {"runs_dir": "runs"}


class Parser(argparse.ArgumentParser):
    """Arguments of one verb. Arguments that do not fit raise BadInput with the verb's usage."""

    def __init__(self, verb: str):
        super().__init__(prog=f"fsdp-jobs {verb}", allow_abbrev=False)

    def add_json(self, what: str = "one object, for scripts; the rest goes to stderr") -> None:
        self.add_argument("--json", action="store_true", help=what)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        flags, rest = super().parse_known_args(args, namespace)
        console.write_to(stderr=getattr(flags, "json", False))
        return flags, rest

    def error(self, message: str) -> NoReturn:
        raise BadInput.at(self.prog, message, " ".join(self.format_usage().removeprefix("usage: ").split()))


class ComposingParser(Parser):
    """Arguments of a verb that composes a job from overrides."""

    def __init__(self, verb: str):
        super().__init__(verb)
        self.epilog = "Also group=option and key=value of the job; fsdp-jobs --help names them."
        self.add_argument("--config-dir", "-cd", metavar="DIR", help="a folder with options of your own")

    def parse(self, args: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return a verb's own flags and the overrides, with `--config-dir` replaced by its override.

        Raises:
            BadInput: flags that do not exist.
        """
        flags, overrides = self.parse_known_args(args)
        if unknown := [o for o in overrides if o.startswith("-")]:
            cure = "fsdp-jobs --help; if it is a program's: script_args='...', with script= or module="
            raise BadInput(Problem(u, "there is no such flag", meant_by(u) or cure) for u in unknown)
        if split := [*_split_values(overrides)]:
            raise BadInput(split)
        if flags.config_dir:
            overrides = [search_path(flags.config_dir), *overrides]
        return flags, overrides


def file_name(text: str) -> str:
    """Return the name of a file to write, for a flag; an override there means that the name was left out."""
    if "=" in text.partition("/")[0]:
        raise argparse.ArgumentTypeError(f"{text} is an override, not a file")
    return text


def _split_values(overrides: Sequence[str]) -> Iterator[Problem]:
    """Find values that a shell split at blanks, for want of quotes: words behind a key, without `=` or `~`."""
    parts: list[list[str]] = []
    for word in overrides:
        if parts and "=" not in word[1:] and not (word.startswith("~") or meant_by(word) or choosing(word)):
            parts[-1].append(word)
        else:
            parts.append([word])
    for first, *rest in parts:
        key, is_given, value = first.partition("=")
        if rest and (is_given or meant_by(key).startswith(f"{key}=")):
            whole = shlex.quote(f"{key}={' '.join([value, *rest]).strip(' =')}")
            is_complete = bool(value) and value[0] not in "[{"
            cure = f"one value: {whole}" + f"; or a program: script={rest[0]}" * is_complete
            yield Problem(" ".join([first, *rest]), "is more than one word", cure)


def overrides_in(args: Sequence[str]) -> list[str]:
    """Return the overrides among arguments, with `--config-dir` replaced by its override."""
    return ComposingParser("submit").parse(args)[1]


def split_folders(args: Sequence[str], defaults: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the folders that arguments as `runs_dir=DIR` choose, or else `defaults`, and the other arguments."""
    chosen = [a for a in args if "=" in a and a.partition("=")[0] in defaults]
    return {**defaults, **dict(a.split("=", 1) for a in chosen)}, [a for a in args if a not in chosen]


def search_path(config_dir: str) -> str:
    """Return the override that adds a user's folder with further options of the groups.

    Raises:
        BadInput: it is not a folder.
    """
    if not Path(config_dir).is_dir():
        raise BadInput.at(f"--config-dir {config_dir}", "is not a folder")
    return f"hydra.searchpath=[{one_text(f'file://{Path(config_dir).resolve()}')}]"
