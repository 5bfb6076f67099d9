"""Save and restore the state of a run, on all ranks together."""

from __future__ import annotations

import copy
import errno
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from fsdp_jobs.checkpoints import catalog, fsdp1
from fsdp_jobs.checkpoints.catalog import MANIFEST, SHARDS, Manifest
from fsdp_jobs.checkpoints.disk import LocalDisks, LocalTier
from fsdp_jobs.checkpoints.fsdp1 import Fsdp1State
from fsdp_jobs.checkpoints.ranks import Ranks
from fsdp_jobs.checkpoints.saver import Saver
from fsdp_jobs.checkpoints.state import State
from fsdp_jobs.checkpoints.storage import NotFinite, SaveRequest, Torn
from fsdp_jobs.checkpoints.tiers import Restored, SharedStorage, SnapshotTier, Tier
from fsdp_jobs.config.errors import JobFailed
from fsdp_jobs.config.keys import AUTO
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir, checkpoints_of
from fsdp_jobs.run.folders import mark_of
from fsdp_jobs.run.leaves import guards_in, tiers_in
from fsdp_jobs.run.rank_state import Phase
from fsdp_jobs.run.table import counted
from fsdp_jobs.run.term import Fenced, Term

_AWAY = (errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTCONN)  # errors of storage that may answer again
_TRIES, _AGAIN_S = 12, 5.0  # of a last save, while storage does not answer
_CURES = (  # for saves that fail with these errors
    ((errno.ENOSPC, errno.EDQUOT), "Free space under {}."),
    ((errno.EROFS, errno.EACCES, errno.EPERM), "Make {} writable for this user."),
    (_AWAY, "Check the disk or mount of {} on this rank's machine."),
)


class Checkpointer:
    """Saves and restores one run. Every rank calls each method, in the same order."""

    def __init__(
        self,
        run: RunDir,
        config: JobConfig,
        layout: Layout,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        others: Mapping[str, Stateful],
        device: torch.device,
        attempt: int,
        restart: str,
        on_restored: Callable[[int], None] = lambda step: None,
        report: Callable[[Phase], None] = lambda phase: None,
    ):
        """Prepare to save and restore; nothing is read or written yet.

        Args:
            others: further objects to save, by name; their plain values and tensors are the same on every rank.
            restart: unique per restart of the run, so that no two write to the same folder.
            on_restored: called with the step at the end of `restore`.
            report: tells the agent whether this rank saves, which may take minutes, or trains.
        """
        self.run, self.job, self.config, self.layout = run, config, config.checkpoint, layout
        self.attempt, self.restart, self.on_restored = attempt, restart, on_restored
        self._report = report
        self.state = (Fsdp1State if fsdp1.is_used(model) else State)(model, optimizer, others, device)
        minutes = self.config.every_minutes
        self.every_s = run.planned_interval_s() if minutes == AUTO else minutes * 60  # 0: only by steps
        self.samples = 0  # consumed since the run began; the program counts them, a save includes them
        self.stream: dict[str, Any] | None = None  # where a stream continues; the same on every rank
        self.home = checkpoints_of(self.config, run)
        self.term = Term.of_rank(self.home)
        group = dist.new_group(backend="gloo")  # keeps the collectives of saves apart from the program's
        self.ranks = Ranks(group)
        self.rank = self.ranks.rank
        self.disks: LocalDisks | None = None
        if self.config.local_dir is not None:
            self.disks = LocalDisks(Path(self.config.local_dir, f"{run.name}-{mark_of(run)}"), self.ranks)
        self.snapshots: list[SnapshotTier] = [
            made for tier in tiers_in("rank") if (made := tier.of_rank(self)) is not None
        ]
        self.saver = Saver(self.config.async_mode, device, group, layout)
        self._is_away = False  # storage did not answer at the newest save
        self.committed_step = -1
        self.saved_at = time.monotonic()  # when the newest save began
        self.stall_s = 0.0  # time that steps have waited for saves since `take_stall`
        self.failure: str | None = None  # of the newest save
        self._written_step = -1  # the newest step saved whole, maybe only on the nodes' disks
        self._staged: Future[Any] | None = None
        self._written: Future[Any] | None = None
        self._request: SaveRequest | None = None
        self._may_upload = True
        self._copies_first = False  # steps wait for copies, because something changed the state during one
        self._saves = 0
        self.guards = [made(self) for made in guards_in("rank")]
        optimizer.register_step_pre_hook(lambda *_: self.before_update())

    def is_due(self, step: int) -> bool:
        """Whether `checkpoint.every_steps` asks for a save after this step."""
        return self.config.every_steps > 0 and step % self.config.every_steps == 0

    def is_overdue(self) -> bool:
        """Whether `checkpoint.every_minutes` asks for a save; rank 0's clock decides."""
        return self.rank == 0 and 0 < self.every_s <= time.monotonic() - self.saved_at

    def save(self, step: int, block: bool = False) -> None:
        """Save the state after `step` steps, in the background or, with `block`, before this returns.

        Waits for the previous save first; a step that is already saved is not written again. A failed save leaves
        only an event, the text in `failure`, and the previous checkpoint; with `block` it is repeated for a minute
        while storage does not answer.
        """
        self._save(step, block)
        for _ in range(_TRIES if block and self.disks is None else 0):
            if not any(self.ranks.gather(self._is_away)):
                break
            time.sleep(_AGAIN_S)
            self._save(step, block)

    def _save(self, step: int, block: bool) -> None:
        self._report(Phase.ENDING if block else Phase.SAVING)
        if self._staged is not None:
            self._staged.result()  # a rank whose copy failed must not begin another save by itself
        self.finish()
        if step != self._written_step:
            self._begin(step, block)
        elif block and self.disks is not None and self._request is not None and not self._may_upload:
            self._may_upload = True
            self.disks.upload(self._request)
        is_synchronous = block or self.saver.mode == "off"
        if is_synchronous or self._copies_first:
            self.before_update()
        if is_synchronous:
            self.finish()
        if block:
            self._note_upload(wait=True)
        self._report(Phase.TRAINING)

    def _begin(self, step: int, block: bool) -> None:
        self.saved_at, begin = time.monotonic(), time.perf_counter()
        self._saves += 1
        self._request = SaveRequest(
            checkpoints=self.home,
            save=f"{self.restart}-{self._saves}",
            term=self.term,
            manifest=Manifest(
                step,
                self.samples,
                self.layout.world_size,
                self.layout.mesh_shape,
                torch.__version__,
                time.time(),
                {},
                copy.deepcopy(self.stream),
            ),
            config=self.config,
            local=self.disks.folder if self.disks is not None else None,
            may_be_infinite=self.state.may_be_infinite,
            pid=os.getpid(),
            began=self.saved_at,
        )
        if self.disks is not None:
            self._may_upload = self.disks.may_upload(must=block)
            self._note_upload(wait=False)
        self._staged, self._written = self.saver.save(self._request, self.state, block)
        self.stall_s += time.perf_counter() - begin

    def before_update(self) -> None:
        """Wait until a save has copied the state. The optimizer calls this before each update."""
        for tier in self.snapshots:
            tier.before_update()
        if self._staged is not None:
            begin = time.perf_counter()
            self._staged.result()
            self._staged = None
            self.stall_s += time.perf_counter() - begin

    def snapshot(self, step: int, record: Callable[[], None]) -> None:
        """Begin a snapshot of the state after `step` steps in each tier where one is due.

        A thread calls `record` before a restart can use this step.
        """
        for tier in self.snapshots:
            tier.after_step(step, self.samples, self.stream, record)

    def watch(self, step: int, is_end: bool) -> None:
        """Have the guards check the state after `step` steps; with `is_end`, the job may end there."""
        for guard in self.guards:
            guard.after_step(step, is_end)

    @property
    def safe_step(self) -> int:
        """The newest step that survives the loss of any one node; -1 for none."""
        return max([self.committed_step, *(tier.step for tier in self.snapshots)])

    def poll(self) -> None:
        """Record a save that has ended, without waiting for one."""
        if self._written is not None and self._written.done():
            self._report(Phase.SAVING)  # files of a failed save are removed, and storage may not answer
            self.finish()
            self._report(Phase.TRAINING)
        for tier in self.snapshots:
            tier.settle()
        self._note_upload(wait=False)

    def take_stall(self) -> tuple[float, float]:
        """Return the seconds that steps have waited since the last call: in total, and for snapshots."""
        snapshot_s = sum(tier.take_stall() for tier in self.snapshots)
        stall_s, self.stall_s = self.stall_s + snapshot_s, 0.0
        return stall_s, snapshot_s

    def finish(self) -> None:
        """Wait for the save under way, and record its outcome."""
        if self._written is None or self._request is None:
            return
        begin = time.perf_counter()
        request, error = self._request, self._written.exception()
        self._written = None
        if error is None:
            self._written_step = request.step
        if error is not None or self.disks is None:
            self._conclude(request, error)
        else:
            self.failure = None
            self._record(events.CheckpointOnNodes, request, request.temporary / SHARDS)
            if self._may_upload:
                self.disks.upload(request)
            self.disks.tidy(request.shards)
        self.stall_s += time.perf_counter() - begin

    def _note_upload(self, wait: bool) -> None:
        """Record a copy to shared storage that has ended; with `wait`, wait for it."""
        ended = self.disks.uploaded(wait) if self.disks is not None else None
        if ended is not None:
            self._conclude(*ended, copied=True)

    def _conclude(self, request: SaveRequest, error: BaseException | None, copied: bool = False) -> None:
        """Record that a save is on shared storage or, with an error, that it failed.

        Raises:
            Fenced: the round is over, so this rank must end.
        """
        self._is_away = False
        if error is None:
            self.failure, self.committed_step = None, request.step
            self._record(events.Checkpoint, request, request.final / MANIFEST)
            return
        failures = getattr(error, "failures", {})  # by rank, as DCP wraps them
        where, cause = next(((f"rank {r}: ", cause) for r, (cause, _) in failures.items()), ("", error))
        if isinstance(cause, Fenced):
            raise cause
        self._copies_first |= isinstance(cause, Torn)
        self._is_away = getattr(cause, "errno", None) in _AWAY
        file = getattr(cause, "filename", None)
        place = str(file).rpartition("/")[0] if file else self.home
        cures = [cure.format(place) for errors, cure in _CURES if getattr(cause, "errno", None) in errors]
        what = f"{where}{type(cause).__name__}: {cause}"
        self.failure = " ".join([f"checkpoint of step {request.step} failed: {what.removesuffix('.')}.", *cures])
        if self.rank == 0:
            if not copied and not isinstance(cause, NotFinite):
                try:  # before the event and the log, which may be on the same full disk
                    catalog.remove_failed(request.temporary)
                except Exception as e:  # may fail like the save: an expired credential
                    self.failure += f" Its files stay in {request.temporary}: {e}."
            self.tell_failed(request.step, self.failure)

    def tell_failed(self, step: int, why: str) -> None:
        """Report that a step is not saved, or has no snapshot."""
        events.record(self.run, self.attempt, events.CheckpointFailed(step, why))
        print(f"WARNING {why}", flush=True)

    def _record(self, kind: type[events.Checkpoint | events.CheckpointOnNodes], request: SaveRequest, at: Path) -> None:
        """Record a complete save; `at`: its manifest, which a store may no longer return."""
        if self.rank == 0:
            took, size = round(time.monotonic() - request.began, 3), 0
            with suppress(Exception):  # a store's client raises its own types
                size = Manifest.read(at.parent, at.name).bytes
            events.record(self.run, self.attempt, kind(request.step, size, took))

    def restore(self, otherwise: Callable[[], None] | None = None) -> int:
        """Load the newest whole checkpoint, or call `otherwise` if there is none. Returns the step, 0 for none.

        Rank 0 chooses a checkpoint, and each rank verifies what it reads. If one finds damage, all ranks read the whole
        checkpoint before they judge it. Damaged checkpoints are set aside and named in an event. Shards on the nodes'
        own disks are read from there, not from shared storage.

        Raises:
            JobFailed: the checkpoint is of another model, or the run has had checkpoints but none can be used.
            CannotReadHere: only this machine cannot read it.
        """
        begin = time.monotonic()
        restored = self._restore_newest()
        step, world = restored.step if restored is not None else 0, self.layout.world_size
        if restored is None and otherwise is not None:
            otherwise()
        if restored is not None and self.rank == 0:
            took = round(time.monotonic() - begin, 3)
            told = events.Resumed(step, restored.samples, world, restored.place, restored.sent, took)
            events.record(self.run, self.attempt, told)
            print(f"resumed from step {step} on {counted(world, 'rank')}", flush=True)
        if restored is not None or otherwise is not None:  # else the caller may still load weights
            self.watch(step, is_end=True)
        self.on_restored(step)
        return step

    def _restore_newest(self) -> Restored | None:
        """Restore the newest step of all tiers; None if there is none."""
        storage = SharedStorage(self.run, self.job, self.attempt, self.term, self.ranks, self.state)
        disks = [LocalTier(self.disks, storage)] if self.disks is not None else []
        tiers: list[Tier] = [storage, *disks, *self.snapshots]  # faster last: it wins at equal steps
        for tier in tiers:
            tier.prepare()
        restored: Restored | None = None
        while restored is None:
            newest: Tier | None = None
            step = 0
            for tier in tiers:
                if (offered := tier.offer(step)) is not None:
                    newest, step = tier, offered
            for snapshots in self.snapshots:
                snapshots.go_on(step)
            if newest is None:
                storage.check_may_begin_again()
                self.state.begin_anew()
                return None
            restored = newest.load()
        self.samples, self.stream = restored.samples, restored.stream
        self.committed_step = storage.step
        # What storage lacks is saved again at the end.
        self._written_step = restored.step if restored.place == "storage" else -1
        if self.snapshots:
            self.ranks.gather(None)  # all have read
        for snapshots in self.snapshots:
            snapshots.forget(loaded=snapshots is newest)
        return restored

    def close(self) -> None:
        """Wait for the last save and release its resources.

        Raises:
            JobFailed: the last save has failed.
        """
        self.finish()
        self.saver.close()
        if self.disks is not None:
            self.disks.close()
        for tier in self.snapshots:
            tier.close()
        if self.failure is not None:
            raise JobFailed(f"{self.failure} Then resume {self.run.name}.")
