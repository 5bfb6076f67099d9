"""List the groups of `conf/` and their options without composing any. No Hydra, no torch."""

from __future__ import annotations

from pathlib import Path

CONF_DIR = Path(__file__).resolve().parent.parent / "conf"


def groups(*further: Path) -> dict[str, list[str]]:
    """Return every group of `conf/`, and of further folders, with its options."""
    options: dict[str, set[str]] = {}
    for folder in (CONF_DIR, *further):
        for group in filter(Path.is_dir, folder.glob("*")):
            options.setdefault(group.name, set()).update(f.stem for f in group.glob("*.yaml"))
    return {group: sorted(options[group]) for group in sorted(options)}


def choosing(option: str) -> str:
    """Return `group=option` for each group of `conf/` that has an option of this name; empty if none has."""
    return " or ".join(f"{group}={option}" for group, options in groups().items() if option in options)


def summary(group: str, option: str) -> str:
    """Return the first comment of an option's file."""
    lines = (CONF_DIR / group / f"{option}.yaml").read_text().splitlines()
    return next((line[2:] for line in lines if line.startswith("# ") and not line.startswith("# @")), "")
