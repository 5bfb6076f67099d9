"""What users ask of a running job by files in its run directory; the coordinator reads them. No torch."""

from __future__ import annotations

from dataclasses import dataclass

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
    found = Requests(run.excluded_hosts())
    try:
        there = {*run.path.iterdir()}
        if run.stop_request in there:
            found.stop = run.stop_request.read_text().strip() or "cancelled"
        if has_ranks and run.save_request in there:
            run.save_request.unlink()
            found.save = True
    except (OSError, UnicodeDecodeError) as e:
        found.problem = f"a request in {run.path} cannot be read, so nothing is stopped or saved for it: {e}"
    return found
