"""The detached process that stands in for a cluster's scheduler on this machine: started, found, ended. No torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import psutil
from torchx.schedulers.api import DescribeAppResponse, ListAppResponse
from torchx.specs import AppState, RoleStatus

from fsdp_jobs.events import Verdict
from fsdp_jobs.launchers.record import RunScheduler, final_state, known_runs, log_lines, run_of
from fsdp_jobs.problems import BadInput, Problem
from fsdp_jobs.run_dir import RunDir, write_atomic


class DetachedScheduler(RunScheduler):
    """A scheduler of this machine: what is known of an app is in its run directory, and whether something runs."""

    def __init__(self, launcher: str, session_name: str):
        super().__init__(f"{launcher}_fsdp", session_name)
        self.launcher = launcher

    def is_alive(self, run: RunDir, app_id: str) -> bool:
        """Whether something of this app runs."""
        return supervisor_of(run) is not None

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        run = run_of(self.launcher, app_id)
        if run is None:
            return None
        attempt = run.last_attempt()
        verdict = Verdict.read(run, attempt)
        return DescribeAppResponse(
            app_id=app_id,
            state=AppState.RUNNING if self.is_alive(run, app_id) else final_state(run),
            num_restarts=max(0, attempt),
            msg=verdict.reason if verdict is not None else "",
            roles_statuses=[RoleStatus("trainer", [])],
        )

    def list(self) -> list[ListAppResponse]:
        found = [(link.name, self.describe(link.name)) for link in sorted(known_runs(self.launcher).glob("*"))]
        return [ListAppResponse(name, d.state) for name, d in found if d is not None]

    def lines(self, app_id: str, role: str, node: int, follow: bool) -> Iterator[str]:
        run = self.submitted(app_id)
        return log_lines(run, role, node, lambda: follow and self.is_alive(run, app_id))

    def submitted(self, app_id: str) -> RunDir:
        """The run directory of an app.

        Raises:
            BadInput: there is no such app here.
        """
        run = run_of(self.launcher, app_id)
        if run is None:
            raise BadInput([Problem(f"{self.backend} app {app_id}", "was not submitted from this machine")])
        return run


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
        verdict.close(run, attempt)


KILLED = Verdict("preempted", "stop", "killed on request, without a checkpoint")
