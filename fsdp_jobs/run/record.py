"""Dataclasses that are stored as JSON: files of a run, and values passed to its processes. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import msgspec

from fsdp_jobs.config.errors import Damaged

JsonObject = dict[str, Any]  # a line or a file of a run


class Record:
    """Base of a dataclass stored as JSON. Unknown keys, written by another version, are ignored."""

    def to_json(self, indent: int = 0) -> str:
        """Return it as JSON: on one line, or with `indent` columns per level."""
        return msgspec.json.format(msgspec.json.encode(self), indent=indent).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what `to_json` wrote.

        Raises:
            ValueError: it is not JSON, or a field is missing or of another type; names the field.
        """
        return msgspec.json.decode(text, type=cls)

    @classmethod
    def from_file(cls, file: Path) -> Self | None:
        """Read a file that `to_json` wrote; None if it does not exist.

        Raises:
            Damaged: it cannot be read as such a file.
        """
        try:
            return cls.from_json(file.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as e:
            raise Damaged(file, e) from e
