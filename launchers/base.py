"""The interface of a launcher, and the registry of launchers. TorchX is imported only when an AppDef is made.

A launcher turns jobs into submissions on one kind of cluster. Clusters lose the exit codes of nodes, so a job's
outcome is read from its run directory: the verdict of its newest attempt.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import yaml

from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.app import to_app
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import as_written
from fsdp_jobs.run.identity import Identity
from fsdp_jobs.run.state import State
from fsdp_jobs.run.tail import follow_files
from fsdp_jobs.run.verdict import Verdict, judge

if TYPE_CHECKING:
    from torchx.specs import AppDef, Role, RoleStatus

    from fsdp_jobs.launchers.torchx_adapter import TorchxScheduler
    from fsdp_jobs.plan.plan import Plan
    from fsdp_jobs.plan.shapes import ModelShape
    from fsdp_jobs.plan.topology import Topology

SESSION = "fsdp_jobs"  # stands for the cluster in handles of Compose, which has only one, and in old handles
_AT_ONCE = 16
STATE_HOME = "XDG_STATE_HOME=FOLDER, where this machine remembers submissions"
_AGENT_BYTES = 2**29  # an agent and its fork server, which has imported torch
_HOST_BYTES = 2**31  # a rank on a GPU
_met: dict[Path, RunDir] = {}  # a link that is missing here -> the run it would lead to

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")
_Item = TypeVar("_Item")
_Key = TypeVar("_Key")


def at_once(do: Callable[..., _Answer], *each: Iterable[Any]) -> list[_Answer]:
    """Call `do` for each in parallel; return results in order. Clusters and slow file systems serve many at once."""
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return list(threads.map(do, *each))


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> defaultdict[_Key, list[_Item]]:
    """Return each value of `key` -> the items that have it, in order."""
    groups = defaultdict[_Key, list[_Item]](list)
    for item in items:
        groups[key(item)].append(item)
    return groups


@dataclass
class Description:
    """A submission as its launcher knows it."""

    state: State
    message: str = ""  # why it waits, or how it ended
    roles: list[RoleStatus] = field(default_factory=list)  # for TorchX, if the cluster reports each node

    @classmethod
    def of_run(cls, run: RunDir, is_alive: bool) -> Description:
        """Describe a job by its run directory, for launchers that know only whether it is alive."""
        verdict = Verdict.read(run, run.last_attempt())
        state = State.RUNNING if is_alive else State.from_verdict(verdict)
        return cls(state, verdict.reason if verdict is not None else "")


@dataclass(frozen=True)
class Finding:
    """One thing that `doctor` has examined."""

    what: str
    state: str  # ok | warning: works, with a drawback | bad: jobs will not run
    fact: str
    cure: str = ""


def findings(what: str, problems: Sequence[Problem], fine: str = "nothing is missing") -> Iterator[Finding]:
    """Yield a finding for each problem, or one that there is none."""
    for problem in problems:
        yield Finding(what, "bad", f"{problem.where}: {problem.what}", problem.instead)
    if not problems:
        yield Finding(what, "ok", fine)


def to_yaml(*documents: object) -> str:
    """Render documents as YAML; parts that they share are repeated, without anchors and aliases."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return str(yaml.dump_all(json.loads(json.dumps(documents)), Dumper=dumper, sort_keys=False, width=1000))


def new_submission() -> str:
    """Return the id of a submission: the time and six random digits, in letters that every cluster takes."""
    return f"{time.strftime('%y%m%d%H%M%S')}-{secrets.token_hex(3)}"


@dataclass
class Job:
    """A validated and planned job."""

    config: JobConfig
    run: RunDir
    plan: Plan
    shape: ModelShape | None = None  # of its model, if that is known
    submission: str = field(default_factory=new_submission)  # jobs that are submitted together share it
    offline_notes: list[str] = field(default_factory=list)  # of a dry run that cannot ask the cluster

    @cached_property
    def app(self) -> AppDef:
        return to_app(self.config, self.run, self.plan.ranks_per_node, self.submission)

    @property
    def shm_need(self) -> int:
        """Bytes of /dev/shm that a node needs: for data workers' batches, NCCL between its ranks, and snapshots."""
        data, plan = self.config.data, self.plan
        is_program = self.config.is_program
        batches = 0 if is_program else data.workers * data.prefetch * data.micro_batch * (data.seq_len + 1) * 8
        channels = 0 if plan.backend == "gloo" else 64 * 2**20
        snapshots = plan.snapshot_bytes if self.config.checkpoint.memory.dir == "/dev/shm" else 0
        return int(plan.ranks_per_node * (batches + channels + 2**20)) + snapshots

    @property
    def memory_need(self) -> int:
        """Bytes of host memory that the plan expects a node to need, /dev/shm included; 0 if the model is unknown."""
        plan = self.plan
        if plan.memory is None:
            return 0
        rank = plan.memory.total if plan.backend == "gloo" else _HOST_BYTES + plan.memory.host
        return plan.ranks_per_node * rank + _AGENT_BYTES + self.shm_need

    def role(self, name: str) -> Role:
        """Return the app's coordinator or trainer."""
        return next(role for role in self.app.roles if role.name == name)


class Launcher(ABC):
    """Submits jobs to one kind of cluster. A method that takes many jobs asks the cluster once, where possible."""

    name: str  # of the TorchX scheduler, e.g. "slurm_fsdp"
    output = "text"  # the format of `artefact`

    @classmethod
    def forget(cls) -> None:
        """Drop the clusters' answers that the jobs of one command share."""
        return

    def topology(self, config: JobConfig) -> Topology | None:
        """Return the topology of this cluster's nodes; None if it does not report one."""
        return None

    def examine(self, config: JobConfig) -> Iterator[Finding]:
        """Examine this cluster for `doctor`; yield each finding as soon as it is known."""
        yield from ()

    def site_file(self) -> str:
        """Return the facts of this cluster that dry runs elsewhere need, as a file.

        Raises:
            BadInput: dry runs need none.
            JobFailed: the cluster does not answer.
        """
        raise BadInput.at("--save", f"dry runs of {self.name} need no facts of a cluster", "cluster=slurm does")

    def offline_notes(self, config: JobConfig) -> list[str]:
        """Return lines for a dry run that cannot ask the cluster: why, what it does not check, what it assumes.

        Empty if the cluster answers; `prepare` then reports what it refuses.
        """
        return []

    @abstractmethod
    def prepare(self, jobs: Sequence[Job]) -> list[Any]:
        """Return one request for each job; `str(request)` is what `dry_run` prints. Writes and starts nothing.

        Raises:
            BadInput: with all problems of all jobs.
        """

    def artefact(self, request: Any, files: Mapping[Path, str | None]) -> str:
        """Return exactly what the cluster gets, for another tool to submit, compare or keep.

        Args:
            request: one of `prepare`.
            files: path -> text of each file that submission would write into the run directory; None: no such file.
        """
        return str(request)

    @abstractmethod
    def submit(self, requests: Sequence[Any], parallelism: int, folder: Path | None) -> list[str]:
        """Submit all requests of `prepare`; return their app ids. If it raises, the caller removes submitted jobs.

        The submissions' ids are already in the run directories. A launcher passes them to the cluster, so that `find`
        finds the jobs there, and to the jobs' processes in SUBMISSION_ENV.

        Args:
            requests: one for each job.
            parallelism: how many may run at once, 0 for no limit; ignored by clusters that cannot limit it.
            folder: of the sweep, for the launcher's files; None for a single job.
        """

    def find(self, runs: Sequence[RunDir]) -> list[str | None]:
        """Return the app id of each run's newest submission, whose command died before it recorded the id.

        The cluster got the submission's id (`run.submission`) together with the job. None means that the cluster does
        not have the job; an incomplete one, which cannot run, is removed first.

        Raises:
            BadInput, JobFailed: the cluster does not answer.
        """
        return at_once(self.find_one, runs)

    def find_one(self, run: RunDir) -> str | None:
        """Find the job of one run, for `find`."""
        raise NotImplementedError

    def cluster_of(self, app_id: str) -> str:
        """Name the cluster that a command here reaches for this app; a handle names the one it was submitted to.

        Raises:
            BadInput, JobFailed: it cannot be determined now.
        """
        return socket.gethostname()

    @abstractmethod
    def describe(self, app_ids: Sequence[str]) -> list[Description | None]:
        """Describe submissions, in order; None for one that neither the cluster nor this machine knows."""

    def cancel(self, app_ids: Sequence[str]) -> None:
        """End jobs at once, without checkpoints; remove what ended jobs have left on the cluster."""
        at_once(self._cancel, app_ids)

    def _cancel(self, app_id: str) -> None:
        verdict, run = self.end(app_id), self.run_of(app_id)
        if verdict is not None and run is not None:
            judge(run, verdict)

    def end(self, app_id: str) -> Verdict | None:
        """End one job, for `cancel`; return its verdict if it was active."""
        raise NotImplementedError

    def replace_lost(self, app_id: str) -> str:
        """Replace lost parts of a live job that its cluster does not replace; return which, empty for none."""
        return ""

    def logs(self, app_id: str, role: str, node: int, follow: bool) -> Iterator[str]:
        """Yield lines of a node's ranks, or of the coordinator, in the newest attempt; with `follow`, until it ends."""
        run = self.run_of(app_id)
        if run is None:
            raise BadInput.at(f"{self.name} job {app_id}", "was not submitted by you from this machine")

        def running() -> bool:
            (job,) = self.describe([app_id]) if follow else (None,)
            return job is not None and job.state.is_active

        attempt = run.last_attempt()
        log = run.process_log(attempt, "coordinator")
        folder, pattern = (log.parent, log.name) if role == "coordinator" else (run.node(attempt, node), "*.log")
        return (line + "\n" for _, line in follow_files(folder, pattern, running))

    @property
    def links(self) -> Path:
        """The folder of links, app id -> run directory, of submissions from this machine.

        Raises:
            BadInput: this user has no home.
        """
        try:
            base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
        except RuntimeError as e:
            raise BadInput.at("HOME", "is not set, and the system knows no home of this user", STATE_HOME) from e
        return Path(base) / "fsdp_jobs" / self.name.removesuffix("_fsdp")

    def known(self) -> list[str]:
        """Return the app ids that were submitted from this machine."""
        return sorted(link.name for link in self.links.glob("[!.]*"))  # none of a killed `check_links`

    def remember(self, app_id: str, run: RunDir, cluster: str = "") -> None:
        """Keep a link to a submitted run; a cluster that is set up anew reuses ids, so an old link is replaced.

        Raises:
            BadInput: it cannot be written.
        """
        link = self._link(app_id, cluster)
        try:
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(as_written(run.path))
        except OSError as e:
            raise BadInput.at(str(e.filename or link), str(e.strerror), STATE_HOME) from e

    def check_links(self, run: RunDir) -> None:
        """Check that links can be made, before a cluster gets a job that could then be neither found nor cancelled.

        Raises:
            BadInput: as `remember`.
        """
        name = f".{secrets.token_hex(8)}"  # no other command's
        self.remember(name, run)
        self._link(name).unlink()

    def relink(self, app_id: str, cluster: str, run: RunDir) -> None:
        """Update the link to a run directory that was moved; `run_of` also knows a run whose link is elsewhere.

        It is in the XDG_STATE_HOME of another shell, or another user's, for whom this one may act.
        """
        link, identity = self._link(app_id, cluster), Identity.from_file(run.identity)
        if link.is_symlink():
            if not RunDir(link.readlink()).job.exists():
                _met[link] = run  # if the link cannot be written
                self.remember(app_id, run, cluster)
        elif identity is not None and not identity.may_be_copy(run):
            _met[link] = run

    def _link(self, app_id: str, cluster: str = "") -> Path:
        """Return an app's link; ids are unique across clusters."""
        return self.links / app_id

    def run_of(self, app_id: str, cluster: str = "") -> RunDir | None:
        """Return the run directory of an app; None if it was removed, or not submitted from this machine.

        `cluster` is that of its handle; by default the cluster that a command here reaches.
        """
        link = self._link(app_id, cluster)
        return RunDir(link.readlink()) if link.is_dir() else _met.get(link)

    @classmethod
    def scheduler(cls, session_name: str, **_kwargs: object) -> TorchxScheduler:
        """Return this launcher as a TorchX scheduler; TorchX calls it."""
        from fsdp_jobs.launchers.torchx_adapter import TorchxScheduler

        return TorchxScheduler(cls(), session_name)


def prepare_each(
    jobs: Sequence[Job], problems_of: Callable[[Job], Iterable[Problem]], translate: Callable[[Job], _Request]
) -> list[_Request]:
    """Translate jobs that have no problems.

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


class Handle(NamedTuple):
    """The parts of `launcher://cluster/id`."""

    launcher: str
    cluster: str
    app_id: str


def parse_handle(handle: str) -> Handle:
    """Return the parts of a job's handle."""
    launcher, _, place = handle.partition("://")
    cluster, _, app_id = place.rpartition("/")
    return Handle(launcher, cluster, app_id)


@cache
def _installed() -> EntryPoints:
    return entry_points(group="torchx.schedulers")  # reads the metadata of every installed package


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
        raise BadInput.at(f"cluster.launcher={name}", what, "cluster=local runs on this machine")
    return kind()
