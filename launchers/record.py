"""What a launcher reads in a run's own record: exit codes of nodes get lost, the verdict does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torchx.specs import AppState

from fsdp_jobs.events import Verdict
from fsdp_jobs.logs import follow_files
from fsdp_jobs.run_dir import RunDir


def final_state(run: RunDir) -> AppState:
    """The state of a job whose processes have gone."""
    verdict = Verdict.read(run, run.last_attempt())
    if verdict is None:
        return AppState.FAILED  # nobody judged: the machine went down
    if verdict.verdict == "done":
        return AppState.SUCCEEDED
    return AppState.CANCELLED if verdict.verdict == "preempted" else AppState.FAILED


def log_lines(run: RunDir, role: str, node: int, running: Callable[[], bool]) -> Iterator[str]:
    """Lines of a node's ranks in the newest attempt, or the coordinator's own; as they come while `running`."""
    pattern = "coordinator.log" if role == "coordinator" else f"node-{node}/*.log"
    return (line + "\n" for _, line in follow_files(run.attempt(run.last_attempt()), pattern, running))
