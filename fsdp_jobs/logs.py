"""Reading the logs of a run while they are written. No torch."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_ERROR = re.compile(r"Error\b|Exception|CRITICAL|FATAL|WARNING|Killed|Segmentation fault")


def follow_files(folder: Path, pattern: str, running: Callable[[], bool]) -> Iterator[tuple[Path, str]]:
    """Lines of all files that match, with the file they are from: what is there, then what comes while `running()`.

    New files are taken up as they appear. A line still being written is given when it is complete, or at the end.
    """
    places: dict[Path, int] = {}
    rest: dict[Path, bytes] = {}
    while True:
        still = running()
        for file in sorted(folder.glob(pattern)):
            with file.open("rb") as f:
                f.seek(places.get(file, 0))
                new = f.read()
            places[file] = places.get(file, 0) + len(new)
            *lines, rest[file] = (rest.get(file, b"") + new).split(b"\n")
            for line in lines:
                yield file, line.decode(errors="replace")
        if not still:
            break
        time.sleep(0.2)
    for file, line in rest.items():
        if line:
            yield file, line.decode(errors="replace")


def label(file: Path) -> str:
    """`node-1/rank-3` of a rank's log."""
    return f"{file.parent.name}/{file.stem}"


def looks_like_error(line: str) -> bool:
    return bool(_ERROR.search(line))


def tail(file: Path, lines: int) -> str:
    """The last lines of a file, empty when there is none."""
    if not file.exists():
        return ""
    return "\n".join(file.read_text(errors="replace").splitlines()[-lines:])
