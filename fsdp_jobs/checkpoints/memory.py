"""Checkpoints in the nodes' memory: each rank's part is captured there every few steps, and outlives the rank.

The agent seals what was captured with checksums, and sends to another node what no replica there has
(`elastic/copies.py`); files and slots are those of `run/memory.py`. All ranks capture a step, or none does: before
each update they vote, against it as long as their last capture is not sealed and copied. So of two slots one always
holds a step that all nodes have.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from mmap import mmap
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner

from fsdp_jobs.checkpoints.captured import (
    Place,
    address_of,
    entry_of,
    is_as_planned,
    is_finite,
    local,
    mapped,
    metadata_of,
    part_of,
    view,
)
from fsdp_jobs.checkpoints.exchange import fetch_files
from fsdp_jobs.checkpoints.ranks import Ranks
from fsdp_jobs.checkpoints.state import RANDOM, State
from fsdp_jobs.config.keys import AUTO
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.run.env import EPOCH_ENV, MEMORY_ENV
from fsdp_jobs.run.integrity import known_here
from fsdp_jobs.run.memory import (
    COPIES,
    Capture,
    Entry,
    Found,
    Slot,
    forget_before,
    lost_shards,
    newest_complete,
    slots_in,
)

_DUE, _BUSY = 1, 2  # votes; the highest counts
_AUTO_COST = 0.01  # of the time of training, that captures may take
_SLACK = 1 << 20  # bytes for random states and counters, whose size varies
_TRIES = 3  # to load a step, of rounds that then died
_TRIED = "tried"  # file of the steps that were
_FETCHED = "fetched"  # folder of what came from other nodes for a restore

Tell = Callable[[int, str], None]


class MemoryCheckpoints:
    """One rank's captures. Methods marked "All ranks" are called by all, in the same order."""

    def __init__(self, folder: Path, ranks: Ranks, layout: Layout, state: State, every_steps: int | str, tell: Tell):
        """All ranks. `tell` gets the step and the reason of a capture that has failed."""
        self.folder, self.ranks, self.layout, self.state, self._tell = folder, ranks, layout, state, tell
        self.every_steps, self.epoch = every_steps, int(os.environ[EPOCH_ENV])
        self.leads = os.environ["LOCAL_RANK"] == "0"
        is_one_node = ranks.world == int(os.environ["LOCAL_WORLD_SIZE"])
        self._has_replica = layout.replicas > 1 and not is_one_node  # on another node
        self._group = dist.new_group(backend="gloo")  # votes must not meet the collectives of saves
        self._ballot = torch.zeros(2, dtype=torch.int32)  # a vote, and whether a newest capture was withdrawn
        self._voting: dist.Work | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="capture")
        self._copying: Future[None] | None = None
        self._stream = torch.cuda.Stream(state.device) if state.device.type == "cuda" else None
        self._maps: dict[int, mmap] = {}  # slot -> its data
        self._newest: Slot | None = None
        self._captures = 0  # in this round
        self._number = 1  # of the slot of the newest
        self.step = -1  # the newest that is known to be with all nodes
        self._captured_step = -1
        self.done = 0  # steps
        self._since, self._cost_s = time.monotonic(), 0.0  # after the newest capture, and of it
        self._taken_s = 0.0  # of that cost

    @classmethod
    def of_rank(
        cls, ranks: Ranks, layout: Layout, state: State, every_steps: int | str, tell: Tell
    ) -> MemoryCheckpoints | None:
        """All ranks: return this rank's, if its agent keeps a folder for them."""
        folder = os.environ.get(MEMORY_ENV)
        return cls(Path(folder), ranks, layout, state, every_steps, tell) if folder else None

    def before_update(self) -> None:
        """All ranks, before the state changes: wait until what is being captured has been read, and vote."""
        self.settle()
        if self._voting is None:
            is_busy = self._newest is not None and not self._newest.copied.exists()
            self._ballot[0] = _BUSY if is_busy else _DUE if self.ranks.rank == 0 and self._is_due() else 0
            self._ballot[1] = self._newest is not None and not self._newest.about.exists()  # its agent found it changed
            self._voting = dist.all_reduce(self._ballot, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def settle(self) -> None:
        """Wait until what is being captured has been read."""
        if self._copying is not None:
            begin, copying, self._copying = time.perf_counter(), self._copying, None
            copying.result()
            self._cost_s += time.perf_counter() - begin

    def take_stall(self) -> float:
        """Return the seconds that steps have waited for captures since the last call."""
        stall_s, self._taken_s = self._cost_s - self._taken_s, self._cost_s
        return stall_s

    def _is_due(self) -> bool:
        if self.done < (replayed := known_here().replayed):
            return self.done + 1 == replayed  # which must not be missed because of another
        if not self._captures:
            return True  # what a lost node had is copied again at once
        if self.every_steps != AUTO:
            every = int(self.every_steps)
            return (self.done + 1) // every > self._captured_step // every  # the same steps in every round
        return self._cost_s <= _AUTO_COST * (time.monotonic() - self._since)

    def after_step(self, step: int, samples: int, record: Callable[[], None]) -> None:
        """All ranks: begin to capture the state after `step` steps, if none was busy and it is time to.

        `record` is called in a thread, before anybody can go on from this step.
        """
        self.before_update()  # where the optimizer made no update
        assert self._voting is not None
        self._voting.wait()
        self._voting, self.done = None, step
        vote, is_lost = self._ballot.tolist()
        if vote != _DUE:
            return
        begin = time.perf_counter()
        if self._captures == 1 and self.leads:
            forget_before(self.folder, self.epoch)  # every node has the first capture of this round
        if not is_lost:  # else its slots are free, on all ranks
            self._number = 1 - self._number
            self.step = self._captured_step
        self._captured_step = step
        slot = Slot(self.folder, self.epoch, self.ranks.rank, self._number)
        about = partial(Capture, self.epoch, self.ranks.rank, self._number, step, samples, self.ranks.world)
        tensors, objects = self.state.to_capture()
        updated = torch.cuda.current_stream().record_event() if self._stream is not None else None
        self._copying = self._thread.submit(self._copy, slot, about, tensors, copy.deepcopy(objects), updated, record)
        self._captures, self._newest = self._captures + 1, slot
        self._since, self._cost_s, self._taken_s = time.monotonic(), time.perf_counter() - begin, 0.0

    def _copy(
        self,
        slot: Slot,
        about: Callable[[int, list[Entry]], Capture],
        tensors: dict[str, Tensor],
        objects: dict[str, Any],
        updated: torch.cuda.Event | None,
        record: Callable[[], None],
    ) -> None:
        """Fill the slot and say that it is whole; in a thread. On a GPU the copy follows the event `updated`.

        When it does not fit, no further step of this round is captured, and training continues.
        """
        slot.withdraw()
        if self._stream is not None:
            torch.cuda.set_device(self.state.device)  # of this thread
        parts = tensors | self.state.packed(objects)
        is_plans = all(is_as_planned(tensor, self.layout) for tensor in tensors.values())
        has_replica = self._has_replica and is_plans
        same = tensors.keys() - self.state.buffers if is_plans and self.layout.replicas > 1 else ()
        entries = [
            entry_of(name, part, not has_replica or name.startswith(RANDOM), name in same)
            for name, part in parts.items()
        ]
        capture = about(self.layout.shard_group if is_plans else self.ranks.world, entries).placed()
        try:
            data = self._map(slot, capture)
        except OSError as e:
            self._tell(
                capture.step,
                f"no step is captured until the next round: {self.folder}: {e.strerror}; each of a rank's two "
                f"captures takes {capture.size / 1e9:.3g} GB. Set checkpoint.memory.dir to a larger file system in "
                "memory, enlarge /dev/shm, or set checkpoint.memory.every_steps=0.",
            )
            return
        filled = [(entry, tensor) for entry, tensor in zip(capture.entries, parts.values(), strict=True) if entry.bytes]
        with torch.cuda.stream(self._stream):  # does nothing for None
            if updated is not None:
                updated.wait()
            views = [view(data, entry) for entry, _ in filled]
            torch._foreach_copy_(views, [local(tensor) for _, tensor in filled], non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        record()
        slot.publish(capture)

    def _map(self, slot: Slot, capture: Capture) -> mmap:
        """Map a slot once, and let the GPU write there directly.

        Raises:
            OSError: there is no room.
        """
        data = self._maps.get(capture.slot)
        if data is None or len(data) < capture.size:
            if data is not None and self._stream is not None:
                torch.cuda.cudart().cudaHostUnregister(address_of(data))
            data = self._maps[capture.slot] = slot.map(capture.size + _SLACK)
            if self._stream is not None:
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address_of(data), len(data), 0))
        return data

    def newest(self, at_least: int, passed_over: Collection[int] = ()) -> list[Found]:
        """All ranks: find the newest step that the nodes hold whole, and verify what they hold of it.

        Args:
            at_least: a step; one before it is not wanted.
            passed_over: steps that were found not to be usable.
        """
        if self.leads:
            shutil.rmtree(self.folder / _FETCHED, ignore_errors=True)
        here, tried = ([*self._found()], self._tried()) if self.leads else ([], [])
        by_rank = self.ranks.gather((self.ranks.node, self.leads, here, tried))
        self._leader = next(r for r, (node, leads, *_) in enumerate(by_rank) if leads and node == self.ranks.node)
        lost = {step for *_, steps in by_rank for step in steps if steps.count(step) >= _TRIES} | {*passed_over}
        limit = known_here().limit
        left = {one for _, _, found, _ in by_rank for one in found if one.step not in lost and one.step <= limit}
        sound: set[Found] = set()
        while (chosen := newest_complete(left)) and chosen[0].step >= at_least:
            mine = [one for one in chosen if one.holder == self.ranks.rank and one not in sound]
            with ThreadPoolExecutor(4) as several:
                faults = dict(zip(mine, several.map(partial(_faults, self.folder), mine), strict=True))
            for one, wrong in faults.items():
                if wrong:
                    print(f"WARNING {one.name} of step {one.step} is damaged, and not used: {wrong[:3]}", flush=True)
            bad = {one for found in self.ranks.gather([one for one in mine if faults[one]]) for one in found}
            if not bad:
                if self.leads:
                    with suppress(OSError):  # no room; then it is tried as often as the job is restarted
                        (self.folder / _TRIED).write_text(json.dumps([*tried, chosen[0].step]))
                return chosen
            left -= bad
            sound |= {*mine} - bad
        if self.ranks.rank == 0 and (told := lost_shards(left, at_least)):
            self._tell(*told)
        return []

    def _tried(self) -> list[int]:
        """Return the steps that rounds before this have begun to load, and did not go on from."""
        with suppress(OSError, ValueError):
            return [int(step) for step in json.loads((self.folder / _TRIED).read_text())]
        return []

    def _found(self) -> Iterable[Found]:
        """Return the captures that this node holds."""
        for folder in (self.folder, self.folder / COPIES):
            for slot in slots_in(folder):
                if (capture := slot.capture()) is not None:
                    yield Found.of(capture, is_copy=folder != self.folder, holder=self.ranks.rank)

    def load(self, chosen: list[Found]) -> int | None:
        """All ranks, after `newest`: go on from it. Returns the bytes that nodes sent each other; None if it cannot.

        Nothing of the state changes before all ranks have found what they need whole and finite.

        Raises:
            JobFailed: it is of another model.
            CannotKeep: what other nodes send does not fit.
        """
        self.done = chosen[0].step  # first: an optimizer that gets its state now calls for a vote
        held: dict[int, set[str]] = {}
        for one in chosen:
            held.setdefault(one.holder, set()).update(f"{one.name}.{suffix}" for suffix in ("json", "data", "sums"))
        fetch = partial(fetch_files, self.ranks, self._leader, held, folder=self.folder, into=self.folder / _FETCHED)
        by_name = {one.name: one for one in chosen}
        sources = self._sources(chosen)
        where = {
            name: self.folder if f"{name}.data" in held.get(self._leader, ()) else self.folder / _FETCHED
            for name in sources
        }
        came = fetch(wanted={f"{name}.json" for name in sources})
        captures = {name: _slot(where[name], by_name[name]).capture() for name in sources}
        stored = metadata_of({name: capture for name, capture in captures.items() if capture is not None})
        has_random = f"{RANDOM}{self.ranks.rank}" in stored.state_dict_metadata
        if not has_random and chosen[0].world_size == self.ranks.world:
            print(f"WARNING rank {self.ranks.rank}'s random state is lost with its node, and begins anew", flush=True)
        state = self.state.to_load(stored, f"the capture of step {chosen[0].step}", has_random)
        planner = DefaultLoadPlanner()
        planner.set_up_planner(state, stored, is_coordinator=False)
        items = planner.create_local_plan().items
        assert stored.storage_data is not None
        places: list[Place] = [stored.storage_data[item.storage_index] for item in items]
        read = {place.name for place in places}
        came += fetch(wanted={f"{name}.{suffix}" for name in read for suffix in ("data", "sums")})
        fetched = [by_name[name] for name in read if where[name] != self.folder]
        wrong = [fault for one in fetched for fault in _faults(self.folder / _FETCHED, one)]
        maps = {name: mapped(where[name] / f"{name}.data") for name in read}
        parts = [part_of(maps[name], entry, item) for item, (name, entry) in zip(items, places, strict=True)]
        needed = sum(local(tensor).numel() for tensor in state.values())
        wrong += [] if sum(part.numel() for part in parts) == needed else ["it does not hold all of this rank's state"]
        wrong += [
            f"{entry.name} is not finite"
            for (_, entry), part in zip(places, parts, strict=True)
            if not is_finite(part, entry.name in self.state.buffers)
        ]
        by_rank = self.ranks.gather((came, wrong[:3]))
        if faults := [fault for _, of_rank in by_rank for fault in of_rank]:
            if self.leads:
                print(f"WARNING the capture of step {chosen[0].step} is not used: {faults[:3]}", flush=True)
            return None
        for item, part in zip(items, parts, strict=True):
            planner.resolve_tensor(item).copy_(part)
        self.state.take(state)
        self.ranks.gather(None)  # all have read
        self.forget(but=chosen)
        self.step = chosen[0].step
        return sum(int(came) for came, _ in by_rank)

    def forget(self, but: Collection[Found] = ()) -> None:
        """Remove what earlier rounds have captured, once all ranks go on from something."""
        if self.leads:
            shutil.rmtree(self.folder / _FETCHED, ignore_errors=True)
            (self.folder / _TRIED).unlink(missing_ok=True)
            forget_before(self.folder, self.epoch, {one.name for one in but})

    def _sources(self, chosen: list[Found]) -> list[str]:
        """Name the captures that this rank's state is in, the better ones first."""

        def best(wanted: Callable[[Found], bool]) -> list[Found]:
            return sorted(filter(wanted, chosen), key=lambda one: (one.holder != self._leader, one.is_copy))[:1]

        rank, like = self.ranks.rank, chosen[0]
        own = best(lambda one: one.rank == rank and one.is_whole) or best(lambda one: one.rank == rank)
        places = range(like.shard_group)
        if (like.world_size, like.shard_group) == (self.ranks.world, self.layout.shard_group):
            places = range(rank % like.shard_group, rank % like.shard_group + 1)
            if own and own[0].is_whole:
                return [own[0].name]
        shards = [best(partial(_is_shard, at))[0] for at in places]
        own = own if like.world_size == self.ranks.world else []
        return list(dict.fromkeys(one.name for one in (*own, *shards)))

    def close(self) -> None:
        """Wait for the capture under way."""
        self.settle()
        self._thread.shutdown()


def _slot(folder: Path, one: Found) -> Slot:
    return Slot(folder / COPIES if one.is_copy else folder, one.epoch, one.rank, one.slot)


def _faults(folder: Path, one: Found) -> list[str]:
    """List what is wrong with a capture that was found, another one in its place included."""
    slot = _slot(folder, one)
    capture = slot.capture()
    if capture is None or Found.of(capture, one.is_copy, one.holder) != one:
        return ["it is not what was found"]
    return slot.verify()


def _is_shard(at: int, one: Found) -> bool:
    return one.is_whole and one.rank % one.shard_group == at
