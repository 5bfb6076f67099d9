"""Dataclasses that are kept as JSON: files of a run, and what travels to its processes. No torch."""

from __future__ import annotations

from typing import Self

import msgspec


class Record:
    """The base of such a dataclass. Keys that another version wrote and this one does not know are ignored."""

    def to_json(self, indent: int = 0) -> str:
        """Return it as JSON: on one line, or with lines indented by so many columns more each level."""
        return msgspec.json.format(msgspec.json.encode(self), indent=indent).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what `to_json` wrote.

        Raises:
            ValueError: it is not JSON, or a field is missing or of another type; names the field.
        """
        return msgspec.json.decode(text, type=cls)
