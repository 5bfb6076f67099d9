"""Describe the job's YAML as a JSON schema, with which editors complete and check it. No torch."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from fsdp_jobs.config.keys import AUTO, metadata
from fsdp_jobs.config.schema import SCHEMAS, JobConfig

# A text may look like a number in YAML: `time: 120`.
_NAMES = {str: ("string", "number"), int: ("integer",), float: ("number",), bool: ("boolean",), NoneType: ("null",)}


def job_schema() -> dict[str, Any]:
    """Return the schema of a whole job. No key is required, so it also fits files with only some keys.

    Such files have `# @package _global_`, as those in `conf/experiment` and `conf/cluster`. The schema rejects an
    interpolation (`${...}`) in place of a number, although Hydra accepts it.
    """
    of_hydra: dict[str, Any] = {"patternProperties": {"^(defaults|hydra)$": {}}}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **_object(JobConfig), **of_hydra}


def _object(group: type) -> dict[str, Any]:
    """Describe a dataclass: its keys, and no others allowed."""
    types = get_type_hints(group)
    about = {"type": "object", "description": str(group.__doc__).partition("\n")[0], "additionalProperties": False}
    return {**about, "properties": {f.name: _key(group, f, types[f.name]) for f in fields(group)}}


def _key(group: type, field: Field[Any], declared: Any) -> dict[str, Any]:
    """Describe a key, or a group of keys as one of its dataclasses."""
    if is_dataclass(declared):
        options = [_object(node) for name, _, node in SCHEMAS if name == field.name]
        return {"anyOf": options} if len(options) > 1 else _object(declared)  # type: ignore[arg-type]
    about, key = metadata(group, field.name), _type(declared)
    least, choices, below = about["at_least"], about["choices"], about["below"]
    if choices:
        (key["items"] if key.get("type") == "array" else key)["enum"] = list(choices)
    if least is not None:
        key["minimum"] = least
        if declared is Any:
            key = {"anyOf": [{"type": "number", **key}, {"const": AUTO}]}
    if below is not None:
        key["exclusiveMaximum"] = below
    if about["meaning"]:
        key["description"] = about["meaning"]
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    return key if default == "???" else {**key, "default": default}


def _type(declared: Any) -> dict[str, Any]:
    kind, of = get_origin(declared) or declared, get_args(declared)
    if kind is Any:
        return {}
    if kind is list:
        return {"type": "array", "items": _type(of[0])}
    if kind is dict:
        return {"type": "object", "additionalProperties": _type(of[1])}
    return {"type": [name for one in of or (kind,) for name in _NAMES[one]]}
