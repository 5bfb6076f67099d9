"""What every launcher does with a run's own record: exit codes of nodes get lost, the verdict does not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

from torchx.schedulers.api import DescribeAppResponse, Scheduler, Stream, filter_regex
from torchx.specs import AppDef, AppDryRunInfo, AppState

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.tail import follow_files
from fsdp_jobs.run.verdict import Verdict

WRITES_AT_ONCE = 16  # run directories: what a cluster's file system does slowly it does for many at the same time
_AT_ONCE = 16  # jobs that a launcher is told to end at the same time


class RunScheduler(Scheduler[dict[str, Any]]):  # type: ignore[misc]
    """A TorchX scheduler whose apps are runs."""

    def dryrun_many(self, apps: Sequence[AppDef], cfgs: Sequence[dict[str, Any]]) -> list[AppDryRunInfo[Any]]:
        """What would be submitted for each app.

        Raises:
            BadInput: whatever is wrong with any of them.
        """
        requests, problems = [], []
        for app, cfg in zip(apps, cfgs, strict=True):
            try:
                requests.append(self.submit_dryrun(app, cfg))
            except BadInput as e:
                problems += e.problems
        if problems:
            raise BadInput(problems)
        return requests

    def schedule_many(self, requests: Sequence[AppDryRunInfo[Any]], parallelism: int, folder: Path) -> list[str]:
        """Submit jobs together, all of them or none; app ids in their order.

        Args:
            requests: one a job, of this scheduler's `dryrun_many`.
            parallelism: most that run at once, 0 for no limit. Heeded where the launcher can.
            folder: of the sweep, for the launcher's files.
        """
        submitted: list[str] = []
        try:
            for request in requests:
                submitted.append(self.schedule(request))
        except BaseException:
            for app_id in submitted:
                self.cancel(app_id)
            raise
        return submitted

    def describe_many(self, app_ids: Sequence[str]) -> list[DescribeAppResponse | None]:
        """What `describe` says of each app, with no more questions to the cluster than for one where that can be."""
        return [self.describe(app_id) for app_id in app_ids]

    def cancel_many(self, app_ids: Sequence[str]) -> None:
        """End jobs at once, without checkpoints."""
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            list(threads.map(self.cancel, app_ids))

    def lines(self, app_id: str, role: str, node: int, follow: bool) -> Iterator[str]:
        """Lines of a node's ranks, or of the coordinator, in the newest attempt; with `follow`, until it ends."""
        raise NotImplementedError

    def log_iter(
        self,
        app_id: str,
        role_name: str,
        k: int = 0,
        regex: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        should_tail: bool = False,
        streams: Stream | None = None,
    ) -> Iterable[str]:
        lines = self.lines(app_id, role_name, k, should_tail)
        return filter_regex(regex, lines) if regex else lines


def known_runs(launcher: str) -> Path:
    """Where a launcher keeps a link for each app that was submitted from this machine: id -> run directory."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "fsdp_jobs" / launcher


def remember(launcher: str, app_id: str, run: RunDir) -> None:
    """Keep a link to a submitted run; one of the same id, from before a cluster was set up anew, is replaced."""
    link = known_runs(launcher) / app_id
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(run.path.resolve())


def run_of(launcher: str, app_id: str) -> RunDir | None:
    """The run directory of an app, when it was submitted from this machine and is still there."""
    link = known_runs(launcher) / app_id
    return RunDir(link.resolve()) if link.is_dir() else None


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
