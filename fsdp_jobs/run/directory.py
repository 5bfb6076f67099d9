"""Define every path in a run directory, and find runs. No torch.

config.yaml  plan.json  job.json  submit/  code/
attempts/<k>/coordinator.log  attempts/<k>/verdict.json  attempts/<k>/node-<i>/{agent,rank-<r>}.log
events.jsonl  metrics.jsonl  checkpoints/step-00000100/  report.html

Only this module defines these names, except those of a launcher's own records in submit/.
"""

from __future__ import annotations

import getpass
import itertools
import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

from fsdp_jobs.config.errors import BadInput, one_line
from fsdp_jobs.config.schema import CheckpointConfig, JobConfig
from fsdp_jobs.run.files import listing, read_json, try_lock, write_json
from fsdp_jobs.run.record import JsonObject
from fsdp_jobs.run.threads import wait_until

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LOCKED_S = 60.0  # a submission takes seconds


def user_name() -> str:
    """Return this user's name, or the number if the system has no name for it, as in many containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


_warn_once = cache(logger.warning)


@dataclass
class _Within:
    """A path in a run directory, built on access: most paths of hundreds of listed runs are never used."""

    path: str

    def __get__(self, run: RunDir, _kind: object = None) -> Path:
        return run.path / self.path


class RunDir:
    """The paths of one run."""

    config = _Within("config.yaml")
    plan = _Within("plan.json")
    job = _Within("job.json")
    identity = _Within("identity.json")  # who started this run, and where
    submit = _Within("submit")
    code = _Within("code")  # a copy of the code as it was at submission, or a link to one
    request = _Within("submit/request.txt")  # the launcher's input, as `dry_run` prints it
    shape = _Within("submit/shape.json")  # of the model, for planning at run time
    topology = _Within("submit/topology.yaml")  # the user's file, if there was one
    token = _Within("submit/token")  # proves to the coordinator that an agent belongs to this job
    node_labels = _Within("submit/node-labels.json")  # of Kubernetes machines, for planning at run time
    written_by = _Within("submit/written-by")  # the Kubernetes submission whose pods write into this directory
    left = _Within("submit/left")  # exists: the cluster may still have leftovers of the newest submission
    mirrored = _Within("submit/mirrored.json")  # how far pods' logs have been copied into this directory
    stop_request = _Within("stop")  # exists: save a checkpoint and stop
    save_request = _Within("save")  # exists: save a checkpoint now, and continue
    excluded = _Within("excluded.json")  # machines that failed too often: {host: {until, why}}
    events = _Within("events.jsonl")
    metrics = _Within("metrics.jsonl")
    tracking = _Within("tracking.json")  # the tracker's id of this run, and how much of the metrics was sent
    tracking_lock = _Within("tracking.lock")  # one process at a time sends metrics
    checkpoints = _Within("checkpoints")
    tensorboard = _Within("tensorboard")
    export = _Within("export")
    report = _Within("report.html")

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.name = self.path.name

    def planned_interval_s(self) -> float:
        """Return the seconds between saves that the plan at submission found best; half an hour without a plan."""
        with suppress(BadInput, LookupError):
            return float(read_json(self.plan)["expected"]["best_s"])
        return 1800.0

    def attempt(self, attempt: int) -> Path:
        return self.path / "attempts" / str(attempt)

    def verdict(self, attempt: int) -> Path:
        return self.attempt(attempt) / "verdict.json"

    def verdicts(self) -> list[Path]:
        """Return the verdict files of all attempts that have ended."""
        return list(self.path.glob("attempts/*/verdict.json"))

    def notified(self, attempt: int, decision: str) -> Path:
        """Return the file that marks a decision whose notification was sent."""
        return self.attempt(attempt) / f"notified-{decision}"

    def process_log(self, attempt: int, process: str) -> Path:
        """Return the log of a process: the coordinator, a node's agent (`node-3`), or another process of a launcher."""
        return self.attempt(attempt) / (f"{process}/agent.log" if process.startswith("node-") else f"{process}.log")

    def tracking_log(self, attempt: int, node: int) -> Path:
        return self.node(attempt, node) / "tracking.log"

    def node(self, attempt: int, node: int) -> Path:
        return self.attempt(attempt) / f"node-{node}"

    def rank_log(self, attempt: int, node: int, rank: int) -> Path:
        return self.node(attempt, node) / f"rank-{rank}.log"

    def stacks(self, attempt: int, node: int, rank: int) -> Path:
        return self.node(attempt, node) / f"stacks-rank-{rank}.txt"

    def last_attempt(self) -> int:
        """Return the highest attempt that has a folder, -1 before the first."""
        return max((int(f.name) for f in listing(self.path / "attempts") if f.name.isdecimal()), default=-1)

    def excluded_hosts(self) -> dict[str, str]:
        """Return machine -> reason for the machines that this job should not get now; none if the file is damaged.

        A user may be editing it while the job runs.
        """
        try:
            listed = read_json(self.excluded)
            return {host: entry["why"] for host, entry in listed.items() if entry["until"] > time.time()}
        except (BadInput, OSError, LookupError, TypeError, AttributeError) as e:
            _warn_once(f"no machine is excluded: {one_line(e)}")
            return {}

    def exclude(self, host: str, for_s: float, why: str) -> None:
        """Exclude a machine for `for_s` seconds."""
        listed = read_json(self.excluded)
        listed[host] = {"until": time.time() + for_s, "why": why}
        write_json(self.excluded, listed)

    def read_job(self) -> JsonObject:
        """Return the record of the newest submission: handle, overrides, time, first attempt; empty before the first.

        Raises:
            BadInput: the file is damaged.
        """
        return read_json(self.job)

    @property
    def is_submitted(self) -> bool:
        """Return whether a launcher has accepted this run: then job.json, which is written before, gets the handle."""
        return bool(self.handle)

    @property
    def is_damaged(self) -> bool:
        """Return whether the record of its submission cannot be read."""
        try:
            self.read_job()
        except (BadInput, OSError):
            return True
        return False

    @property
    def submission(self) -> str:
        """The id of the newest submission, shared by its launcher and its processes; empty before the first."""
        return str(self.read_job().get("submission", ""))

    @property
    def handle(self) -> str:
        """The handle of the newest submission that a launcher has accepted; empty before the first."""
        return str(self.read_job().get("handle", ""))

    @property
    def pending_launcher(self) -> str | None:
        """The launcher that the newest submission was sent to, until its answer is recorded."""
        return self.read_job().get("pending")

    @contextmanager
    def locked(self, wait_s: float = _LOCKED_S) -> Iterator[None]:
        """Keep every other command from submitting this run. `try_lock` lists the file systems where this works.

        Raises:
            BadInput: another command has not finished in time.
        """
        self.submit.mkdir(parents=True, exist_ok=True)
        with (self.submit / "lock").open("a+") as file:
            if not wait_until(lambda: try_lock(file), wait_s, 0.05):
                file.seek(0)
                what = f"another command submits or removes it: {file.read()}"
                raise BadInput.at(f"run {self.name}", what, "wait for it, or end it")
            with suppress(OSError):  # a full disk: the lock is held, but does not name its holder
                os.ftruncate(file.fileno(), 0)
                os.write(file.fileno(), f"process {os.getpid()} of {user_name()} on {socket.gethostname()}".encode())
            yield

    def first_attempt(self) -> int:
        """Return the first attempt of the newest submission, begun or not; older ones belong to earlier submissions."""
        return int(self.read_job().get("first_attempt", 0))


def checkpoints_of(config: CheckpointConfig, run: RunDir) -> Path:
    """Return the folder of a run's checkpoints: in its run directory, or `<checkpoint.dir>/<run name>`.

    For a URL it is a UPath: the methods of a Path, over fsspec.

    Raises:
        ImportError: for a URL, if universal_pathlib is not installed.
    """
    if config.dir is None:
        return run.checkpoints
    if "://" not in config.dir:
        return Path(config.dir) / run.name
    from upath import UPath

    # Listings are not cached: other ranks also write here.
    return cast(Path, UPath(config.dir, use_listings_cache=False) / run.name)


def rank_logs(attempt: int | None = None, node: int | None = None, rank: int | None = None) -> str:
    """Return a glob of ranks' logs under a run directory; None stands for every attempt, node or rank."""
    numbers = ("*" if number is None else str(number) for number in (attempt, node, rank))
    return "attempts/{}/node-{}/rank-{}.log".format(*numbers)


def run_dir_of(config: JobConfig) -> RunDir:
    """Return the run directory that a configuration names; without a name, a new one.

    The new name consists of the script, or the kind of the model, and the time.

    Raises:
        BadInput: a name that is not one plain path component.
    """
    if config.name is not None:
        return find_run(config.runs_dir, config.name)
    program = Path(config.script).stem if config.script is not None else (config.module or "").rpartition(".")[2]
    name = time.strftime(f"{_valid(program) or config.model.kind}-%Y%m%d-%H%M%S")
    names = itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2)))
    return next(run for name in names if not (run := find_run(config.runs_dir, name)).path.exists())


def find_run(runs_dir: str, name: str) -> RunDir:
    """Return the run named `name` under `runs_dir`, whether or not it exists.

    Raises:
        BadInput: a name that is not one plain path component.
    """
    if not _NAME.fullmatch(name) or ".." in name:
        what = "not a valid run name: letters, digits, '.', '_' and '-', at most 100, no '/' and no '..'"
        valid = _valid(Path(name).name) or "NAME"
        raise BadInput.at(f"name={name}", what, f"{valid}; runs_dir=... chooses the folder the run is in")
    return RunDir(Path(runs_dir) / name)


def _valid(name: str) -> str:
    """Return the nearest valid name, which may be empty."""
    return "-".join(re.findall("[A-Za-z0-9]+(?:[._-][A-Za-z0-9]+)*", name))[:60]


def recorded_in(runs_dir: str) -> list[RunDir]:
    """Return every run under a folder that has a record of a submission, oldest first.

    Raises:
        OSError: the folder exists and cannot be listed.
    """
    found = []
    for run in map(RunDir, listing(Path(runs_dir))):
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):  # no run, or another user's
            if not run.name.startswith("."):  # such a folder is being removed
                found.append((run.job.stat().st_mtime, run.path, run))
    return [run for *_, run in sorted(found)]


def pending_in(runs_dir: str) -> list[RunDir]:
    """Return the runs under a folder whose submission is in progress, or was when its command died."""
    return [run for run in recorded_in(runs_dir) if not run.is_damaged and run.pending_launcher is not None]


def runs_in(runs_dir: str) -> list[RunDir]:
    """Return every submitted run under a folder, oldest first; one whose record is damaged counts as submitted."""
    return [run for run in recorded_in(runs_dir) if run.is_damaged or run.is_submitted]
