"""Objects from the YAML files beside this module: patches are merged in, what stays null is left out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]


def skeleton(name: str) -> Object:
    """Read `<name>.yaml`."""
    content: Object = yaml.safe_load((Path(__file__).parent / f"{name}.yaml").read_text())
    return content


def fill(name: str, *patches: Object) -> Object:
    """Merge patches, one after the other, into the skeleton of a name."""
    filled: Object = without_nulls(reduce(merge, patches, skeleton(name)))
    return filled


def merge(base: Any, patch: Any) -> Any:
    """Merge mappings key by key and lists of named things by name; replace anything else."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {**base, **{k: merge(base[k], v) if k in base else v for k, v in patch.items()}}
    if isinstance(base, list) and isinstance(patch, list) and _named(base) and _named(patch):
        names, patches = {b["name"] for b in base}, {p["name"]: p for p in patch}
        merged = [merge(b, patches.get(b["name"], {})) for b in base]
        return [*merged, *(p for p in patch if p["name"] not in names)]
    return patch


def without_nulls(content: Any) -> Any:
    """Leave out keys whose value is null, at any depth."""
    if isinstance(content, dict):
        return {k: without_nulls(v) for k, v in content.items() if v is not None}
    return [without_nulls(item) for item in content] if isinstance(content, list) else content


def _named(items: Sequence[Any]) -> bool:
    return all(isinstance(i, dict) and "name" in i for i in items)
