"""Objects from the YAML files beside this module: `$names` stand for values, keys that stay null are left out."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

import yaml

Object = dict[str, Any]


def fill(name: str, **values: Any) -> Object:
    """Read `<name>.yaml` with these values in place of `$names`; null for a name that has none."""
    known = defaultdict(lambda: "null", {key: json.dumps(value) for key, value in values.items()})  # JSON is YAML
    text = (Path(__file__).parent / f"{name}.yaml").read_text()
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    filled: Object = without_nulls(yaml.load(Template(text).substitute(known), loader))
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
