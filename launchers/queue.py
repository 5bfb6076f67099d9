"""Starts a sweep's jobs on this machine, so many at once. It outlives the terminal, and is not their parent. No torch.

python -m fsdp_jobs.launchers.queue FOLDER
"""

from __future__ import annotations

import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fsdp_jobs.launchers.base import launcher_of
from fsdp_jobs.launchers.detached import DetachedLauncher
from fsdp_jobs.launchers.local import visible_gpus
from fsdp_jobs.launchers.waiting import Entry, Pool, started, take, waiting_of, withdraw
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.verdict import Verdict

_POLL_S = 0.2
_RECORDED_S = 120.0  # a job that no run directory tells of for so long was left behind by a command that died


def tend(folder: Path) -> None:
    """Start jobs as places become free, until none waits.

    A job is started once its run directory tells of its submission: if the command that submits dies before that,
    the same command submits it again, and it must not run twice.
    """
    running: dict[str, Entry] = {}
    known: dict[str, float] = {}  # app id -> when it was seen first
    for entry in Pool.read(folder).jobs:  # what an earlier pool was starting when it was killed
        started(RunDir(entry.run_dir))
    while True:
        pool = Pool.read(folder)
        new = [entry for entry in pool.jobs if entry.app_id not in known]
        known |= {entry.app_id: time.monotonic() for entry in new}
        running |= {entry.app_id: entry for entry in new}  # those that an earlier pool has started count, too
        running = {app_id: entry for app_id, entry in running.items() if _is_running(entry)}
        for entry in pool.jobs:
            if len(running) >= pool.places:
                break
            run = RunDir(entry.run_dir)
            if not str(run.read_job().get("handle")).endswith(f"/{entry.app_id}"):
                if time.monotonic() > known.get(entry.app_id, time.monotonic()) + _RECORDED_S:
                    withdraw(run, entry.app_id)
            elif take(run, entry.app_id):
                _start(entry, list(running.values()))
                running[entry.app_id] = entry
        else:
            with pool.locked():
                if not any(waiting_of(RunDir(e.run_dir), e.app_id) for e in Pool.read(folder).jobs):
                    pool.process_file.unlink(missing_ok=True)
                    return
        time.sleep(_POLL_S)


def _is_running(entry: Entry) -> bool:
    run = RunDir(entry.run_dir)
    return waiting_of(run, entry.app_id) is None and _launcher(entry).is_alive(run, entry.app_id)


def _start(entry: Entry, running: Sequence[Entry]) -> None:
    """Start a job on those GPUs that the fewest of the running ones use."""
    run, launcher = RunDir(entry.run_dir), _launcher(entry)
    try:
        if mine := launcher.gpus_of(run):
            used = Counter(gpu for other in running for gpu in _launcher(other).gpus_of(RunDir(other.run_dir)))
            launcher.move(run, dict(zip(mine, sorted(visible_gpus(), key=lambda gpu: used[gpu]), strict=False)))
        launcher.start(run, entry.app_id)
    except Exception as e:  # what was found sound at submission is not now
        traceback.print_exc()
        Verdict("infrastructure", "stop", f"could not be started: {e}").close(run, run.first_attempt())
    started(run)


def _launcher(entry: Entry) -> DetachedLauncher:
    launcher = launcher_of(entry.launcher)
    assert isinstance(launcher, DetachedLauncher)
    return launcher


if __name__ == "__main__":
    tend(Path(sys.argv[1]))
