"""Write what the pages of docs/reference/ take from the code: keys, verbs and events. `make docs-keys`."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from fsdp_jobs.cli import main as cli
from fsdp_jobs.config import clusters, schema
from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.keys import metadata
from fsdp_jobs.run.events import Event
from fsdp_jobs.tools.rehearse import FAULTS

REFERENCE = Path(__file__).parent / "reference"
PAGES = tuple(REFERENCE / f"{name}.md" for name in ("configuration", "verbs", "events"))
_MADE = re.compile(r"<!-- (keys|verbs|faults|events)(?:: (\w+))? -->\n.*?<!-- end -->", re.DOTALL)

# Further classes of a group, by the option that they belong to. Clusters have pages of their own, but for one.
FURTHER: dict[str, dict[str, type]] = {
    "cluster": {"local": clusters.LocalClusterConfig},
    "model": {"custom": schema.CustomModelConfig, "hf": schema.HfConfig},
}


def with_tables(page: str) -> str:
    """Return a page with what stands between `<!-- keys: GROUP -->` and `<!-- end -->`, and the like, written anew."""
    makers = {"keys": lambda group: table(compose_job([]), group), "verbs": verbs, "faults": faults, "events": events}

    def made(found: re.Match[str]) -> str:
        opening = found[0].partition("\n")[0]
        return "\n".join([opening, "", *makers[found[1]](found[2] or ""), "", "<!-- end -->"])

    return _MADE.sub(made, page)


def table(job: schema.JobConfig, group: str) -> Iterator[str]:
    """Yield the lines of a group's table; the keys of the job itself are the group `job`."""
    yield "| key | default | meaning |"
    yield "|---|---|---|"
    values, prefix = (job, "") if group == "job" else (getattr(job, group), f"{group}.")
    first = clusters.ClusterConfig if group == "cluster" else type(values)
    yield from _rows(values, prefix, {"": first, **FURTHER.get(group, {})}, has_groups=group == "job")


def _rows(values: Any, prefix: str, options: dict[str, type], has_groups: bool = False) -> Iterator[str]:
    """Yield a row for each key; `has_groups`: what is nested has a table of its own."""
    written: set[str] = set()
    for option, cls in options.items():
        for field in fields(cls):
            about = metadata(cls, field.name)
            fallback = field.default_factory() if field.default_factory is not MISSING else field.default
            default = getattr(values, field.name, fallback)
            if is_dataclass(default) and not has_groups:
                yield from _rows(default, f"{prefix}{field.name}.", {"": type(default)})
            if not about or field.name in written or is_dataclass(default):
                continue
            written.add(field.name)
            meaning = f"`{option}`: {_meaning(about)}" if option else _meaning(about)
            yield f"| `{prefix}{field.name}` | {_shown(default)} | {meaning} |"


def _meaning(about: Any) -> str:
    bounds = ""
    if about["choices"]:
        bounds = f" ({', '.join(map(_shown, about['choices']))})"
    elif about["at_least"]:
        bounds = f" (at least {about['at_least']:g})"
    return str(about["meaning"]) + bounds


def _shown(value: Any) -> str:
    """Return a value as it is written in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return "(none)" if value == "???" else str(value).replace("'", "")


class _Stopped(Exception):
    """A verb has made its parser."""


def parser_of(verb: str) -> argparse.ArgumentParser | None:
    """Return the parser with which a verb reads its arguments, None if it has none: the verb is stopped there."""
    found: list[argparse.ArgumentParser] = []

    def stop(parser: argparse.ArgumentParser, *_: object) -> None:
        found.append(parser)
        raise _Stopped

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", stop), suppress(_Stopped):
        cli.main([verb])
    return found[0] if found else None


def verbs(_: str) -> Iterator[str]:
    """Yield a section for each verb: what it does, and its arguments."""
    for verb in cli.VERBS:
        text = cli.what_of(verb)
        yield from (f"### {verb}", "", f"{text[0].upper()}{text[1:]}.", "")
        parser = parser_of(verb)
        rows = [_argument(action) for action in parser._actions if action.dest != "help"] if parser else []
        if rows:
            yield from ("| argument | |", "|---|---|", *rows, "")


def _argument(action: argparse.Action) -> str:
    value = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper())
    is_switch = action.nargs == 0
    names = [f"`{name}`" if is_switch else f"`{name} {value}`" for name in action.option_strings]
    bounds = "" if action.default in (None, False, []) else f" (default {action.default})"
    shown = ", ".join(names) or f"`{value if action.metavar else action.dest}`"
    return f"| {shown} | {action.help or ''}{bounds} |".replace("|  |", "| |")


def faults(_: str) -> Iterator[str]:
    """Yield the faults of `rehearse` as a table."""
    yield from ("| fault | |", "|---|---|")
    for name, text in FAULTS.items():
        yield f"| `{name}` | {text} |"


def events(_: str) -> Iterator[str]:
    """Yield a row for each type of event: its fields, and what it says of itself."""
    common = {f.name for f in fields(Event)}
    yield from ("| event | fields | |", "|---|---|---|")
    for kind, cls in Event.KINDS.items():
        own = ", ".join(f"`{f.name}`" for f in fields(cls) if f.name not in common)
        about = str(cls.__doc__)
        said = f"*{cls._template}*" if about.startswith(f"{cls.__name__}(") else inspect.cleandoc(about)
        yield f"| `{kind}` | {own} | {said} |".replace("|  |", "| |")


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))
