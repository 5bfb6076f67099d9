"""The tiers that ranks restore from. All ranks call each method together: `offer` a step, then `load` it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from fsdp_jobs.checkpoints import catalog
from fsdp_jobs.checkpoints.blocks import Damaged
from fsdp_jobs.checkpoints.catalog import MANIFEST, METADATA, NOT_AGREED, NOT_FINITE, OTHER_VERSION, Manifest
from fsdp_jobs.checkpoints.ranks import Ranks
from fsdp_jobs.checkpoints.state import State
from fsdp_jobs.checkpoints.storage import SafeReader, lacking_in
from fsdp_jobs.config.errors import JobFailed
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.run import events
from fsdp_jobs.run.agreement import NO_LIMIT, known_here
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.identity import Identity, claim
from fsdp_jobs.run.term import Term


class Restored(NamedTuple):
    """Where a state was restored from."""

    place: str  # as in the event `resumed`
    step: int
    samples: int
    stream: dict[str, Any] | None  # where a stream continues
    sent: int | None = None  # bytes that nodes sent each other


class Tier:
    """A kind of place that holds checkpoints. All ranks call each method, in the same order."""

    def prepare(self) -> None:
        """Prepare for a restore."""

    def offer(self, at_least: int) -> int | None:
        """Return the newest step that the tier holds, if it is at least `at_least`."""
        raise NotImplementedError

    def load(self) -> Restored | None:
        """Load the step offered last. Returns None if it is unusable; the caller then asks for another offer.

        Raises:
            JobFailed: it is of another model.
            CannotReadHere: only this machine cannot read it.
        """
        raise NotImplementedError


class SnapshotTier(Tier):
    """A tier that copies the state by itself, independent of saves."""

    step = -1  # the newest that survives the loss of any one node

    def before_update(self) -> None:
        """Wait until the state may change."""

    def after_step(self, step: int, samples: int, stream: dict[str, Any] | None, record: Callable[[], None]) -> None:
        """Begin a snapshot of the state after `step` steps, if one is due.

        A thread calls `record` before a restart can use this step.
        """

    def settle(self) -> None:
        """Wait until the snapshot under way has read the state."""

    def take_stall(self) -> float:
        """Return the seconds that steps have waited since the last call."""
        raise NotImplementedError

    def go_on(self, step: int) -> None:
        """Continue after this step. Called before loading, when the optimizer may call `before_update`."""

    def forget(self, loaded: bool) -> None:
        """Remove snapshots older than the restored state; `loaded`: it came from this tier."""

    def close(self) -> None:
        """Finish the snapshot under way; release resources."""


class SharedStorage(Tier):
    """Checkpoints that every node sees. Damaged ones are set aside, and named in an event.

    A checkpoint that a rank finds damaged while loading is offered once more, and verified whole before it is loaded.
    """

    def __init__(self, run: RunDir, config: JobConfig, attempt: int, term: Term, ranks: Ranks, state: State):
        self.run, self.attempt, self.term, self.ranks, self.state = run, attempt, term, ranks, state
        self.home = term.home
        self.skipped: dict[str, list[str]] = {}  # name -> why it is not offered again
        self._config = config
        self._doubted: set[str] = set()  # a rank found damage while it loaded these
        self._offered: str | None = None

    def prepare(self) -> None:
        """Make the folder, remove what crashes left in it, and record which checkpoints' replicas agreed.

        Raises:
            BadInput: the folder is another run's.
        """
        if self.ranks.rank == 0:
            self.term.check()
            catalog.make_folder(self.home)
            if self.home != self.run.checkpoints and (identity := Identity.from_file(self.run.identity)) is not None:
                file = self.home / self.run.identity.name
                identity.check(file)
                claim(file, identity)
            catalog.remove_unfinished(self.home)
            if (limit := known_here().limit) != NO_LIMIT:
                catalog.mark_agreed(self.home, lambda step: None if step <= limit else False)
            if self._config.checkpoint.local_dir is None:
                self._skip_on_nodes()

    def _skip_on_nodes(self) -> None:
        committed = catalog.find_checkpoints(self.home)
        newest = max(map(catalog.step_of, committed), default=0)
        why = ["its shards are on the nodes' disks, in checkpoint.local_dir"]
        for folder in catalog.find_on_nodes(self.home, committed):
            if catalog.step_of(folder) > newest:
                self.skip(folder.name, why)

    @property
    def step(self) -> int:
        """The step offered last; -1 for none."""
        return -1 if self._offered is None else catalog.step_of(self.home / self._offered)

    def offer(self, at_least: int) -> int | None:
        """Return the newest committed step; `load` finds out whether it is whole."""
        self._offered = self.ranks.from_rank_0(self._newest)
        return self.step if self.step >= at_least else None

    def _newest(self) -> str | None:
        return next((f.name for f in catalog.find_checkpoints(self.home) if f.name not in self.skipped), None)

    def load(self) -> Restored | None:
        assert self._offered is not None
        manifest = self.examine(self._offered, MANIFEST, shards=True)
        return self.read(self._offered, manifest) if manifest is not None else None

    def is_certain(self, name: str) -> bool:
        """Whether shards are verified before they are loaded, so that a damaged one cannot touch the state."""
        return self._may_begin_again or name in self._doubted

    @property
    def _may_begin_again(self) -> bool:
        return self._config.checkpoint.restart_from_zero or not known_here().limit  # 0: replicas last agreed there

    def examine(self, name: str, listed_in: str, shards: bool) -> Manifest | None:
        """Return a checkpoint's manifest; None if it is unusable, and then it is not offered again.

        Args:
            listed_in: the manifest's name.
            shards: examine them as well as the metadata.

        Raises:
            CannotReadHere: only this machine cannot read it, or it reads other bytes than the others.
        """
        folder, is_committed = self.home / name, listed_in == MANIFEST
        if faults := self.ranks.confirmed(folder, {listed_in: None}):
            self.skip(name, faults, is_damaged=is_committed and OTHER_VERSION not in faults[0])
            return None
        manifest: Manifest = self.ranks.from_rank_0(lambda: Manifest.read(folder, listed_in))
        differs = manifest.agreed is False and self._config.integrity.action != "report"
        if differs or not manifest.finite:
            self.skip(name, [NOT_AGREED if differs else NOT_FINITE])
            return None
        files = manifest.files if shards else {METADATA: manifest.files[METADATA]}
        faults = self.ranks.confirmed(folder, files, self.is_certain(name))
        if not faults:
            with self.ranks.reading(folder):
                reader = SafeReader(folder, manifest.files)
                lacking = self.ranks.from_rank_0(lambda: lacking_in(manifest.files, reader.read_metadata()))
            faults = [f"{listed_in} does not list {lacking}"] if lacking else []
        if faults:
            self.skip(name, faults, is_damaged=is_committed)
            return None
        return manifest

    def skip(self, name: str, faults: list[str], is_damaged: bool = False) -> None:
        """Stop offering a checkpoint, and report why."""
        self.skipped[name] = faults
        if self.ranks.rank == 0:
            if is_damaged:
                self.term.check()
                catalog.set_aside(self.home / name)
            events.record(self.run, self.attempt, events.CheckpointSkipped(name, faults))
            print(f"WARNING {name} cannot be used; trying the one before: {'; '.join(faults)}", flush=True)

    def read(
        self,
        name: str,
        manifest: Manifest,
        shards: Path | None = None,
        fetch: Callable[[dict[str, Tensor], Metadata], object] = lambda state, metadata: None,
    ) -> Restored | None:
        """Load an examined checkpoint; None if a rank finds damage: then all shards are verified before the next try.

        Args:
            shards: their folder, if not the checkpoint's own.
            fetch: brings the shards that a state needs into `shards`.

        Raises:
            CannotLoad: from `fetch`.
        """
        folder = self.home / name
        reader = SafeReader(folder, manifest.files, shards, self.ranks.threads)
        with self.ranks.reading(folder):
            try:
                metadata = reader.read_metadata()
                state = self.state.to_load(metadata, name, manifest.world_size == self.ranks.world)
                fetch(state, metadata)
                self.ranks.load(state, reader)
            except CheckpointException as e:
                kind = Damaged if shards is None else OSError  # other disks may have what one lacks
                if self.is_certain(name) or not any(isinstance(cause, kind) for cause, _ in e.failures.values()):
                    raise
                self._doubted.add(name)
                return None
            self.state.take(state)
        place = "storage" if shards is None else "local_dir"
        return Restored(place, manifest.step, manifest.samples, manifest.stream)

    def check_may_begin_again(self) -> None:
        """Raises: JobFailed when the run has had checkpoints, but none can be used."""
        if not self._may_begin_again:
            self.ranks.from_rank_0(self._refuse_to_begin_again)

    def _refuse_to_begin_again(self) -> None:
        steps = [0, *(catalog.step_of(self.home / name) for name in self._doubted | self.skipped.keys())]
        for event in events.newest_events(self.run):
            match event:
                case events.Checkpoint() | events.CheckpointOnNodes() | events.SnapshotsBegun() | events.Resumed():
                    steps.append(event.step)
                case events.RoundBroken() | events.AttemptEnded():
                    steps.append(event.committed or 0)
        if max(steps) > 0:
            reasons = [f"{name}: {'; '.join(faults)}" for name, faults in self.skipped.items()]
            found = reasons or sorted(f.name for f in self.home.glob("step-*")) or ["nothing"]
            raise JobFailed(
                f"this run had a checkpoint of step {max(steps)}, but none that can be used is in {self.home} "
                f"(found: {', '.join(found)}). Put one back, or begin again with checkpoint.restart_from_zero=true."
            )
