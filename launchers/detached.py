"""The detached process that stands in for a cluster's scheduler on this machine: started, found, ended. No torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from fsdp_jobs.events import Verdict, record_event
from fsdp_jobs.run_dir import RunDir, write_atomic


def state_dir(launcher: str) -> Path:
    """Where a launcher of this machine keeps a link for each app: id -> run directory."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "fsdp_jobs" / launcher


def remember(launcher: str, app_id: str, run: RunDir) -> None:
    link = state_dir(launcher) / app_id
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(run.path.resolve())


def start_supervisor(run: RunDir, module: str) -> None:
    """Run `python -m MODULE RUN_DIR`, which outlives the terminal it is started from."""
    with (run.submit / "supervisor.log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(run.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    started = psutil.Process(process.pid).create_time()
    write_atomic(run.submit / "supervisor.json", json.dumps({"pid": process.pid, "started": started}))


def supervisor_of(run: RunDir) -> psutil.Process | None:
    """The live supervisor of a run."""
    try:
        known = json.loads((run.submit / "supervisor.json").read_text())
        process = psutil.Process(known["pid"])
        alive = process.create_time() == known["started"] and process.status() != psutil.STATUS_ZOMBIE
        return process if alive else None
    except (OSError, ValueError, psutil.NoSuchProcess):
        return None


def kill_supervisor(run: RunDir) -> bool:
    """End a run's supervisor and all it has started; False when there was none."""
    supervisor = supervisor_of(run)
    if supervisor is None:
        return False
    family = [supervisor, *supervisor.children(recursive=True)]
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=10)
    return True


def judge(run: RunDir, first: int, verdict: Verdict) -> None:
    """End a job whose coordinator could not, in its newest attempt, at least `first`; a verdict that did so stays."""
    attempt = max(run.last_attempt(), first)
    before = Verdict.read(run, attempt)
    if before is None or before.decision == "requeue":  # what was to come next does not
        verdict.write(run, attempt)
        how = {"verdict": verdict.verdict, "decision": verdict.decision, "reason": verdict.reason}
        record_event(run, "attempt_ended", attempt, **how)


KILLED = Verdict("preempted", "stop", "killed on request, without a checkpoint")
