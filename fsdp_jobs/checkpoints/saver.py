"""Save a state with DCP: from its tensors, or asynchronously from a copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.tensor import DTensor

from fsdp_jobs.checkpoints.state import State, parameter_of
from fsdp_jobs.checkpoints.storage import CommittingWriter, SaveRequest
from fsdp_jobs.checkpoints.tensors import Unchanged, is_as_planned
from fsdp_jobs.config.keys import AUTO
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.run.table import listed


class _Stager(DefaultStager):
    """A stager for many saves; torch 2.11's own empties its table of copiers after each one.

    It hands the writer the tensors that changed during the copy, before the writer may go to DCP's process.
    """

    watched: tuple[Unchanged, CommittingWriter] | None = None

    def _stage(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        if not self._state_dict_stager._deepcopy_dispatch:
            options = self._config
            self._state_dict_stager = StateDictStager(options.use_pinned_memory, options.use_shared_memory)
        staged = super()._stage(state_dict, **kwargs)
        if self.watched is not None:
            (unchanged, writer), self.watched = self.watched, None
            writer.changed = unchanged.changed()
        return staged


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
        self.stager = _Stager(StagingOptions(on_cuda, self.mode == "process", True, on_cuda))
        self._planner, self._group = _Planner(layout), group
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")

    def save(self, request: SaveRequest, state: State, block: bool) -> tuple[Future[Any] | None, Future[Any]]:
        """Write a state or, without `block`, begin to. Returns futures: the state may change; all is written.

        The first is None if nothing copies the state.

        Raises:
            TypeError: a value is neither plain nor a tensor; without `block`, the first future raises it.
        """
        tensors, objects = state.to_save()
        if not block and self.mode != "off":  # starts its thread last, which may wait for the GIL
            pack = partial(state.packed, copy.deepcopy(objects))
            ready = torch.cuda.current_stream().record_event() if self._device.type == "cuda" else None
            staged = self._thread.submit(self._stage, request, tensors, pack, ready, Unchanged(tensors))
            return staged, self._thread.submit(lambda: staged.result()())
        whole, written = tensors | state.packed(objects), Future[Any]()
        try:
            dcp.save(whole, **self._how(request))
            written.set_result(None)
        except (Exception, CheckpointException) as e:  # the second is not an Exception
            written.set_exception(e)
        return None, written

    def _how(self, request: SaveRequest) -> dict[str, Any]:
        return {"storage_writer": CommittingWriter(request), "planner": self._planner, "process_group": self._group}

    def _stage(
        self,
        request: SaveRequest,
        tensors: dict[str, Tensor],
        pack: Callable[[], dict[str, Tensor]],
        ready: torch.cuda.Event | None,
        unchanged: Unchanged,
    ) -> Callable[[], object]:
        """In a thread: copy the state once it is `ready`. Returns a function that writes it and holds only it."""
        if ready is not None:
            torch.cuda.set_device(self._device)  # of this thread
            ready.synchronize()  # the stager copies on a stream of its own
        state, how = tensors | pack(), self._how(request)
        self.stager.watched = unchanged, how["storage_writer"]
        if self.mode == "process":
            kind = AsyncCheckpointerType.PROCESS
            response = dcp.async_save(state, **how, async_checkpointer_type=kind, async_stager=self.stager)
            assert isinstance(response, AsyncSaveResponse)
            response.staging_completion.result()
            return response.upload_completion.result
        return partial(dcp.save, cast("Future[dict[str, Tensor]]", self.stager.stage(state)).result(), **how)

    def close(self) -> None:
        """Wait for the last save, and release resources."""
        self._thread.shutdown()
        self.stager.close()
