"""Measure a rank's own time in a step: its data, its checkpoints, and the forward pass of its blocks.

FSDP's collectives make all ranks wait for the slowest one in every block, so their steps take equally long, and
none waits noticeably at the step's end. Between the all-gather of a block and the block's end there is no
collective: that span is the rank's own.
"""

from __future__ import annotations

import operator
import time
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_jobs.run.rank_state import Times

_WARM_UP = 50  # first steps of a round that do not count: they compile, allocate and fill caches
_MOST_BLOCKS = 16  # measured, evenly spread: on a GPU each takes two events per microbatch
_MOST_SPANS = 1 << 16  # of a step; a limit for programs that never end one


class _Span(NamedTuple):
    """One block's forward pass."""

    host_s: float
    work: int  # elements of its input, 0 if no input is known
    attention: int  # `work` times the sequence length
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None  # None on a CPU, where the host computes


class StepTimer:
    """Sums up this rank's own times; on a GPU those of a step are read in the next one, without waiting."""

    def __init__(self, device: torch.device):
        self._is_cuda = device.type == "cuda"
        self._blocks_per_measured = 1.0
        self._began_s, self._began = 0.0, self._mark()
        self._spans = deque[_Span](maxlen=_MOST_SPANS)  # of this step
        self._done = deque[_Span]()  # of the step before
        self._steps = 0
        self.compute_s = 0.0  # of the newest step whose time is known
        self.sums = Times()

    def watch(self, model: nn.Module) -> None:
        """Measure the model's innermost FSDP units, after `fully_shard`: these hooks run inside FSDP's own."""
        units = [m for m in model.modules() if [u for u in m.modules() if isinstance(u, FSDPModule)] == [m]]
        measured = units[:: len(units) // _MOST_BLOCKS + 1]
        self._blocks_per_measured = len(units) / max(1, len(measured))
        for unit in measured:
            unit.register_forward_pre_hook(self._begin)
            unit.register_forward_hook(self._end, prepend=True, with_kwargs=True)

    def _mark(self) -> torch.cuda.Event | None:
        if not self._is_cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self, _block: nn.Module, _inputs: object) -> None:
        self._began_s, self._began = time.perf_counter(), self._mark()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end(self, _: nn.Module, inputs: tuple[object, ...], named: dict[str, object], output: object) -> None:
        if not torch.is_grad_enabled():
            return  # a validation pass
        host_s, ended = time.perf_counter() - self._began_s, self._mark()
        tensors = (t for t in (*inputs, *named.values(), output) if isinstance(t, Tensor) and t.is_floating_point())
        hidden = next(tensors, torch.empty(0))
        length = hidden.shape[-2] if hidden.dim() > 2 else 1
        events = (self._began, ended) if self._began and ended else None
        self._spans.append(_Span(host_s, hidden.numel(), hidden.numel() * length, events))

    def end_step(self, step_s: float, data_s: float, checkpoint_s: float, slowest_s: float) -> None:
        """Add a step.

        Args:
            step_s: seconds that it took.
            data_s: seconds that it waited for its data.
            checkpoint_s: seconds that it waited for checkpoints.
            slowest_s: the longest `compute_s` of all ranks.
        """
        spans = self._done if self._is_cuda else self._spans
        self._done, self._spans = self._spans, deque(maxlen=_MOST_SPANS)
        host_s = sum(s.host_s for s in spans) * self._blocks_per_measured
        pairs = [s.events for s in spans if s.events is not None and s.events[1].query()]
        on_gpu = sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3
        self.compute_s = on_gpu * self._blocks_per_measured if self._is_cuda else host_s
        self._steps += 1
        if self._steps > _WARM_UP:
            work, attention = sum(s.work for s in spans), sum(s.attention for s in spans)
            new = (1, step_s, data_s, checkpoint_s, self.compute_s, host_s, work, slowest_s, attention)
            self.sums = Times(*map(operator.add, self.sums, new))
