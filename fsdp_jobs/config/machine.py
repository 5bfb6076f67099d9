"""What verbs print with `--json`, for scripts. No torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

VERSION = 1  # of what is printed; grows when a key goes, or changes its meaning


def add_json(
    parser: argparse._ActionsContainer, what: str = "one object, for scripts; the rest goes to stderr"
) -> None:
    """Give a verb the flag."""
    parser.add_argument("--json", action="store_true", help=what)


def versioned(values: Mapping[str, Any]) -> dict[str, Any]:
    return {"version": VERSION, **values}


def tell(values: Any) -> None:
    """Print one object, or a list of them, on a line."""
    sys.stdout.write(json.dumps(finite(values)) + "\n")
    sys.stdout.flush()


def finite(values: Any) -> Any:
    """Return the same with null for NaN and infinities, which are no JSON."""
    return json.loads(json.dumps(values), parse_constant=lambda _: None)
