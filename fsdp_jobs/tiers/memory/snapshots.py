"""Snapshots in the nodes' memory: each rank captures its shards there every few steps.

The agent seals captures with checksums and copies them to another node (`node.py`); `slots.py` has the files. Ranks
agree before each update; a rank whose last capture is not yet sealed and copied vetoes the next one. So one of the two
slots always holds a step that all nodes have.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from mmap import mmap
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_jobs.checkpoints.checkpointer import Checkpointer
from fsdp_jobs.checkpoints.state import RANDOM
from fsdp_jobs.checkpoints.tensors import CHANGED, Unchanged, is_as_planned, local
from fsdp_jobs.checkpoints.tiers import Snapshots
from fsdp_jobs.config.keys import AUTO
from fsdp_jobs.run.agreement import known_here
from fsdp_jobs.run.env import MEMORY_ENV, TERM_ENV
from fsdp_jobs.run.table import listed
from fsdp_jobs.tiers.memory.slots import Capture, Entry, Slot, forget_before
from fsdp_jobs.tiers.memory.tensors import address_of, entry_of, view

_DUE, _BUSY = 1, 2  # votes; the highest counts
_AUTO_COST = 0.01  # of the time of training, that captures may take
_SLACK = 1 << 20  # bytes for random states and counters, whose size varies
_AT_ONCE = 1 << 26  # bytes of a capture, up to which its slots are made while its step waits
_PAGE = 4096


class Captures(Snapshots):
    """One rank's captures."""

    def __init__(self, checkpoints: Checkpointer, folder: Path):
        """`folder` is the node's."""
        self.folder, self.run, self.ranks = folder, checkpoints.run, checkpoints.ranks
        self.layout, self.state, self.tell = checkpoints.layout, checkpoints.state, checkpoints.tell_failed
        self.every_steps = checkpoints.config.memory.every_steps
        self.log_every_steps = checkpoints.job.log_every_steps
        self.term = int(os.environ[TERM_ENV])
        self.leads = os.environ["LOCAL_RANK"] == "0"
        is_one_node = self.ranks.world == int(os.environ["LOCAL_WORLD_SIZE"])
        self._has_replica = self.layout.replicas > 1 and not is_one_node  # on another node
        self._group = dist.new_group(backend="gloo")  # votes must not meet the collectives of saves
        self._ballot = torch.zeros(2, dtype=torch.int32)  # a vote, and whether a newest capture was withdrawn
        self._voting: dist.Work | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="capture", initializer=self._use_device)
        self._copying: Future[None] | None = None
        self._stream = torch.cuda.Stream(self.state.device) if self.state.device.type == "cuda" else None
        self._maps: dict[int, mmap] = {}  # slot -> its data
        self._newest: Slot | None = None
        self._captures = 0  # in this round
        self._number = 1  # of the slot of the newest
        self.step = -1  # the newest that is known to be with all nodes
        self._captured_step = -1
        self._copies_first = False  # something changes the state while steps do not wait for its copy
        self.done = 0  # steps
        self._since, self._cost_s = time.monotonic(), 0.0  # after the newest capture, and of it
        self._taken_s = 0.0  # of that cost

    @classmethod
    def of_rank(cls, checkpoints: Checkpointer) -> Self | None:
        """Return this rank's, if its agent keeps a folder for them."""
        folder = os.environ.get(MEMORY_ENV)
        return cls(checkpoints, Path(folder)) if folder else None

    def _use_device(self) -> None:
        """Make this rank's GPU the one of a new thread, whose own would be the first."""
        if self._stream is not None:
            torch.cuda.set_device(self.state.device)

    def before_update(self) -> None:
        """Wait until what is being captured has been read, and vote."""
        self.settle()
        if self._voting is None:
            is_busy = self._newest is not None and not self._newest.copied.exists()
            self._ballot[0] = _BUSY if is_busy else _DUE if self.ranks.rank == 0 and self._is_due() else 0
            self._ballot[1] = self._newest is not None and not self._newest.about.exists()  # its agent found it changed
            self._voting = dist.all_reduce(self._ballot, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def settle(self) -> None:
        if self._copying is not None:
            begin, copying, self._copying = time.perf_counter(), self._copying, None
            copying.result()
            self._cost_s += time.perf_counter() - begin

    def take_stall(self) -> float:
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

    def after_step(self, step: int, samples: int, stream: dict[str, Any] | None, record: Callable[[], None]) -> None:
        """Begin to capture the state after `step` steps, if none was busy and it is time to."""
        self.before_update()  # where the optimizer made no update
        assert self._voting is not None
        self._voting.wait()
        self._voting, self.done = None, step
        vote, is_lost = self._ballot.tolist()
        if vote != _DUE:
            return
        begin = time.perf_counter()
        if self._captures == 1 and self.leads:
            forget_before(self.folder, self.term)  # every node has the first capture of this round
        if not is_lost:  # else its slots are free, on all ranks
            self._number = 1 - self._number
            self.step = self._captured_step
        tensors, objects = self.state.to_capture()  # may have the optimizer call `before_update`
        slot = self._newest = self._slot(self._number)
        with torch.no_grad():  # else each `to_local` is recorded, which takes 20 times as long
            size = sum(local(tensor).nbytes for tensor in tensors.values())
        if size > _AT_ONCE and step != known_here().replayed and not self._has_room(size):
            self._thread.submit(self._make_room, slot, step, size)
            return
        self._captured_step = step
        mine = self.term, self.ranks.rank, self._number
        about = partial(Capture, *mine, step, samples, self.ranks.world, stream=copy.deepcopy(stream))
        updated = torch.cuda.current_stream().record_event() if self._stream is not None else None
        unchanged = Unchanged(tensors)
        args = (about, tensors, copy.deepcopy(objects), updated, unchanged, record)
        self._copying = self._thread.submit(self._copy, slot, *args)
        self._captures += 1
        self._since, self._cost_s, self._taken_s = time.monotonic(), time.perf_counter() - begin, 0.0
        if self._copies_first:
            self.settle()

    def _slot(self, number: int) -> Slot:
        return Slot(self.folder, self.term, self.ranks.rank, number)

    def _has_room(self, size: int) -> bool:
        return len(self._maps) == 2 and min(map(len, self._maps.values())) >= size

    def _make_room(self, newest: Slot, step: int, size: int) -> None:
        """Map both slots in place of a capture, so that no step waits for it; in a thread.

        `newest` stays without a description, so all ranks take this capture for one that was withdrawn.
        """
        newest.withdraw()
        try:
            for number in (0, 1):
                data = self._map(self._slot(number), number, size)
                torch.frombuffer(data, dtype=torch.uint8)[::_PAGE].sum()  # has the kernel map the pages
        except OSError as e:
            self._give_up(step, size, e)
        else:
            newest.copied.touch()

    def _copy(
        self,
        slot: Slot,
        about: Callable[[int, list[Entry]], Capture],
        tensors: dict[str, Tensor],
        objects: dict[str, Any],
        updated: torch.cuda.Event | None,
        unchanged: Unchanged,
        record: Callable[[], None],
    ) -> None:
        """Fill the slot and say that it is whole; in a thread. On a GPU the copy follows the event `updated`.

        When it does not fit, no further step of this round is captured, and training continues.
        """
        slot.withdraw()
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
            self._fill(self._map(slot, capture.slot, capture.size), capture, list(parts.values()), updated)
        except OSError as e:
            self._give_up(capture.step, capture.size, e)
            return
        if changed := unchanged.changed():
            self._copies_first = True
            slot.copied.touch()  # without a description: all ranks take it for one that was withdrawn
            self.tell(capture.step, f"no capture of step {capture.step}: {CHANGED.format(listed(changed, 3))}")
            return
        record()
        try:
            slot.publish(capture)
        except OSError as e:
            self._give_up(capture.step, capture.size, e)

    def _give_up(self, step: int, size: int, error: OSError) -> None:
        """Say that there is no room: without its description nobody takes a slot for whole."""
        self.tell(
            step,
            f"no step is captured until the next round: {self.folder}: {error.strerror}; each of a rank's two "
            f"captures takes {size / 1e9:.3g} GB. Set checkpoint.memory.dir to a larger file system in "
            "memory, enlarge /dev/shm, or set checkpoint.memory.every_steps=0.",
        )

    def _fill(self, data: mmap, capture: Capture, parts: list[Tensor], updated: torch.cuda.Event | None) -> None:
        """Copy tensors to where the capture has them."""
        filled = [(entry, part) for entry, part in zip(capture.entries, parts, strict=True) if entry.bytes]
        with torch.cuda.stream(self._stream):  # does nothing for None
            if updated is not None:
                updated.wait()
            views = [view(data, entry) for entry, _ in filled]
            torch._foreach_copy_(views, [local(part) for _, part in filled], non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()

    def _map(self, slot: Slot, number: int, size: int) -> mmap:
        """Map a slot once, and let the GPU write there directly. What it holds stays there.

        Raises:
            OSError: there is no room.
        """
        data = self._maps.get(number)
        if data is None or len(data) < size:
            if data is not None and self._stream is not None:
                torch.cuda.cudart().cudaHostUnregister(address_of(data))
            data = self._maps[number] = slot.map(size + _SLACK)
            if self._stream is not None:
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address_of(data), len(data), 0))
        return data

    def go_on(self, step: int) -> None:
        self.done = step

    def close(self) -> None:
        self.settle()
        self._thread.shutdown()
