"""Record a step's measurements: a line of `metrics.jsonl` and, if installed, TensorBoard's scalars.

A thread writes them: training goes on while the file system hangs.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import statistics
import time
from collections import deque
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_jobs.config.resolve import param_dtype, peak_flops
from fsdp_jobs.config.schema import JobConfig, LlamaConfig
from fsdp_jobs.plan.shapes import llama_shape
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.events import LossSpike, append_lines, record
from fsdp_jobs.run.goodput import StepClock
from fsdp_jobs.run.term import job_time
from fsdp_jobs.run.threads import Background

_REST_S = 60.0  # between two attempts to write for TensorBoard

logger = logging.getLogger(__name__)


def flops_per_token(model: nn.Module, config: JobConfig) -> float:
    """Return the FLOPs of forward and backward per token, recomputation not counted.

    Built-in models use the planner's formula; any other model 6 FLOPs per trained parameter, and 4 per frozen one.
    """
    if isinstance(config.model, LlamaConfig):
        return llama_shape(config.model).flops_per_token(config.data.seq_len)
    return 2.0 * sum(p.numel() * (3 if p.requires_grad else 2) for p in model.parameters())


class MetricsLog:
    """Rank 0's record of logged steps."""

    def __init__(self, run: RunDir, attempt: int, config: JobConfig, device: torch.device):
        self.run, self.attempt, self.world = run, attempt, dist.get_world_size()
        self.peak = 0.0  # FLOP/s per device at an MFU of 1; a CPU has none
        if config.hardware.accelerator != "cpu":
            self.peak = peak_flops(config.hardware, param_dtype(config.fsdp, device.type))
        self.spike = config.elastic.loss_spike
        self.losses: deque[float] = deque(maxlen=100)  # of the newest steps
        self.steps = StepClock(run)
        self.tensorboard: Any = None
        self.writer, self.unwritten = Background("metrics"), deque[tuple[float, dict[str, float]]]()
        self.rests_until = -math.inf if importlib.util.find_spec("tensorboard") is not None else math.inf

    def log(self, step: int, done_at: float, tokens: int, flops: float, values: dict[str, float]) -> None:
        """Record a step.

        Args:
            step: steps done, this one included.
            done_at: when it ended, seconds since 1970; lines are written up to a step later.
            tokens, flops: of the step over all ranks.
            values: by name, with the seconds `step_s` and `checkpoint_stall_s`; `snapshot_s` is the part for snapshots.
        """
        self._watch(step, values.get("loss", math.nan))
        seconds = values["step_s"]
        rate = tokens / seconds
        line = {"step": step, **values}
        line |= {"step": step, "tokens_per_s": rate, "tokens_per_s_per_gpu": rate / self.world}
        if self.peak and flops:
            line["mfu"] = flops / seconds / self.world / self.peak
        if torch.cuda.is_available():
            line["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        rounded = {k: v if isinstance(v, int) else float(f"{v:.9g}") for k, v in line.items()}
        sums = self.steps.add(step, done_at, seconds, values["checkpoint_stall_s"], values.pop("snapshot_s", 0.0))
        rounded |= {k: round(v, 4) for k, v in sums.items()}
        if self.rests_until < math.inf:
            # Not in the thread: a process that is forked meanwhile would keep the locks of its imports.
            with suppress(Exception):  # `_draw` reports it
                importlib.import_module("torch.utils.tensorboard")  # takes 0.7 s: not before the first step
        self.unwritten.append((done_at, rounded))
        self.writer.begin(self._write)

    def _write(self) -> None:
        """Write all that is not written: the file system may take longer for a line than a step takes."""
        while self.unwritten:
            lines = [self.unwritten.popleft() for _ in range(len(self.unwritten))]
            append_lines(self.run.metrics, *({**line, "attempt": self.attempt, "time": at} for at, line in lines))
            for _, line in lines:
                self._draw(int(line["step"]), line)

    def _draw(self, step: int, values: dict[str, float]) -> None:
        """Write scalars for TensorBoard; on a full disk try again a minute later, and with broken packages never."""
        if time.monotonic() < self.rests_until:
            return
        try:
            if self.tensorboard is None:
                from torch.utils.tensorboard import SummaryWriter

                self.tensorboard = SummaryWriter(str(self.run.tensorboard), purge_step=step)
            for name, value in values.items():
                self.tensorboard.add_scalar(name, value, step)
        except Exception as e:  # its packages may be broken in any way, and training needs none of them
            logger.warning("TensorBoard misses steps from %d on: %s: %s", step, type(e).__name__, e)
            self.tensorboard = None
            self.rests_until = time.monotonic() + _REST_S if isinstance(e, OSError) else math.inf

    def _watch(self, step: int, loss: float) -> None:
        """Record an event if a loss is far above those of the steps before it."""
        if not math.isfinite(loss):
            return
        if self.spike and len(self.losses) >= 20:
            mean, deviation = statistics.fmean(self.losses), statistics.stdev(self.losses)
            if loss > mean + self.spike * deviation > mean:
                spike = LossSpike(step, loss, mean, (loss - mean) / deviation, time=job_time())
                self.writer.begin(record, self.run, self.attempt, spike)
        self.losses.append(loss)

    def close(self) -> None:
        self.writer.end()
        if self.tensorboard is not None:
            with suppress(Exception):
                self.tensorboard.close()
