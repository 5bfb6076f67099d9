"""The events of a run: one type per event, stored as append-only JSON lines. No torch.

A line holds `time`, `event`, `attempt`, `round` if there is one, and the fields of the event's type. The event is named
after its type: `RoundBroken` is `round_broken`.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, TypeVar, dataclass_transform

import msgspec

from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import lock, unlock_and_close
from fsdp_jobs.run.record import JsonObject
from fsdp_jobs.run.table import counted
from fsdp_jobs.run.tail import Tail, is_cut, json_objects, newest_json_lines, read_json_lines
from fsdp_jobs.run.term import Fenced, check_may_record, is_answered, job_time

# Work for which a node can need longer than the others.
SLOW_CAUSES = {
    "data": "it waits for its data",
    "checkpoint": "it waits for checkpoints",
    "host": "its CPU issues the forward pass in",
    "compute": "its forward pass takes",
}
_CHECKPOINT = b'"event": "checkpoint",'

_SOON_S = 0.1  # how long a check that this node may record stays valid

logger = logging.getLogger(__name__)


@dataclass_transform(frozen_default=True)  # every subclass becomes a frozen dataclass
@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to a run; this type itself stands for events of unknown kinds."""

    KINDS: ClassVar[dict[str, type[Event]]] = {}
    kind: ClassVar[str] = ""
    _template: ClassVar[str | None] = None
    _style: ClassVar[str] = "yellow"

    time: float = 0.0  # seconds since 1970, by the clock of the coordinator
    attempt: int = -1
    round: int | None = None  # the coordinator's; None if another process recorded the event

    def __init_subclass__(cls, sentence: str | None = None, style: str = "yellow") -> None:
        dataclass(frozen=True)(cls)
        cls._template, cls._style = sentence, style
        cls.kind = re.sub(r"(?<=.)(?=[A-Z])", "_", cls.__name__).lower()
        cls.KINDS[cls.kind] = cls

    @property
    def style(self) -> str:
        """Return the rich style of the sentence."""
        return self._style

    def sentence(self) -> str | None:
        """Describe the event for the user; None if another event's sentence covers it."""
        if self._template is None:
            return None
        lists = {key: "; ".join(map(str, value)) for key, value in vars(self).items() if isinstance(value, list)}
        return self._template.format_map(vars(self) | lists)

    def to_record(self) -> JsonObject:
        """Return the content of its line; fields that are None are left out."""
        known = {name: value for name, value in vars(self).items() if value is not None}
        return {"time": self.time, "event": self.kind, "attempt": self.attempt} | known


_Kind = TypeVar("_Kind", bound=Event)


class Submitted(Event):
    """A cluster has accepted the job."""

    handle: str | None = None
    version: int = 1  # of this file's lines; grows when a field is removed or changes its meaning


class AttemptStarted(Event):
    """The processes of an attempt are being started."""

    nodes: int | None = None
    hosts: list[str] | None = None
    slurm_job: str | None = None
    restarts: int | None = None  # of the SLURM job


class RoundStarted(Event, style="cyan"):
    """The nodes of a round and their ranks are fixed."""

    nodes: list[int]
    hosts: list[str]
    strategy: str
    shard_group: int
    world_size: int
    spares: list[int] = field(default_factory=list)
    why: list[str] = field(default_factory=list)
    term: int | None = None  # the round's fencing number, over all attempts; None in records of earlier versions

    def sentence(self) -> str:
        hosts = sorted(set(self.hosts))
        where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
        return (
            f"round {self.round}: {counted(len(self.nodes), 'node')}, {counted(self.world_size, 'rank')} on {where}, "
            f"{self.strategy} over groups of {self.shard_group}"
        )


class Adopted(Event):
    """A new coordinator has taken over a running round."""

    nodes: int


class RoundBroken(Event):
    """A failure, or a node that leaves or joins, has ended a round."""

    why: str
    step: int
    committed: int  # step of the newest checkpoint
    blamed: str | None = None  # host
    failed_at: float | None = None  # time of the failure, seconds since 1970; None in records of earlier versions
    is_planned: bool | None = None  # a node leaves or joins

    def sentence(self) -> str:
        known = self.step > 0 or self.committed >= 0
        return self.why.removesuffix(".") + f"; at step {self.step}, newest checkpoint {self.committed}" * known


class NodeLost(Event, sentence="lost node {node}: {why}"):
    node: int
    host: str
    why: str


class Stalled(Event):
    """Ranks have stopped advancing; the sentence of `round_broken` covers it."""

    why: str


class MachineExcluded(Event, sentence="machine {host} is excluded for a while: {why}", style="red"):
    host: str
    why: str
    is_slow: bool | None = None  # it has not failed


class SlowNode(Event, style="red"):
    """A node needs longer than the others for its own work, and slows them down."""

    node: int
    host: str
    cause: str  # data | checkpoint | host | compute
    own_s: float  # per step, of the node's slowest rank
    others_s: float  # the median of the other nodes
    others: int  # how many there are
    lost_s: float  # per step
    step_s: float
    hours_per_day: float  # that all ranks lose
    throttled: list[str] = field(default_factory=list)  # reasons that the driver reports

    def sentence(self) -> str:
        what = f"{SLOW_CAUSES[self.cause]} {1e3 * self.own_s:.1f} ms per step, {1e3 * self.others_s:.1f} ms"
        others = f"on the median of {self.others} other nodes" if self.others > 1 else "on the only other node"
        cost = f"{self.lost_s / self.step_s:.0%} of each step, {self.hours_per_day:.3g} GPU hours a day"
        doubt = "" if self.others > 1 else "; with two nodes it is not known which one is normal"
        return f"node {self.node} ({self.host}) is slow: {what} {others}; this costs {cost}{doubt}" + "".join(
            f"; {why}" for why in self.throttled
        )


class SlowSteps(Event, sentence="{why}"):
    """Steps take longer than they should, but no single node is the cause."""

    why: str


class ProcessRestarted(Event, sentence="{process} ended with {exit_code} and is restarted"):
    process: str
    exit_code: int


class GivenUp(Event, sentence="{process} is not restarted: {why}"):
    """A process keeps dying and is not restarted."""

    process: str
    why: str


class TakenAway(Event, sentence="the cluster removed the machines of {process} from the job: {hosts}"):
    """The cluster has ended a process together with its machines."""

    process: str
    hosts: list[str]


class NodeAskedFor(Event, sentence="SLURM job {slurm_job} will replace node {node}"):
    """A job of one node is in the queue, to replace a lost one."""

    node: int
    slurm_job: str


class Continued(Event, sentence="SLURM requeues no job here ({why}): job {slurm_job} continues it"):
    """A new job will continue this one, because the site forbids requeues."""

    slurm_job: str
    why: str


class Resumed(Event, style="green"):
    """The ranks of a round have loaded a checkpoint."""

    step: int
    samples: int
    world_size: int
    place: str = "storage"  # source of the checkpoint: storage | local_dir | memory
    sent: int | None = None  # bytes that came from the memory of other nodes
    seconds: float = 0.0  # to find, check and load it; 0 in records of earlier versions

    def sentence(self) -> str:
        tier = {"local_dir": "disks", "memory": "memory"}.get(self.place)
        where = f", read from the nodes' {tier}" if tier else ""
        took = f" in {self.seconds:.1f} s" if self.seconds else ""
        return f"resumed from the checkpoint of step {self.step} on {counted(self.world_size, 'rank')}{where}{took}"


class TrainingBegun(Event):
    """Rank 0 begins the first step of a round."""

    imports_s: float  # from its process' start to `job.init`
    group_s: float  # process group and device
    model_s: float  # after that: model, data, and loading a checkpoint


class Checkpoint(Event, style="blue"):
    """A checkpoint is committed."""

    step: int
    bytes: int = 0  # 0: not known
    seconds: float = 0.0

    def sentence(self) -> str:
        size = f": {self.bytes / 1e6:.1f} MB" if self.bytes else ""
        return f"checkpoint of step {self.step}{size} in {self.seconds:.1f} s"


class CheckpointOnNodes(Event, sentence="step {step} is on the nodes' disks after {seconds:.1f} s", style="blue"):
    """A checkpoint is complete on the nodes' own disks, but not yet in the run directory."""

    step: int
    bytes: int
    seconds: float


class SnapshotsBegun(Event, sentence="the nodes' memory holds the whole state of step {step}", style="blue"):
    """The first snapshot of a round is complete; those after it are not recorded."""

    step: int


class CheckpointFailed(Event, sentence="{error}", style="red"):
    step: int
    error: str


class CheckpointSkipped(Event, sentence="{checkpoint} cannot be used: {why}", style="red"):
    checkpoint: str  # name of its folder
    why: list[str]


class Corruption(Event, sentence="{why}", style="red"):
    """Replicas did not hold the same bits; if the step is repeated, a further event has the result."""

    step: int
    agreed: int  # the newest earlier step at which they held the same bits, -1 if none is known
    finding: str  # outvoted | two | start | transient | reproduced | unknown | computed
    ranks: list[int]  # the wrong ones; if they are not known, all that hold these shards
    nodes: list[int]
    hosts: list[str]
    tensors: list[str]
    why: str


_SPIKE = "loss spike at step {step}: {loss:.4g}, {deviations:.0f} standard deviations above {mean:.4g}"


class LossSpike(Event, sentence=_SPIKE):
    step: int
    loss: float
    mean: float  # of the steps before it
    deviations: float  # standard deviations above that mean


class StopRequested(Event, sentence="asked to save and stop: {why}"):
    why: str


class Waiting(Event, sentence="{why}"):
    """A job does not run yet, and `why` is its cluster's reason, or its coordinator has a problem that lasts."""

    why: str


class Done(Event):
    """Rank 0 has done the last step."""

    step: int
    samples: int


class AttemptEnded(Event):
    """An attempt has ended; if the decision is to stop, the job has ended with it."""

    verdict: str
    decision: str
    reason: str
    step: int | None = None
    committed: int | None = None
    leases: int | None = None  # nodes whose ranks might still run; None: not recorded by a coordinator

    def sentence(self) -> str:
        is_asked_for = (self.verdict, self.decision) == ("preempted", "stop")
        return f"{'stopped' if is_asked_for else self.verdict}: {self.reason}"

    @property
    def style(self) -> str:
        return "green" if self.verdict == "done" else "red"


class CodeChanged(Event, sentence="{file} was edited after the submission: from now on the job runs the new code"):
    file: str


class NotifyFailed(Event, sentence="notify.{way} failed: {why}"):
    way: str  # command | webhook
    why: str


class TrackingFailed(Event, sentence="{tracker} does not get the metrics: {why}"):
    tracker: str
    why: str


def append_lines(path: Path, *records: JsonObject, is_due: Callable[[], bool] = lambda: True) -> None:
    """Append whole JSON lines while other nodes also write: under a lock if the file system has locks.

    They are left out if `is_due`, called under the lock, says no.

    Records for which the disk has no room are dropped with a warning: a job must not fail because of its own log. Those
    of a rank whose node no longer has a lease are dropped as well: another round may be writing.
    """
    lines = "".join(f"{json.dumps(record)}\n" for record in records).encode()
    try:
        descriptor = _locked(path)
        try:
            if not is_due():
                return
            if is_cut(descriptor):
                lines = b"\n" + lines
            before = os.fstat(descriptor).st_size
            if os.write(descriptor, lines) < len(lines):
                os.ftruncate(descriptor, before)  # never half a line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            unlock_and_close(descriptor)
    except (OSError, Fenced) as e:
        why = f"OSError: {e.strerror or e}" if isinstance(e, OSError) else e
        logger.warning("%s; not recorded in %s", why, path)  # a rank's log shows no level


def _locked(path: Path) -> int:
    """Open a file for this rank's record, and lock it; on file systems without locks O_APPEND must suffice.

    Raises:
        Fenced, OSError: as in `check_may_record`.
    """
    while True:
        check_may_record()
        checked_at = time.monotonic()
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        lock(descriptor)
        if time.monotonic() - checked_at <= _SOON_S or is_answered():
            return descriptor
        unlock_and_close(descriptor)  # to check again: no other file is read while the lock is held


def record(run: RunDir, attempt: int, event: Event, is_due: Callable[[], bool] = lambda: True) -> None:
    """Append an event to the run's events as `append_lines` does, with the present time if it has none."""
    event = replace(event, time=event.time or job_time(), attempt=attempt)
    append_lines(run.events, event.to_record(), is_due=is_due)


def begin_attempt(run: RunDir, attempt: int, started: AttemptStarted) -> None:
    """Make an attempt's folder and record its start, and before the first one its submission if nobody has.

    After an error it can be tried again: the folder may be there.

    The submitting command may have died, or still submit other jobs: its own record would end this attempt for readers.
    """
    # Asked first: a command that sees the folder leaves the record to it.
    is_pending = run.pending_launcher is not None and attempt == run.first_attempt()
    run.attempt(attempt).mkdir(parents=True, exist_ok=True)
    if is_pending:
        record(run, attempt - 1, Submitted())
    record(run, attempt, started)


def parse_events(records: Iterable[JsonObject]) -> Iterator[Event]:
    """Make events from lines, without fields that their types lack; a line that lacks a field is skipped."""
    for record in records:
        try:
            yield msgspec.convert(record, Event.KINDS.get(record["event"], Event))
        except (KeyError, ValueError) as e:
            logger.warning("not an event: %s: %s", e, record)


def read_events(run: RunDir) -> Iterator[Event]:
    """Yield every event of a run, oldest first."""
    return parse_events(read_json_lines(run.events))


def newest_events(run: RunDir) -> Iterator[Event]:
    """Yield a run's events, newest first, reading only as much of the file as is consumed."""
    return parse_events(newest_json_lines(run.events))


def newest_of(run: RunDir, kind: type[_Kind]) -> Iterator[_Kind]:
    """Yield a run's events of one type, newest first, reading only as much of the file as is consumed."""
    return (event for event in newest_events(run) if isinstance(event, kind))


def seldom_events(events: Tail) -> Iterator[Event]:
    """Yield new events, but only the last of successive checkpoints: a long run has thousands of them."""
    pairs = itertools.pairwise(itertools.chain(events.lines(), [b""]))
    lines = (line for line, following in pairs if not (_CHECKPOINT in line and _CHECKPOINT in following))
    return parse_events(json_objects(lines, events.path))
