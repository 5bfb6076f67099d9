"""Restore sources. All ranks call each method together: `offer` a step, then `load` it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from fsdp_jobs.checkpoints import catalog
from fsdp_jobs.checkpoints.blocks import Damaged
from fsdp_jobs.checkpoints.catalog import MANIFEST, NOT_AGREED, NOT_FINITE, OTHER_VERSION, Manifest
from fsdp_jobs.checkpoints.exchange import CannotKeep
from fsdp_jobs.checkpoints.ranks import Ranks
from fsdp_jobs.checkpoints.state import State
from fsdp_jobs.checkpoints.storage import SafeReader
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.run import events
from fsdp_jobs.run.agreement import NO_LIMIT, known_here
from fsdp_jobs.run.directory import RunDir, checkpoints_of
from fsdp_jobs.run.identity import Identity, claim
from fsdp_jobs.run.term import Term


class Restored(NamedTuple):
    """What a state was read from."""

    place: str  # as in the event `resumed`
    step: int
    samples: int
    stream: dict[str, Any] | None  # where a stream is read on
    sent: int | None = None  # bytes that nodes sent each other


class Tier:
    """A kind of place that a state is in. All ranks call each method, in the same order."""

    def prepare(self) -> None:
        """Begin to restore."""

    def offer(self, at_least: int) -> int | None:
        """Return the newest step that is there, if it is as new as `at_least`."""
        raise NotImplementedError

    def load(self) -> Restored | None:
        """Load the step offered last. Returns None if it is not usable: then another one is to be offered.

        Raises:
            JobFailed: it is of another model.
            CannotReadHere: this machine alone cannot read it.
        """
        raise NotImplementedError


class Snapshots(Tier):
    """A tier that takes the state of a step by itself, and not from a save."""

    step = -1  # the newest that is there, whatever happens to one node

    def before_update(self) -> None:
        """Wait until the state may change."""

    def after_step(self, step: int, samples: int, stream: dict[str, Any] | None, record: Callable[[], None]) -> None:
        """Begin to take the state after `step` steps, if it is time to.

        `record` is called in a thread, before a restart could use this step.
        """

    def settle(self) -> None:
        """Wait until what is being taken has been read."""

    def take_stall(self) -> float:
        """Return the seconds that steps have waited since the last call."""
        raise NotImplementedError

    def go_on(self, step: int) -> None:
        """Expect the steps after this one, before the state is loaded: the optimizer may call `before_update` then."""

    def forget(self, loaded: bool) -> None:
        """Remove what is older than the state that all ranks have `loaded`, from here or from another tier."""

    def close(self) -> None:
        """Release resources, after what is under way."""


class SharedStorage(Tier):
    """Checkpoints that every node sees. Damaged ones are set aside, and named in an event.

    A checkpoint in which a rank finds damage while it reads is offered once more: then all is verified before.
    """

    def __init__(self, run: RunDir, config: JobConfig, attempt: int, term: Term, ranks: Ranks, state: State):
        self.run, self.attempt, self.term, self.ranks, self.state = run, attempt, term, ranks, state
        self.home = checkpoints_of(config.checkpoint, run)
        self.skipped: dict[str, list[str]] = {}  # name -> why it is not offered again
        self._restart_from_zero = config.checkpoint.restart_from_zero
        self._refuses_differing = config.integrity.action != "report"
        self._doubted: set[str] = set()  # a rank found damage in them while it loaded them
        self._offered: str | None = None

    def prepare(self) -> None:
        """Make the folder, remove what crashes have left in it, and note what is known of replicas.

        Raises:
            BadInput: it is another run's.
        """
        if self.ranks.rank == 0:
            self.term.check()
            catalog.make_folder(self.home)
            if self.home != self.run.checkpoints and (identity := Identity.read(self.run.identity)) is not None:
                identity.check(self.home / self.run.identity.name)
                claim(self.home / self.run.identity.name, identity)
            catalog.remove_unfinished(self.home)
            if (limit := known_here().limit) != NO_LIMIT:
                catalog.mark_agreed(self.home, lambda step: None if step <= limit else False)

    @property
    def step(self) -> int:
        """The step of what was offered last; -1 for none."""
        return -1 if self._offered is None else catalog.step_of(self.home / self._offered)

    def offer(self, at_least: int) -> int | None:
        """Return the newest step that was committed; whether it is whole shows when it is loaded."""
        self._offered = self.ranks.from_rank_0(self._newest)
        return self.step if self.step >= at_least else None

    def _newest(self) -> str | None:
        return next((f.name for f in catalog.find_checkpoints(self.home) if f.name not in self.skipped), None)

    def load(self) -> Restored | None:
        assert self._offered is not None
        manifest = self.examine(self._offered, MANIFEST, shards=True)
        return self.read(self._offered, manifest) if manifest is not None else None

    def is_certain(self, name: str) -> bool:
        """Whether shards are read twice, so that nothing of the state is touched by a damaged one."""
        return self._may_begin_again or name in self._doubted

    @property
    def _may_begin_again(self) -> bool:
        return self._restart_from_zero or not known_here().limit  # 0: there replicas agreed last

    def examine(self, name: str, listed_in: str, shards: bool) -> Manifest | None:
        """Return a checkpoint's manifest; None when it is not usable, and is not offered again.

        Args:
            listed_in: the manifest's name.
            shards: examine them as well as the metadata.
        """
        manifest, faults = self.ranks.examine(self.home / name, listed_in, shards, self.is_certain(name))
        if manifest is not None and manifest.agreed is False and self._refuses_differing:
            faults = [NOT_AGREED]
        if faults:
            is_damaged = faults not in ([NOT_FINITE], [NOT_AGREED]) and not any(OTHER_VERSION in f for f in faults)
            self.skip(name, faults, is_damaged=listed_in == MANIFEST and is_damaged)
        return manifest if not faults else None

    def skip(self, name: str, faults: list[str], is_damaged: bool) -> None:
        """Offer it no more, and say so."""
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
        """Load a checkpoint that was examined; None when a rank finds damage, and all shards are to be read again.

        Args:
            shards: the folder that they are in, if it is not the checkpoint's own.
            fetch: makes the shards that a state needs be there.
        """
        folder, reader = self.home / name, SafeReader(self.home / name, manifest.files, shards, self.ranks.threads)
        with self.ranks.reading(folder):
            try:
                metadata = reader.read_metadata()
                state = self.state.to_load(metadata, name, manifest.world_size == self.ranks.world)
                fetch(state, metadata)
                dcp.load(state, storage_reader=reader, process_group=self.ranks.group)
            except (CheckpointException, CannotKeep) as e:
                causes = [e] if isinstance(e, CannotKeep) else [cause for cause, _ in e.failures.values()]
                kind = Damaged if shards is None else OSError  # other disks have what one of them does not
                if self.is_certain(name) or not any(isinstance(cause, kind) for cause in causes):
                    raise
                self._doubted.add(name)
                return None
            self.state.take(state)
        place = "storage" if shards is None else "local_dir"
        return Restored(place, manifest.step, manifest.samples, manifest.stream)

    def check_may_begin_again(self) -> None:
        """Raises: JobFailed when the run has had checkpoints, and none can be used."""
        if not self._may_begin_again:
            refuse = partial(catalog.refuse_to_begin_again, self.run, self.home, self.skipped, self._doubted)
            self.ranks.from_rank_0(refuse)
