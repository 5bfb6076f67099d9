"""What users ask of a running job by files in its run directory; the coordinator reads them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fsdp_jobs.run.directory import RunDir


@dataclass
class Requests:
    """What the files ask for."""

    excluded: dict[str, str]  # machine -> why it is excluded
    stop: str = ""  # why; empty: nobody asks
    save: bool = False
    problem: str = ""


def read_requests(run: RunDir, has_ranks: bool) -> Requests:
    """Read the files. Call it in a thread: the file system may hang. A request to save waits until there are ranks.

    It lists the folder, which shows new files: asked for one file, an NFS client may say "missing" for a minute.
    """
    found, there = Requests(run.excluded_hosts()), set[Path]()
    try:
        there = {*run.path.iterdir()}
        if run.stop_request in there:
            found.stop = run.stop_request.read_text().strip() or "cancelled"
    except (OSError, UnicodeDecodeError) as e:
        found.problem = f"{run.stop_request} cannot be read, so nothing is stopped: {e}"
    try:
        if has_ranks and run.save_request in there:
            run.save_request.unlink()
            found.save = True
    except OSError as e:
        found.problem = f"{run.save_request} cannot be removed, so nothing is saved for it: {e}"
    return found
