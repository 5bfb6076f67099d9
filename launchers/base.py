"""The interface of a launcher, and the registry of launchers. TorchX is imported when a job is made of one.

A launcher turns jobs into submissions on one kind of cluster. Exit codes of nodes get lost on the way, so what
became of a job is read from its run directory: the verdict of its newest attempt.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.app import to_app
from fsdp_jobs.launchers.state import State
from fsdp_jobs.run.directory import RunDir, as_written
from fsdp_jobs.run.tail import follow_files
from fsdp_jobs.run.verdict import Verdict, judge

if TYPE_CHECKING:
    from torchx.specs import AppDef, Role, RoleStatus

    from fsdp_jobs.launchers.torchx_adapter import TorchxScheduler
    from fsdp_jobs.plan.plan import Plan
    from fsdp_jobs.plan.shapes import ModelShape
    from fsdp_jobs.plan.topology import Topology

SESSION = "fsdp_jobs"  # in a handle in place of the cluster, where there is only one, and in old handles
_AT_ONCE = 16

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")


def at_once(do: Callable[..., _Answer], *each: Iterable[Any]) -> list[_Answer]:
    """Return what `do` returns for each, in order: a cluster, or a slow file system, serves many at the same time."""
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return list(threads.map(do, *each))


@dataclass
class Description:
    """A submission as its launcher knows it."""

    app_id: str
    state: State
    message: str = ""  # why it waits, or how it ended
    restarts: int = 0
    roles: list[RoleStatus] = field(default_factory=list)  # for TorchX, where the cluster tells of each node

    @classmethod
    def of_run(cls, app_id: str, run: RunDir, is_alive: bool) -> Description:
        """Describe a job by its run directory, where a launcher knows no more than whether it is alive."""
        verdict = Verdict.read(run, run.last_attempt())
        state = State.RUNNING if is_alive else State.from_verdict(verdict)
        return cls(app_id, state, verdict.reason if verdict is not None else "", restarts_of(run))


def restarts_of(run: RunDir) -> int:
    """Return how many attempts have followed the first one of the newest submission."""
    return max(0, run.last_attempt() - run.first_attempt())


@dataclass(frozen=True)
class Finding:
    """One thing that `doctor` has examined."""

    what: str
    state: str  # ok | warning: works, with a drawback | bad: jobs will not run
    fact: str
    cure: str = ""


def findings(what: str, problems: Sequence[Problem], fine: str = "nothing is missing") -> Iterator[Finding]:
    """Yield a finding for each problem, or that there is none."""
    for problem in problems:
        yield Finding(what, "bad", f"{problem.where}: {problem.what}", problem.instead)
    if not problems:
        yield Finding(what, "ok", fine)


def new_submission() -> str:
    """Return the id of a submission: the time and six random digits, in letters that every cluster takes."""
    return f"{time.strftime('%y%m%d%H%M%S')}-{secrets.token_hex(3)}"


@dataclass
class Job:
    """A validated and planned job."""

    config: JobConfig
    run: RunDir
    plan: Plan
    shape: ModelShape | None = None  # of a custom model
    submission: str = field(default_factory=new_submission)  # jobs that are submitted together share it
    away: list[str] = field(default_factory=list)  # of a dry run that cannot ask the cluster: as `Launcher.away`

    @cached_property
    def app(self) -> AppDef:
        return to_app(self.config, self.run, self.plan.ranks_per_node, self.submission)

    def role(self, name: str) -> Role:
        """Return the app's coordinator or trainer."""
        return next(role for role in self.app.roles if role.name == name)


class Launcher(ABC):
    """Submits jobs to one kind of cluster. Every method takes many jobs and asks the cluster once where it can."""

    name: str  # of the TorchX scheduler, e.g. "slurm_fsdp"
    output = "text"  # the format of `artefact`

    def topology(self, config: JobConfig) -> Topology | None:
        """Return where the nodes of this cluster are; None when it does not say."""
        return None

    def examine(self, config: JobConfig) -> Iterator[Finding]:
        """Yield what `doctor` should know about this cluster, as it is examined."""
        yield from ()

    def site_file(self) -> str:
        """Return the facts of this cluster that dry runs elsewhere need, as a file.

        Raises:
            BadInput: they need none.
            JobFailed: the cluster does not answer.
        """
        raise BadInput([Problem("--save", f"dry runs of {self.name} need no facts of a cluster", "cluster=slurm does")])

    def away(self, config: JobConfig) -> list[str]:
        """Return why this machine cannot ask the cluster, what a dry run then does not check, and what it assumes.

        Empty: it can; what the cluster then refuses is for `prepare` to say.
        """
        return []

    @abstractmethod
    def prepare(self, jobs: Sequence[Job]) -> list[Any]:
        """Return one request for each job; `str(request)` is what `dry_run` prints. Writes and starts nothing.

        Raises:
            BadInput: with all problems of all jobs.
        """

    def artefact(self, request: Any, files: Mapping[Path, str | None]) -> str:
        """Return what the cluster gets, and nothing else, for another tool to submit, compare or keep.

        Args:
            request: one of `prepare`.
            files: path -> text of what submission would write into the run directory; None: nothing.
        """
        return str(request)

    @abstractmethod
    def submit(self, requests: Sequence[Any], parallelism: int, folder: Path | None) -> list[str]:
        """Submit all requests of `prepare`; return their app ids. When it raises, `find` and `cancel` undo the rest.

        The ids of their submissions are in the run directories already. A launcher gives them to the cluster, so that
        `find` finds the jobs there, and to the processes of the jobs, by SUBMISSION_ENV.

        Args:
            requests: one for each job.
            parallelism: how many may run at once, 0 for no limit; heeded where the cluster can.
            folder: of the sweep, for the launcher's files; None for a job by itself.
        """

    @abstractmethod
    def find(self, run: RunDir) -> str | None:
        """Return the app id of a run's newest submission, whose command died before it could record it.

        The id of the submission (`run.submission`) was given to the cluster together with the job. None means that
        the cluster has not got the job; what there is of it that cannot run is removed first.

        Raises:
            BadInput, JobFailed: the cluster does not answer.
        """

    def cluster_of(self, app_id: str) -> str:
        """Name the cluster that a command here reaches for this app; a handle names the one it was submitted to.

        Raises:
            BadInput, JobFailed: it cannot be told now.
        """
        return socket.gethostname()

    @abstractmethod
    def describe(self, app_ids: Sequence[str]) -> list[Description | None]:
        """Describe submissions, in order; None for one that neither the cluster nor this machine knows."""

    def cancel(self, app_ids: Sequence[str]) -> None:
        """End jobs at once, without checkpoints; of one that has ended, whatever its end has left on the cluster."""
        at_once(self._cancel, app_ids)

    def _cancel(self, app_id: str) -> None:
        verdict, run = self.end(app_id), self.run_of(app_id)
        if verdict is not None and run is not None:
            judge(run, verdict)

    def end(self, app_id: str) -> Verdict | None:
        """End one job as `cancel` does; return the verdict of one that was active. For `cancel` alone."""
        raise NotImplementedError

    def replace_lost(self, app_id: str) -> str:
        """Replace what of a live job is lost and its cluster does not replace; say what. Empty: nothing is."""
        return ""

    def logs(self, app_id: str, role: str, node: int, follow: bool) -> Iterator[str]:
        """Yield lines of a node's ranks, or of the coordinator, in the newest attempt; with `follow`, until it ends."""
        run = self.run_of(app_id)
        if run is None:
            raise BadInput([Problem(f"{self.name} job {app_id}", "was not submitted by you from this machine")])

        def running() -> bool:
            (job,) = self.describe([app_id]) if follow else (None,)
            return job is not None and job.state.is_active

        attempt = run.last_attempt()
        log = run.process_log(attempt, "coordinator")
        folder, pattern = (log.parent, log.name) if role == "coordinator" else (run.node(attempt, node), "*.log")
        return (line + "\n" for _, line in follow_files(folder, pattern, running))

    @property
    def _links(self) -> Path:
        """The folder of links, app id -> run directory, of what was submitted from this machine."""
        base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
        return Path(base) / "fsdp_jobs" / self.name.removesuffix("_fsdp")

    def known(self) -> list[str]:
        """Return the app ids that were submitted from this machine."""
        return sorted(link.name for link in self._links.glob("*"))

    def remember(self, app_id: str, run: RunDir) -> None:
        """Keep a link to a submitted run; ids begin again when a cluster is set up anew, so an old link is replaced."""
        _lead(self._link(app_id), run)

    def follow(self, app_id: str, cluster: str, run: RunDir) -> None:
        """Have the link to a run directory that was moved lead to where it is now."""
        link = self._link(app_id, cluster)
        if link.is_symlink() and not RunDir(link.readlink()).job.exists():
            _lead(link, run)

    def _link(self, app_id: str, cluster: str = "") -> Path:
        """Return an app's link; ids are unique over clusters."""
        return self._links / app_id

    def run_of(self, app_id: str, cluster: str = "") -> RunDir | None:
        """Return the run directory of an app; None when it is gone or was not submitted from this machine.

        `cluster` is that of its handle; without one it is the cluster that a command here reaches.
        """
        link = self._link(app_id, cluster)
        return RunDir(link.readlink()) if link.is_dir() else None

    @classmethod
    def scheduler(cls, session_name: str, **_kwargs: object) -> TorchxScheduler:
        """Return this launcher as TorchX makes its schedulers."""
        from fsdp_jobs.launchers.torchx_adapter import TorchxScheduler

        return TorchxScheduler(cls(), session_name)


def _lead(link: Path, run: RunDir) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(as_written(run.path))


def prepare_each(
    jobs: Sequence[Job], problems_of: Callable[[Job], Iterable[Problem]], translate: Callable[[Job], _Request]
) -> list[_Request]:
    """Translate jobs that nothing is wrong with.

    Raises:
        BadInput: with all problems of all jobs, and those that `translate` raises.
    """
    requests, problems = [], []
    for job in jobs:
        try:
            if found := [*problems_of(job)]:
                raise BadInput(found)
            requests.append(translate(job))
        except BadInput as e:
            problems += e.problems
    if problems:
        raise BadInput(problems)
    return requests


def parse_handle(handle: str) -> tuple[str, str, str]:
    """Return launcher, cluster and app id of a handle, `launcher://cluster/id`."""
    launcher, _, place = handle.partition("://")
    cluster, _, app_id = place.rpartition("/")
    return launcher, cluster, app_id


@cache
def _installed() -> EntryPoints:
    return entry_points(group="torchx.schedulers")  # reads what every installed package says of itself


def launcher_of(name: str) -> Launcher:
    """Return the launcher that is installed under a name: its `scheduler` is the entry point.

    Raises:
        BadInput: there is none, or it is another project's TorchX scheduler.
    """
    installed = _installed()
    kind = getattr(installed[name].load(), "__self__", None) if name in installed.names else None
    if not isinstance(kind, type) or not issubclass(kind, Launcher):
        ours = ", ".join(sorted(known for known in installed.names if known.endswith("_fsdp")))
        what = f"not an installed launcher of fsdp_jobs; installed: {ours}"
        raise BadInput([Problem(f"cluster.launcher={name}", what, "cluster=local runs on this machine")])
    return kind()
