"""The training loop."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor

from fsdp_jobs.checkpoints.checkpointer import Checkpointer, Progress, training_digest
from fsdp_jobs.checkpoints.pretrained import load_initial
from fsdp_jobs.config.errors import JobFailed
from fsdp_jobs.config.schema import JobConfig, training_values
from fsdp_jobs.elastic.rank_state import Phase, Request
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.verdict import EXIT_DONE, EXIT_REQUEUE
from fsdp_jobs.train.control import Control
from fsdp_jobs.train.data import IGNORE
from fsdp_jobs.train.loading import batches, open_samples
from fsdp_jobs.train.mesh import build_mesh
from fsdp_jobs.train.metrics import MetricsLog, flops_per_token, peak_for_mfu
from fsdp_jobs.train.optim import build_optimizer, learning_rate, set_learning_rate
from fsdp_jobs.train.sharding import compute_dtype, set_gradient_communication, sharded_model


@dataclass
class _Measured:
    """A step whose numbers may still be on the device."""

    step: int
    loss: Tensor  # sum over this rank's tokens
    grad_norm: Tensor
    rate: float
    data_s: float
    stall_s: float
    scale: float | None  # of the fp16 gradient scaler
    seconds: float


class Trainer:
    """One rank's part of one round: build, resume, train, leave."""

    def __init__(self, config: JobConfig, run: RunDir, layout: Layout, attempt: int, life: str, device: torch.device):
        self.config, self.run, self.layout, self.attempt, self.device = config, run, layout, attempt, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        data = config.data
        self.tokens_a_step = data.global_batch * data.seq_len
        self.samples = open_samples(data, config.seed)
        self._check_same_data(self.samples.fingerprint())
        mesh = build_mesh(layout, device.type)
        self.model: nn.Module = sharded_model(config.model, config.fsdp, layout, mesh, device, config.seed)
        torch.manual_seed(config.seed * 1_000_003 + self.rank)
        self.optimizer = build_optimizer(self.model, config.optim)
        dtype = compute_dtype(config.fsdp, device)
        self.scaler = torch.amp.GradScaler(device.type) if dtype == torch.float16 else None
        digest = training_digest(training_values(config))
        self.checkpoints = Checkpointer(
            run, config.checkpoint, layout, self.model, self.optimizer, self.scaler, device, attempt, life, digest
        )
        self.control = Control(self._minutes_are_over)
        self.last_save = time.monotonic()
        flops = flops_per_token(self.model, config)
        self.log = MetricsLog(run, attempt, self.world, flops, peak_for_mfu(config, device)) if self.rank == 0 else None
        self.progress = Progress()
        self._pending: _Measured | None = None
        self._step_ended = 0.0  # perf_counter at the end of the previous step, its save left out

    def _check_same_data(self, mine: int) -> None:
        """Raises: JobFailed when a node reads other data than rank 0."""
        prints: list[int] = [0] * self.world
        dist.all_gather_object(prints, mine)
        if len(set(prints)) > 1:
            others = [r for r, p in enumerate(prints) if p != prints[0]]
            raise JobFailed(
                f"ranks {others} read other data than rank 0: is {self.config.data.kind} the same on all nodes?"
            )

    def _minutes_are_over(self) -> bool:
        """Rank 0's clock decides for `checkpoint.every_minutes`."""
        minutes = self.config.checkpoint.every_minutes
        return self.rank == 0 and minutes > 0 and time.monotonic() - self.last_save >= minutes * 60

    def train(self) -> int:
        """Train to the job's last step or to a stop. Returns the rank's exit code.

        Raises:
            JobFailed: the last checkpoint could not be written, or the loss is not a number.
        """
        resumed = self.checkpoints.resume()
        if resumed is None:
            load_initial(self.model, self.config)
        self.progress = resumed or Progress()
        if self.rank == 0 and resumed is not None:
            event = events.Resumed(resumed.step, resumed.samples, self.world, self.checkpoints.loaded_from)
            events.record(self.run, self.attempt, event)
            print(f"resumed from step {resumed.step} on {self.world} ranks", flush=True)
        remaining = max(0, self.config.steps - self.progress.step)
        stream = batches(
            self.samples,
            self.config.data,
            self.rank,
            self.world,
            self.progress.samples,
            remaining,
            pin=self.device.type == "cuda",
        )
        self.control.report(self.progress.step, self.checkpoints.committed_step, Phase.STARTING)
        asked = Request.NONE
        self._step_ended = time.perf_counter()
        for number in range(remaining):
            asked = self._step(stream, first=number == 0)
            if asked in (Request.PARK, Request.STOP):
                break
        return self._leave(asked)

    def _step(self, stream: Any, first: bool) -> Request:
        """One optimizer step and what was agreed meanwhile; saves if it is time to."""
        began = time.perf_counter()
        self.control.begin()
        microbatches = next(stream)
        data_s = time.perf_counter() - began
        loss = self._forward_backward(microbatches)
        self._flush()
        rate = learning_rate(self.progress.step, self.config.optim, self.config.steps)
        set_learning_rate(self.optimizer, rate)
        grad_norm = self._clip()
        self.checkpoints.before_update()
        self._update()
        self.progress = Progress(self.progress.step + 1, self.progress.samples + self.config.data.global_batch)
        if first:
            for group in (None, self.control.group):
                _set_pg_timeout(timedelta(seconds=self.config.elastic.step_timeout_s), group)
        asked = self.control.agreed()
        scale = self.scaler.get_scale() if self.scaler is not None else None
        stalled, self.checkpoints.stall_s = self.checkpoints.stall_s, 0.0
        now = time.perf_counter()
        seconds, self._step_ended = now - self._step_ended, now
        self._pending = _Measured(self.progress.step, loss, grad_norm, rate, data_s, stalled, scale, seconds)
        every = self.config.checkpoint.every_steps
        is_last = self.progress.step == self.config.steps
        if not is_last and (asked is not Request.NONE or (every and self.progress.step % every == 0)):
            self._flush()  # a step that is saved has been recorded
            self.checkpoints.save(self.progress, block=asked in (Request.PARK, Request.STOP))
            self.last_save = time.monotonic()
        self.checkpoints.poll()
        self.control.report(self.progress.step, self.checkpoints.committed_step, Phase.TRAINING)
        return Request.NONE if is_last else asked  # whatever was asked, there is nothing left to stop

    def _forward_backward(self, microbatches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Gradients of the mean loss over the step's global batch; returns the loss summed over this rank's tokens.

        FSDP averages gradients over ranks, so each rank's summed loss is scaled by world / global tokens:
        exact also where ranks have unequal numbers of samples.
        """
        total = torch.zeros((), device=self.device)
        scale = self.world / self.tokens_a_step
        for i, (tokens, labels) in enumerate(microbatches):
            last = i == len(microbatches) - 1
            set_gradient_communication(self.model, self.layout, last)
            tokens = tokens.to(self.device, non_blocking=True)
            labels = labels.to(self.device, non_blocking=True)
            logits = self.model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum")
            scaled = loss * scale
            (self.scaler.scale(scaled) if self.scaler is not None else scaled).backward()
            total += loss.detach()
        return total

    def _clip(self) -> Tensor:
        """Clip the gradient's global 2-norm; returns the norm before clipping, the same on every rank."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        most = self.config.optim.grad_clip_norm or float("inf")
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), most)
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).detach()

    def _update(self) -> None:
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _flush(self) -> None:
        """Log the previous step: its numbers have come off the device while this one was computed."""
        measured, self._pending = self._pending, None
        if measured is None or measured.step % self.config.log_every_steps:
            return
        dist.all_reduce(measured.loss)
        loss = float(measured.loss) / self.tokens_a_step
        if self.config.elastic.stop_on_nan_loss and not math.isfinite(loss):
            raise JobFailed(f"the loss of step {measured.step} is {loss}: lower optim.lr, or see what the data holds")
        if self.log is None:
            return
        values = {
            "loss": loss,
            "lr": measured.rate,
            "grad_norm": float(measured.grad_norm),
            "data_s": measured.data_s,
            "checkpoint_stall_s": measured.stall_s,
            "step_s": measured.seconds,
        }
        if measured.scale is not None:
            values["loss_scale"] = measured.scale
        self.log.log(measured.step, self.tokens_a_step, measured.seconds, values)

    def _leave(self, asked: Request) -> int:
        """Finish what is under way and say why this rank ends."""
        self._flush()
        if asked is Request.PARK:
            self.control.report(self.progress.step, self.checkpoints.committed_step, Phase.PARKED)
            while True:  # the agent stops us when the others are parked, too
                time.sleep(1)
        if asked is Request.NONE and self.checkpoints.committed_step != self.progress.step:
            self.checkpoints.save(self.progress, block=True)
        self.checkpoints.close()
        if self.log is not None:
            self.log.close()
        if self.checkpoints.failure is not None:
            raise JobFailed(
                f"{self.checkpoints.failure}. Free space under {self.checkpoints.home} and resume {self.run.name}."
            )
        done = asked is Request.NONE
        self.control.report(self.progress.step, self.checkpoints.committed_step, Phase.DONE if done else Phase.SAVING)
        if done and self.rank == 0:
            events.record(self.run, self.attempt, events.Done(self.progress.step, self.progress.samples))
        return EXIT_DONE if done else EXIT_REQUEUE
