"""Restore from the nodes' memory: find the newest whole step, verify it, and fetch shards from other nodes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import DefaultLoadPlanner

from fsdp_jobs.checkpoints.exchange import CannotLoad, fetch_files
from fsdp_jobs.checkpoints.state import RANDOM
from fsdp_jobs.checkpoints.tensors import is_finite, local
from fsdp_jobs.checkpoints.tiers import Restored
from fsdp_jobs.run import events
from fsdp_jobs.run.agreement import known_here
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.tail import lacks_line
from fsdp_jobs.tiers.memory.slots import Entry, Found, Slot, forget_before, lost_shards, newest_complete, snapshots_in
from fsdp_jobs.tiers.memory.snapshots import Snapshots
from fsdp_jobs.tiers.memory.tensors import mapped, metadata_of, view

_PIECE = 1 << 24  # elements copied at once
_TRIES = 3  # rounds that may die while they load a step; then it is not tried again
_TRIED = "tried"  # file of the steps tried, once per round
_FETCHED = "fetched"  # folder of files from other nodes for a restore


class Tier(Snapshots):
    """Takes snapshots, and restores from those of earlier rounds."""

    def prepare(self) -> None:
        self._useless: list[int] = []  # steps that could not be loaded
        self._told: tuple[int, str] | None = None
        self._chosen: list[Found] = []

    def offer(self, at_least: int) -> int | None:
        """Return the newest step that the nodes hold whole, verified. A step without its metrics line is repeated."""
        chosen = self._choose(at_least)
        if chosen:
            lacks = partial(lacks_line, self.run.metrics, chosen[0].step, self.log_every_steps)
            if self.ranks.from_rank_0(lacks):
                chosen = self._choose(at_least, [chosen[0].step]) or chosen
        self._chosen = chosen
        return chosen[0].step if chosen else None

    def _choose(self, at_least: int, passed_over: Collection[int] = ()) -> list[Found]:
        """Find the newest step that the nodes hold whole, and verify what will be read, divided among a node's ranks.

        Args:
            at_least: the oldest step wanted.
            passed_over: steps not wanted.
        """
        ranks = self.ranks
        here, tried = list[Found](), list[int]()
        if ranks.leads:
            shutil.rmtree(self.folder / _FETCHED, ignore_errors=True)
            here = [Found.of(*one, holder=ranks.rank) for one in snapshots_in(self.folder)]
            with suppress(OSError, ValueError):  # earlier rounds have tried none
                tried = json.loads((self.folder / _TRIED).read_text())
        by_rank = ranks.gather((here, tried))
        lost = {step for _, steps in by_rank for step in steps if steps.count(step) >= _TRIES}
        lost |= {*passed_over, *self._useless}
        limit = known_here().limit
        left = {one for found, _ in by_rank for one in found if one.step not in lost and one.step <= limit}
        while (chosen := newest_complete(left)) and chosen[0].step >= at_least:
            read = {name for names in ranks.gather(self._sources(chosen)) for name in names}
            held = [one for one in chosen if one.holder == ranks.leader and one.name in read]
            mine = [one for one in held if one.rank % ranks.local_world == ranks.local_rank]
            faults = {one: wrong for one in mine if (wrong := _faults(self.folder, one, ranks.threads))}
            for one, wrong in faults.items():
                print(f"WARNING {one.name} of step {one.step} is damaged, and not used: {wrong[:3]}", flush=True)
            bad = {one for found in ranks.gather([*faults]) for one in found}
            if not bad:
                if ranks.leads:
                    with suppress(OSError):  # no room: then tries are not counted
                        (self.folder / _TRIED).write_text(json.dumps([*tried, chosen[0].step]))
                return chosen
            left -= bad
        lost_here = lost_shards(left, at_least, _safe_before(self.run)) if ranks.rank == 0 else None
        if lost_here is not None and lost_here != self._told:
            self._told = lost_here
            self.tell(*lost_here)
        return []

    def load(self) -> Restored | None:
        """Load the offered step. The state does not change before all ranks have read it whole and finite."""
        try:
            return self._read()
        except CannotLoad as e:
            step = self._chosen[0].step
            if self.ranks.leads:
                print(f"WARNING the snapshot of step {step} is not used: {e}", flush=True)
            self._chosen = []
            self._useless.append(step)
            return None

    def _read(self) -> Restored:
        """Read the chosen step.

        Raises:
            CannotLoad: on all ranks, if one of them cannot.
        """
        ranks = self.ranks
        chosen, like, held = self._chosen, self._chosen[0], dict[int, set[str]]()
        for one in chosen:
            held.setdefault(one.holder, set()).update(f"{one.name}.{suffix}" for suffix in ("json", "data", "sums"))
        fetch = partial(fetch_files, ranks, held, folder=self.folder, into=self.folder / _FETCHED)
        sources = self._sources(chosen)
        where = {
            name: self.folder if f"{name}.data" in held.get(ranks.leader, ()) else self.folder / _FETCHED
            for name in sources
        }
        came = fetch(wanted={f"{name}.json" for name in sources})
        snapshots = {name: Slot(where[name] / name).snapshot() for name in sources}
        whole = {name: snapshot for name, snapshot in snapshots.items() if snapshot is not None}
        stored = metadata_of(whole)
        has_random = f"{RANDOM}{ranks.rank}" in stored.state_dict_metadata
        if not has_random and like.world_size == ranks.world:
            print(f"WARNING rank {ranks.rank}'s random state is lost with its node: it starts a new one", flush=True)
        state = self.state.to_load(stored, f"the snapshot of step {like.step}", has_random)
        planner = DefaultLoadPlanner()
        planner.set_up_planner(state, stored, is_coordinator=False)
        items = planner.create_local_plan().items
        assert stored.storage_data is not None
        places: list[tuple[str, Entry]] = [stored.storage_data[item.storage_index] for item in items]
        read = {name for name, _ in places}
        came += fetch(wanted={f"{name}.{suffix}" for name in read for suffix in ("data", "sums")})
        fetched = [one for one in chosen if one.name in read and where[one.name] != self.folder]
        wrong = [fault for one in fetched for fault in _faults(self.folder / _FETCHED, one, ranks.threads)]
        maps = {name: mapped(where[name] / f"{name}.data") for name in read}
        parts = [
            narrow_tensor_by_index(view(maps[name], entry), item.storage_offsets, item.lengths)
            for item, (name, entry) in zip(items, places, strict=True)
        ]
        with ThreadPoolExecutor(ranks.threads, initializer=self._use_device) as several:
            wrong += self._wrong_with(parts, [entry for _, entry in places], state, several)
            by_rank = ranks.gather((came, wrong[:3]))
            if faults := [fault for _, of_rank in by_rank for fault in of_rank]:
                raise CannotLoad("; ".join(faults[:3]))
            targets = [planner.resolve_tensor(item).detach() for item in items]
            pieces = [pair for target, part in zip(targets, parts, strict=True) for pair in _pieces(target, part)]
            list(several.map(_copy, pieces))  # raises the first error
        if self._stream is not None:
            torch.cuda.synchronize(self.state.device)
        self.state.take(state)
        stream = next((snapshot.stream for snapshot in whole.values() if snapshot.stream is not None), None)
        sent = sum(int(came) for came, _ in by_rank)
        return Restored("memory", like.step, like.samples, ranks.from_rank_0(lambda: stream), sent)

    def _wrong_with(
        self, parts: list[Tensor], entries: list[Entry], state: dict[str, Tensor], several: ThreadPoolExecutor
    ) -> Iterable[str]:
        """Yield why this rank cannot use the parts of tensors that it found."""
        if sum(part.numel() for part in parts) != sum(local(tensor).numel() for tensor in state.values()):
            yield "it does not hold all of this rank's state"
        exempt = self.state.may_be_infinite
        finite = several.map(lambda part, entry: is_finite(part, entry.name in exempt), parts, entries)
        for entry, is_so in zip(entries, finite, strict=True):
            if not is_so:
                yield f"{entry.name} is not finite"

    def forget(self, loaded: bool) -> None:
        self.step = self._chosen[0].step if loaded else -1
        if self.ranks.leads:
            self._thread.submit(self._forget, {one.name for one in self._chosen})  # gigabytes; before the next snapshot

    def _forget(self, but: Collection[str]) -> None:
        shutil.rmtree(self.folder / _FETCHED, ignore_errors=True)
        (self.folder / _TRIED).unlink(missing_ok=True)
        forget_before(self.folder, self.term, but)

    def _sources(self, chosen: list[Found]) -> list[str]:
        """Name the snapshots that hold this rank's state, preferred ones first."""
        rank, like = self.ranks.rank, chosen[0]
        preferred = sorted(chosen, key=lambda one: (not one.is_whole, one.holder != self.ranks.leader, one.is_copy))
        own = [one for one in preferred if like.world_size == self.ranks.world and one.rank == rank][:1]
        shards = dict[int, Found]()
        for one in preferred:
            shards.setdefault(one.rank % one.shard_group, one)
        if like.shard_group == self.layout.shard_group:
            if own and own[0].is_whole:
                return [own[0].name]
            shards = {0: shards[rank % like.shard_group]}
        return list(dict.fromkeys(one.name for one in (*own, *shards.values())))


def _pieces(target: Tensor, part: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Return (target, source) pieces for several threads to copy."""
    if not (target.is_contiguous() and part.is_contiguous()):
        return [(target, part)]
    return zip(target.view(-1).split(_PIECE), part.view(-1).split(_PIECE), strict=True)


def _copy(pair: tuple[Tensor, Tensor]) -> None:
    """Copy a piece; to a GPU through pinned memory: pageable memory copies at an eighth of the link's speed."""
    target, part = pair
    target.copy_(part.pin_memory() if target.is_cuda else part, non_blocking=True)


def _faults(folder: Path, one: Found, threads: int) -> list[str]:
    """Return the faults of a snapshot; one that was replaced since it was found counts as faulty."""
    slot = Slot(folder / one.name)
    snapshot = slot.snapshot()
    if snapshot is None or Found.of(snapshot, one.is_copy, one.holder) != one:
        return ["it was replaced meanwhile"]
    return slot.verify(threads)


def _safe_before(run: RunDir) -> int:
    """Return the newest step that was safe when the last round or attempt ended; -1 for none."""
    ends = (e for e in events.newest_events(run) if isinstance(e, events.RoundBroken | events.AttemptEnded))
    return next((e.committed for e in ends if e.committed is not None), -1)
