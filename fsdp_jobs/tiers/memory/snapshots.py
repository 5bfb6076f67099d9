"""Snapshots in the nodes' memory: each rank copies its shards there every few steps.

The agent seals snapshots with checksums and copies them to another node (`node.py`); `slots.py` has the files. Ranks
agree before each update; a rank whose last snapshot is not yet sealed and copied vetoes the next one. So one of the
two slots always holds a step that all nodes have.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_jobs.checkpoints.checkpointer import Checkpointer
from fsdp_jobs.checkpoints.state import RANDOM, LiveState
from fsdp_jobs.checkpoints.tensors import is_as_planned, local
from fsdp_jobs.checkpoints.tiers import SnapshotTier
from fsdp_jobs.config.keys import AUTO
from fsdp_jobs.run import events
from fsdp_jobs.run.agreement import known_here
from fsdp_jobs.run.env import MEMORY_ENV, TERM_ENV
from fsdp_jobs.tiers.memory.slots import Entry, Slot, Snapshot, forget_before
from fsdp_jobs.tiers.memory.tensors import entry_of, view

_DUE, _BUSY = 1, 2  # votes; the highest wins
_AUTO_COST = 0.01  # share of training time that snapshots may take
_SLACK = 1 << 20  # bytes for random states and counters, whose size varies
_AT_ONCE = 1 << 26  # bytes of a snapshot, up to which its slots are made while its step waits
_PAGE = 4096
_PIECE = 1 << 26  # bytes of a slot that CUDA registers at once, while no kernel can be launched
_REST = 4  # pause until the next piece, as a multiple of the time that one took


class Snapshots(SnapshotTier):
    """One rank's snapshots."""

    def __init__(self, checkpoints: Checkpointer, folder: Path):
        """`folder` is the node's."""
        self.folder, self.run, self.ranks = folder, checkpoints.run, checkpoints.ranks
        self._attempt = checkpoints.attempt
        self.layout, self.state, self.tell = checkpoints.layout, checkpoints.state, checkpoints.tell_failed
        self.every_steps = checkpoints.config.memory.every_steps
        self.log_every_steps = checkpoints.job.log_every_steps
        self.term = int(os.environ[TERM_ENV])
        is_one_node = self.ranks.world == self.ranks.local_world
        self._has_replica = self.layout.replicas > 1 and not is_one_node  # on another node
        self._group = dist.new_group(backend="gloo")  # keeps votes apart from the collectives of saves
        self._ballot = torch.zeros(2, dtype=torch.int32, device="cpu")  # a vote, and 1 if the newest was withdrawn
        self._voting: dist.Work | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot", initializer=self._use_device)
        self._copying: Future[None] | None = None
        self._stream = torch.cuda.Stream(self.state.device) if self.state.device.type == "cuda" else None
        self._maps: dict[int, Tensor] = {}  # slot -> its data, as bytes
        self._closing = threading.Event()
        self._newest: Slot | None = None
        self._number = 1  # of the newest one's slot
        self.step = -1  # the newest that all nodes are known to have
        self._snapshot_step = -1  # the newest taken in this round
        self._copies_first = False  # steps wait for copies, because something changed the state during one
        self.done = 0  # steps
        self._since, self._cost_s = time.monotonic(), 0.0  # when the newest snapshot began, and its cost
        self._taken_s = 0.0  # the part that `take_stall` has returned

    @classmethod
    def of_rank(cls, checkpoints: Checkpointer) -> Self | None:
        """Return this rank's snapshots, if its agent keeps a folder for them."""
        folder = os.environ.get(MEMORY_ENV)
        return cls(checkpoints, Path(folder)) if folder else None

    def _use_device(self) -> None:
        """Select this rank's GPU in a new thread, which would use the first otherwise."""
        if self._stream is not None:
            torch.cuda.set_device(self.state.device)

    def before_update(self) -> None:
        """Wait until the snapshot under way has read the state, and vote."""
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
            return self.done + 1 == replayed  # no other snapshot may make a rank busy there
        if self._snapshot_step < 0:
            return True  # at once, to replace the copies of a lost node
        if self.every_steps != AUTO:
            every = int(self.every_steps)
            return (self.done + 1) // every > self._snapshot_step // every  # the same steps in every round
        return self._cost_s <= _AUTO_COST * (time.monotonic() - self._since)

    def after_step(self, step: int, samples: int, stream: dict[str, Any] | None, record: Callable[[], None]) -> None:
        """Begin a snapshot of the state after `step` steps, if no rank is busy and one is due."""
        self.before_update()  # in case the optimizer made no update
        assert self._voting is not None
        self._voting.wait()
        self._voting, self.done = None, step
        vote, is_lost = self._ballot.tolist()
        if vote != _DUE:
            return
        begin = time.perf_counter()
        if not is_lost:  # else it was withdrawn, and its slots are free on all ranks
            if self._snapshot_step >= 0 and self.ranks.leads:
                forget_before(self.folder, self.term)  # every node has a snapshot of this round
            self._number = 1 - self._number
            if self.step < 0 <= self._snapshot_step and self.ranks.rank == 0:
                events.record(self.run, self._attempt, events.SnapshotsBegun(self._snapshot_step))
            self.step = self._snapshot_step
        live = LiveState(self.state)
        slot = self._newest = self._slot(self._number)
        with torch.no_grad():  # else each `to_local` is recorded, which takes 20 times as long
            size = sum(local(tensor).nbytes for tensor in live.tensors.values())
        has_room = len(self._maps) == 2 and min(map(len, self._maps.values())) >= size
        if size > _AT_ONCE and step != known_here().replayed and not has_room:
            self._thread.submit(self._make_room, slot, step, size)
            return
        self._snapshot_step = step
        mine = self.term, self.ranks.rank, self._number
        about = partial(Snapshot, *mine, step, samples, self.ranks.world, stream=copy.deepcopy(stream))
        self._copying = self._thread.submit(self._copy, slot, about, live, record)
        self._since, self._cost_s, self._taken_s = time.monotonic(), time.perf_counter() - begin, 0.0
        if self._copies_first:
            self.settle()

    def _slot(self, number: int) -> Slot:
        return Slot(self.folder / f"{self.term}-{self.ranks.rank}-{number}")

    def _make_room(self, newest: Slot, step: int, size: int) -> None:
        """In a thread: map both slots instead of taking a snapshot, so that no step waits for it.

        `newest` stays without a description, so all ranks treat this snapshot as withdrawn.
        """
        newest.withdraw()
        try:
            for number in (0, 1):
                if not self._closing.is_set():
                    self._map(self._slot(number), number, size, _REST)
        except (OSError, RuntimeError) as e:  # the latter if CUDA registers no more memory
            self._give_up(step, size, e)
        else:
            newest.copied.touch()

    def _copy(
        self,
        slot: Slot,
        about: Callable[[int, list[Entry]], Snapshot],
        live: LiveState,
        record: Callable[[], None],
    ) -> None:
        """In a thread: fill the slot, and publish it.

        If it does not fit, this round takes no further snapshots, and training continues.
        """
        slot.withdraw()
        parts = live.parts()
        is_plans = all(is_as_planned(tensor, self.layout) for tensor in live.tensors.values())
        has_replica = self._has_replica and is_plans
        same = live.tensors.keys() - self.state.buffers if is_plans and self.layout.replicas > 1 else ()
        entries = [
            entry_of(name, part, not has_replica or name.startswith(RANDOM), name in same)
            for name, part in parts.items()
        ]
        snapshot = about(self.layout.shard_group if is_plans else self.ranks.world, entries).placed()
        try:
            self._fill(self._map(slot, snapshot.slot, snapshot.size), snapshot, list(parts.values()))
        except (OSError, RuntimeError) as e:
            self._give_up(snapshot.step, snapshot.size, e)
            return
        if changed := live.changed():
            self._copies_first = True
            slot.copied.touch()  # but not published: all ranks treat it as withdrawn
            self.tell(snapshot.step, f"no snapshot of step {snapshot.step}: {changed}")
            return
        record()
        try:
            slot.publish(snapshot)
        except OSError as e:
            self._give_up(snapshot.step, snapshot.size, e)

    def _give_up(self, step: int, size: int, error: Exception) -> None:
        """Report that there is no room: without a description the slot does not count as whole."""
        why = getattr(error, "strerror", None) or error
        self.tell(
            step,
            f"no more snapshots until the next round: {self.folder}: {why}; each of a rank's two "
            f"snapshots takes {size / 1e9:.3g} GB. Set checkpoint.memory.dir to a larger file system in "
            "memory, enlarge /dev/shm, or set checkpoint.memory.every_steps=0.",
        )

    def _fill(self, data: Tensor, snapshot: Snapshot, parts: list[Tensor]) -> None:
        """Copy tensors to their places in the snapshot."""
        filled = [(entry, part) for entry, part in zip(snapshot.entries, parts, strict=True) if entry.bytes]
        with torch.cuda.stream(self._stream):  # does nothing for None
            pairs = [pair for entry, part in filled for pair in _cut(view(data, entry), local(part), entry.begin)]
            torch._foreach_copy_([to for to, _ in pairs], [part for _, part in pairs], non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()

    def _map(self, slot: Slot, number: int, size: int, rest: float = 0.0) -> Tensor:
        """Map a slot once, and let the GPU write there directly. Its contents stay.

        Args:
            rest: between two pieces, in multiples of the time that one takes.

        Raises:
            OSError: there is no room.
            RuntimeError: CUDA registers no more memory.
        """
        data = self._maps.get(number)
        if data is None or len(data) < size:
            if data is not None and self._stream is not None:
                for begin in range(0, len(data), _PIECE):
                    torch.cuda.cudart().cudaHostUnregister(data.data_ptr() + begin)
            data = self._maps[number] = torch.frombuffer(slot.map(size + _SLACK), dtype=torch.uint8)
            data[::_PAGE].sum()  # makes the kernel map the pages
            if self._stream is not None:
                self._register(data, rest)
        return data

    def _register(self, data: Tensor, rest: float) -> None:
        for begin in range(0, len(data), _PIECE):
            began, length = time.perf_counter(), min(_PIECE, len(data) - begin)
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(data.data_ptr() + begin, length, 0))
            if rest and self._closing.wait(rest * (time.perf_counter() - began)):
                break

    def go_on(self, step: int) -> None:
        self.done = step

    def close(self) -> None:
        self._closing.set()
        self.settle()
        self._thread.shutdown()


def _cut(target: Tensor, source: Tensor, begin: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut a copy to `begin` of a slot where the slot's pieces meet: CUDA copies to one registered piece at a time."""
    first, size = (_PIECE - begin % _PIECE) // target.itemsize, _PIECE // target.itemsize
    if target.numel() <= first:
        return iter([(target, source)])
    ends = [*range(first, target.numel(), size), target.numel()]
    lengths = [end - start for start, end in pairwise([0, *ends])]
    return zip(target.view(-1).split(lengths), source.reshape(-1).split(lengths), strict=True)
