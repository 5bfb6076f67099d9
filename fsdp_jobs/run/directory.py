"""Every path inside a run directory, and writes that are whole or not there. No torch.

config.yaml  plan.json  job.json  submit/  code/
attempts/<k>/coordinator.log  attempts/<k>/verdict.json  attempts/<k>/node-<i>/{agent,rank-<r>}.log
events.jsonl  metrics.jsonl  checkpoints/step-00000100/  report.html

Only this module knows these names, except that of a launcher's own records, which it keeps in submit/.
"""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import itertools
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.schema import CheckpointConfig, JobConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_JOBS = "[!.]*/job.json"  # of runs: a hidden folder is one that is being removed
_LOCKED_S = 60.0  # a submission takes seconds


def write_atomic(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "w") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    except BaseException as e:
        temporary.unlink(missing_ok=True)
        if isinstance(e, OSError):
            e.filename = str(path)  # a full disk does not name it
        raise


def as_written(path: Path | str) -> Path:
    """Make a path absolute and keep the links in it: an automounter's may lead elsewhere on another machine.

    A relative one begins where `pwd` says that the shell is, which the kernel knows by its real place only. One with
    `..` is resolved: what it leads out of may be a link.
    """
    here = Path(os.environ.get("PWD", ""))
    with suppress(OSError):
        if here.is_absolute() and here.samefile("."):
            path = here / path
    return (Path.cwd() / path).resolve() if ".." in Path(path).parts else Path.cwd() / path


def user_name() -> str:
    """Return this user's name, or the number where the system has no name for it, as in many containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def try_lock(file: IO[str]) -> bool:
    """Lock an open file for as long as it is open, here or in a process that inherits it; False when another has it.

    The kernel frees it when its holder dies. Between machines it holds on NFS 4, GPFS, and Lustre mounted with flock;
    on a file system without locks everybody gets it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # ENOLCK, ENOSYS, EOPNOTSUPP: there are none here
        return True
    return True


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text())) if path.exists() else {}
    except (ValueError, TypeError) as e:
        raise BadInput([Problem(str(path), f"damaged: {e}", "restore the file, or move its run away")]) from e


class _Within:
    """A path in a run directory, made when it is asked for: of hundreds of runs few paths are."""

    def __init__(self, path: str):
        self.path = path

    def __get__(self, run: RunDir, _kind: object = None) -> Path:
        return run.path / self.path


class RunDir:
    """The paths of one run."""

    config = _Within("config.yaml")
    plan = _Within("plan.json")
    job = _Within("job.json")
    identity = _Within("identity.json")  # who began this run, and where
    submit = _Within("submit")
    code = _Within("code")  # a copy of the code as it was at submission, or a link to one
    request = _Within("submit/request.txt")  # what the launcher was given, as `dry_run` prints it
    shape = _Within("submit/shape.json")  # of a custom model, for planning at run time
    topology = _Within("submit/topology.yaml")  # the user's file, if there was one
    token = _Within("submit/token")  # proves to the coordinator that an agent belongs to this job
    node_labels = _Within("submit/node-labels.json")  # of Kubernetes machines, for planning at run time
    written_by = _Within("submit/written-by")  # the Kubernetes submission whose pods write into this directory
    left = _Within("submit/left")  # exists: the cluster may have something of the newest submission after its end
    mirrored = _Within("submit/mirrored.json")  # how far pods' logs have been copied into this directory
    stop_request = _Within("stop")  # exists: save a checkpoint and stop
    save_request = _Within("save")  # exists: save a checkpoint now, and continue
    excluded = _Within("excluded.json")  # machines that failed too often: {host: {until, why}}
    events = _Within("events.jsonl")
    metrics = _Within("metrics.jsonl")
    tracking = _Within("tracking.json")  # the tracker's id of this run, and how far it has the metrics
    tracking_lock = _Within("tracking.lock")  # one process at a time sends metrics
    checkpoints = _Within("checkpoints")
    tensorboard = _Within("tensorboard")
    export = _Within("export")
    report = _Within("report.html")

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.name = self.path.name

    def planned_interval_s(self) -> float:
        """Return the seconds from save to save that the plan at submission found best; half an hour without a plan."""
        return float(_read_object(self.plan).get("expected", {}).get("best_s", 1800.0))

    def planned_hardware(self) -> str:
        """Return the hardware that the newest submission was planned for; empty without a plan."""
        return str(_read_object(self.plan).get("hardware", ""))

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
        """Return the log of the coordinator, of a node's agent (`node-3`), or of another process of a launcher."""
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
        """Return the highest attempt there is a folder for, -1 before the first."""
        folders = (self.path / "attempts").glob("[0-9]*")
        return max((int(f.name) for f in folders if f.name.isdigit()), default=-1)

    def excluded_hosts(self) -> dict[str, str]:
        """Return machines that this job should not get now -> why. For launchers."""
        listed = _read_object(self.excluded)
        return {host: entry["why"] for host, entry in listed.items() if entry["until"] > time.time()}

    def exclude(self, host: str, for_s: float, why: str) -> None:
        """Exclude a machine for so many seconds."""
        listed = _read_object(self.excluded)
        listed[host] = {"until": time.time() + for_s, "why": why}
        write_atomic(self.excluded, json.dumps(listed, indent=2))

    def read_job(self) -> dict[str, Any]:
        """Return what was submitted last: handle, overrides, time, first attempt; empty before a submission.

        Raises:
            BadInput: the file is damaged.
        """
        return _read_object(self.job)

    @property
    def is_submitted(self) -> bool:
        """Return whether a launcher has taken this run: job.json is written before, and gets the handle after."""
        return "handle" in self.read_job()

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
        """The id of the newest submission, which its launcher and its processes know too; empty before the first."""
        return str(self.read_job().get("submission", ""))

    @property
    def pending_launcher(self) -> str | None:
        """The launcher that was asked to take the newest submission, as long as its answer is not recorded."""
        return self.read_job().get("pending")

    @contextmanager
    def locked(self, wait_s: float = _LOCKED_S) -> Iterator[None]:
        """Keep every other command from submitting this run. See `try_lock` for where this holds.

        Raises:
            BadInput: another command has not finished in time.
        """
        self.submit.mkdir(parents=True, exist_ok=True)
        with (self.submit / "lock").open("a+") as lock:
            deadline = time.monotonic() + wait_s
            while not try_lock(lock):
                if time.monotonic() > deadline:
                    lock.seek(0)
                    cure = "wait for it, or end it"
                    raise BadInput([Problem(f"run {self.name}", f"another command submits it: {lock.read()}", cure)])
                time.sleep(0.05)
            with suppress(OSError):  # a full disk: it is held all the same, and nobody is told by whom
                os.ftruncate(lock.fileno(), 0)
                os.write(lock.fileno(), f"process {os.getpid()} of {user_name()} on {socket.gethostname()}".encode())
            yield

    def first_attempt(self) -> int:
        """Return the attempt that the newest submission began with, or will; older ones belong to earlier ones."""
        return int(self.read_job().get("first_attempt", 0))


def checkpoints_of(config: CheckpointConfig, run: RunDir) -> Path:
    """Return the folder of a run's checkpoints: in its run directory, or `<checkpoint.dir>/<run name>`.

    For a URL it is a UPath: the methods of a Path, over fsspec.

    Raises:
        ImportError: a URL, and no universal_pathlib.
    """
    if config.dir is None:
        return run.checkpoints
    if "://" not in config.dir:
        return Path(config.dir) / run.name
    from upath import UPath

    # Listings are asked for anew each time: other ranks write here too.
    return cast(Path, UPath(config.dir, use_listings_cache=False) / run.name)


def digest_of(file: Path | str | None) -> str | None:
    """Return the SHA-256 of a file's content in hexadecimal; None where it cannot be read here."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file is not None else None
    except OSError:
        return None


def rank_logs(attempt: int | None = None, node: int | None = None, rank: int | None = None) -> str:
    """Make a pattern of ranks' logs under a run directory; None: every one."""
    numbers = ("*" if number is None else str(number) for number in (attempt, node, rank))
    return "attempts/{}/node-{}/rank-{}.log".format(*numbers)


def run_dir_of(config: JobConfig) -> RunDir:
    """Return the run directory that a configuration names; without a name, a new one.

    It is called after the script, or the kind of the model, and the time.

    Raises:
        BadInput: a name that is not one plain path component.
    """
    if config.name is not None:
        return find_run(config.runs_dir, config.name)
    program = Path(config.script).stem if config.script is not None else (config.module or "").rpartition(".")[2]
    word = re.sub(r"[^A-Za-z0-9._-]+|^[^A-Za-z0-9]+", "", program)[:60].replace("..", "")
    name = time.strftime(f"{word or config.model.kind}-%Y%m%d-%H%M%S")
    names = itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2)))
    return next(run for name in names if not (run := find_run(config.runs_dir, name)).path.exists())


def find_run(runs_dir: str, name: str) -> RunDir:
    """Return the run of a name under `runs_dir`, whether it exists or not.

    Raises:
        BadInput: a name that is not one plain path component.
    """
    if not _NAME.fullmatch(name) or ".." in name:
        what = "not a valid run name: letters, digits, '.', '_' and '-', at most 100, no '/' and no '..'"
        raise BadInput([Problem(f"name={name}", what, "runs_dir=... chooses the folder the run is in")])
    return RunDir(Path(runs_dir) / name)


def pending_in(runs_dir: str) -> list[RunDir]:
    """Return the runs under a folder that are being submitted, or were when the command died."""
    runs = (RunDir(job.parent) for job in Path(runs_dir).glob(_JOBS))
    return [run for run in runs if not run.is_damaged and run.pending_launcher is not None]


def runs_in(runs_dir: str) -> list[RunDir]:
    """Return every submitted run under a folder, oldest first; one whose record is damaged counts as submitted."""
    jobs = sorted(Path(runs_dir).glob(_JOBS), key=lambda f: f.stat().st_mtime)
    return [run for f in jobs if (run := RunDir(f.parent)).is_damaged or run.is_submitted]
