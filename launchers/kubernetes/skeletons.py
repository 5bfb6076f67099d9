"""Objects from the YAML files beside this module: `$names` stand for values, keys whose value is null are left out."""

from __future__ import annotations

import json
from collections import defaultdict
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
    """Merge mappings key by key and lists of named things by name, as the API does; replace anything else."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {**base, **{k: merge(base[k], v) if k in base else v for k, v in patch.items()}}
    for key in ("mountPath", "name") if isinstance(base, list) and isinstance(patch, list) else ():
        if all(isinstance(item, dict) and key in item for item in (*base, *patch)):
            names, patches = {b[key] for b in base}, {p[key]: p for p in patch}
            merged = [merge(b, patches.get(b[key], {})) for b in base]
            return [*merged, *(p for p in patch if p[key] not in names)]
    return patch


def without_nulls(content: Any) -> Any:
    """Leave out keys whose value is null, at any depth."""
    if isinstance(content, dict):
        return {k: without_nulls(v) for k, v in content.items() if v is not None}
    return [without_nulls(item) for item in content] if isinstance(content, list) else content
