"""Write the tables of keys in docs/configuration.md from the schema: `make docs-keys`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from fsdp_jobs.config import clusters, schema
from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.keys import metadata

PAGE = Path(__file__).parent / "configuration.md"
_TABLE = re.compile(r"<!-- keys: (\w+) -->\n.*?<!-- end -->", re.DOTALL)

# Further classes of a group, by the option that they belong to. Clusters have pages of their own, but for one.
FURTHER: dict[str, dict[str, type]] = {
    "cluster": {"local": clusters.LocalClusterConfig},
    "model": {"custom": schema.CustomModelConfig, "hf": schema.HfConfig},
}


def with_tables(page: str) -> str:
    """Return a page with what stands between `<!-- keys: GROUP -->` and `<!-- end -->` written anew."""
    job = compose_job([])
    return _TABLE.sub(lambda m: "\n".join([f"<!-- keys: {m[1]} -->", *table(job, m[1]), "<!-- end -->"]), page)


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


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
