"""What the services of deploy/compose.yaml run: `submit` writes the run directory, the others are the job. No torch.

    python -m fsdp_jobs.launchers.compose submit NAME [key=value ...]
    python -m fsdp_jobs.launchers.compose coordinator | node NAME

Compose decides how many nodes there are, so a node takes the lowest number that no other has.
"""

from __future__ import annotations

import fcntl
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from torchx.schedulers.api import DescribeAppResponse, ListAppResponse
from torchx.specs import AppDef, AppDryRunInfo, AppState, RoleStatus

from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.resolve import ranks_per_node
from fsdp_jobs.config.schema import load_config
from fsdp_jobs.launchers import attempts
from fsdp_jobs.launchers.app import RUN_DIR_KEY
from fsdp_jobs.launchers.base import RunScheduler, final_state, log_lines
from fsdp_jobs.run.directory import RunDir, write_atomic
from fsdp_jobs.run.verdict import Verdict

RUNS = Path("/runs")  # the volume that all services mount
_PORT = "29400"


@dataclass
class ComposeRequest:
    """Nothing is started: the services are there."""

    run_dir: str


class ComposeScheduler(RunScheduler):
    """Hands a job to the services of deploy/compose.yaml. An app's id is its run's name."""

    def __init__(self, session_name: str):
        super().__init__("compose_fsdp", session_name)

    def _submit_dryrun(self, app: AppDef, cfg: dict[str, Any]) -> AppDryRunInfo[ComposeRequest]:
        run = RunDir(app.metadata[RUN_DIR_KEY])
        if run.path.parent != RUNS:
            where = f"runs_dir={run.path.parent}"
            instead = "docker compose -f deploy/compose.yaml up; cluster=docker needs no compose"
            raise BadInput([Problem(where, f"the services of deploy/compose.yaml share {RUNS} only", instead)])
        return AppDryRunInfo(ComposeRequest(str(run.path)), str)

    def schedule(self, dryrun_info: AppDryRunInfo[ComposeRequest]) -> str:
        run = RunDir(dryrun_info.request.run_dir)
        write_atomic(_first_attempt(run), str(run.last_attempt() + 1))
        return run.name

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        run = RunDir(RUNS / app_id)
        if not _first_attempt(run).exists():
            return None
        state = AppState.RUNNING if _is_live(run) else final_state(run)
        statuses = [RoleStatus("trainer", [])]
        return DescribeAppResponse(app_id=app_id, state=state, num_restarts=run.last_attempt(), roles_statuses=statuses)

    def list(self) -> list[ListAppResponse]:
        found = [(folder.name, self.describe(folder.name)) for folder in sorted(RUNS.glob("*"))]
        return [ListAppResponse(name, d.state) for name, d in found if d is not None]

    def _cancel_existing(self, app_id: str) -> None:
        """What can be done from inside a container: ask the job to save and stop."""
        write_atomic(RunDir(RUNS / app_id).stop_request, "cancelled")

    def lines(self, app_id: str, role: str, node: int, follow: bool) -> Iterator[str]:
        run = RunDir(RUNS / app_id)
        return log_lines(run, role, node, lambda: follow and _is_live(run))


def create_scheduler(session_name: str, **_kwargs: object) -> ComposeScheduler:
    return ComposeScheduler(session_name)


def _first_attempt(run: RunDir) -> Path:
    return run.submit / "first_attempt"  # of the newest submission


def _is_live(run: RunDir) -> bool:
    """Whether the services still have something to do: no attempt of the newest submission was the last."""
    attempt = run.last_attempt()
    verdict = Verdict.read(run, attempt) if attempt >= int(_first_attempt(run).read_text()) else None
    return verdict is None or verdict.decision != "stop"


def submit(run: RunDir, overrides: Sequence[str]) -> None:
    """Write the run directory, unless its job is not over: then that goes on, with the configuration it has.

    Raises:
        BadInput: whatever is wrong with the overrides.
    """
    from fsdp_jobs.submit import submit as submission

    if _first_attempt(run).exists() and _is_live(run):
        print(f"{run.name} goes on, as it was submitted")
        return
    config = compose_job(["cluster=compose", f"runs_dir={RUNS}", f"name={run.name}", *overrides])
    print(f"submitted {submission.submit(submission.prepare(config), list(overrides))}")


def claim_node(run: RunDir) -> tuple[int, IO[str]]:
    """The lowest number that no other container has, and the lock that keeps it."""
    for node in itertools.count():
        lock = (run.submit / f"node-{node}.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return node, lock
        except BlockingIOError:
            lock.close()
    raise AssertionError


def main(argv: Sequence[str]) -> int:
    service, name, *overrides = argv
    run = RunDir(RUNS / name)
    if service == "submit":
        try:
            submit(run, overrides)
        except BadInput as e:
            print(e, file=sys.stderr)
            return 2
        return 0
    first = ["--first", _first_attempt(run).read_text(), "--", sys.executable, "-m"]
    if service == "coordinator":
        command = ["fsdp_jobs.elastic.coordinator", str(run.path)]
        return attempts.main(["coordinator", str(run.path), _PORT, *first, *command])
    node, _lock = claim_node(run)
    nproc = ranks_per_node(load_config(run.config))
    command = ["fsdp_jobs.elastic.agent", str(run.path), "--node", str(node), "--nproc", str(nproc)]
    return attempts.main(["node", str(run.path), f"coordinator:{_PORT}", *first, *command])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
