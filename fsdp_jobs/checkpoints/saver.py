"""Save a state with DCP: from its tensors, or asynchronously from a copy."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor

from fsdp_jobs.checkpoints.state import LiveState, State, parameter_of
from fsdp_jobs.checkpoints.storage import CommittingWriter, SaveRequest
from fsdp_jobs.checkpoints.tensors import is_as_planned
from fsdp_jobs.config.keys import AUTO
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.run.table import listed
from fsdp_jobs.run.threads import begin_in, is_refused


class _Planner(DefaultSavePlanner):
    """Plans each tensor that all replicas hold on one of them only.

    DCP's planner plans it on all, and rank 0, which gathers the plans, drops the duplicates: with thousands of ranks
    that takes minutes, and gigabytes.
    """

    def __init__(self, layout: Layout):
        super().__init__(enable_plan_caching=True)
        self._layout = layout

    def create_local_plan(self) -> SavePlan:
        """Plan the part of this replica: each tensor goes to the replica with the fewest bytes so far."""
        plan, layout = super().create_local_plan(), self._layout
        self._held = {item.index.fqn for item in self.plan.items}
        if not plan.usable:
            return plan  # it is as it was in the save before
        own, sizes = dist.get_rank() // layout.shard_group, [0] * layout.replicas
        items: list[WriteItem] = []
        for item in sorted(plan.items, key=lambda item: item.index.fqn):  # some ranks may hold them in another order
            writer = own
            if self._is_shared(item.index.fqn):
                writer = sizes.index(min(sizes))
                sizes[writer] += item.tensor_storage_size() or 1
            if writer == own:
                items.append(item)
        paths = {item.index.fqn: plan.planner_data[item.index.fqn] for item in items}
        return replace(plan, items=items, planner_data=paths)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Raises: ValueError if no replica has planned a tensor that this rank holds."""
        plans, metadata = super().create_global_plan(all_plans)
        if lacking := self._held - metadata.state_dict_metadata.keys():
            raise ValueError(f"replicas hold different tensors: {listed(sorted(lacking))}")
        return plans, metadata

    def _is_shared(self, name: str) -> bool:
        """Whether every replica holds a tensor: a parameter sharded as planned, or optimizer state of one."""
        tensor = self.state_dict[name]
        if not isinstance(tensor, DTensor):
            tensor = self.state_dict.get(parameter_of(name))
        return isinstance(tensor, DTensor) and is_as_planned(tensor, self._layout)


class Saver:
    """Writes one state at a time, on all ranks together."""

    def __init__(self, mode: str, device: torch.device, group: dist.ProcessGroup, layout: Layout):
        """`mode` is `checkpoint.async_mode`."""
        on_cuda = device.type == "cuda"
        self._device = device
        self.mode = ("process" if on_cuda else "thread") if mode == AUTO else mode
        self.stager = StateDictStager(pin_memory=on_cuda, share_memory=self.mode == "process")
        self._stream = torch.cuda.Stream(device) if on_cuda else None  # to copy on
        self._planner, self._group = _Planner(layout), group
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")

    def save(self, request: SaveRequest, state: State, block: bool) -> tuple[Future[Any], Future[Any]]:
        """Begin to write a state. Returns futures: the state may change, if it is copied; all is written.

        It is written without a copy with `block`, and if `checkpoint.async_mode` is off. The first future raises
        TypeError for a value that is neither plain nor a tensor.
        """
        copies = not block and self.mode != "off"
        staged = begin_in(self._thread, self._stage, request, LiveState(state), copies)  # may wait for the GIL
        return staged, begin_in(self._thread, lambda: staged.result()())

    def _stage(self, request: SaveRequest, live: LiveState, copies: bool) -> Callable[[], object]:
        """In a thread: copy the state. Returns a function that writes it and holds only it."""
        if self._stream is not None:
            torch.cuda.set_device(self._device)  # of this thread
        state, writer = live.parts(), CommittingWriter(request)
        if copies:
            with torch.cuda.stream(self._stream):  # does nothing for None
                state = self.stager.stage(state, non_blocking=self._stream is not None)
            if self._stream is not None:
                self._stream.synchronize()
            writer.changed = live.changed()
        how: dict[str, Any] = {"storage_writer": writer, "planner": self._planner, "process_group": self._group}
        if copies and self.mode == "process":
            kind = AsyncCheckpointerType.PROCESS
            try:
                return cast("Future[Any]", dcp.async_save(state, **how, async_checkpointer_type=kind)).result
            except RuntimeError as e:
                if not is_refused(e):
                    raise
        return partial(dcp.save, state, **how)

    def close(self) -> None:
        """Wait for the last save, and release resources."""
        self._thread.shutdown()
        self.stager.close()
