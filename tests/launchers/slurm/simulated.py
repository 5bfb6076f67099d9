"""Commands of SLURM that answer as a test says."""

from __future__ import annotations

from pathlib import Path


def say(folder: Path, command: str, script: str) -> None:
    """Make a command of a shell script, in a folder that comes first on PATH."""
    (folder / command).write_text(f"#!/bin/sh\n{script}\n")
    (folder / command).chmod(0o755)
