"""What a training program of yours asks of fsdp_jobs: `from fsdp_jobs import job`. docs/library.md shows each name.

The same program runs under `fsdp-jobs script=...`, under plain torchrun, and alone, on CPU or GPU: without a
launcher there is one shard group, checkpoints go to runs/<program>/, and metrics to stdout.

Every function but `log` and `device` is called by every rank.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh

from fsdp_jobs.checkpoints.checkpointer import Checkpointer, Progress, training_digest
from fsdp_jobs.config.errors import JobFailed
from fsdp_jobs.config.schema import JobConfig, NoModelConfig, load_config, training_values
from fsdp_jobs.elastic.rank_state import Phase, Request
from fsdp_jobs.models.build import wrap_classes_of
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import ATTEMPT_ENV, LAYOUT_ENV, ROUND_ENV, RUN_DIR_ENV
from fsdp_jobs.run.processes import free_port
from fsdp_jobs.train import sharding
from fsdp_jobs.train.control import Control
from fsdp_jobs.train.device import pick_device
from fsdp_jobs.train.mesh import build_mesh
from fsdp_jobs.train.metrics import MetricsLog
from fsdp_jobs.train.sampler import ElasticSampler

__all__ = [
    "Checkpoints",
    "ElasticSampler",
    "checkpointer",
    "device",
    "finish",
    "init",
    "log",
    "mesh",
    "shard",
    "should_stop",
    "step",
]


class _Job:
    """This rank's part of the job."""

    def __init__(self) -> None:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for name, value in alone.items():
            os.environ.setdefault(name, value)
        self.launched = LAYOUT_ENV in os.environ
        if self.launched:
            self.run = RunDir(os.environ[RUN_DIR_ENV])
            self.config = load_config(self.run.config)
        else:
            self.run = RunDir(Path("runs") / Path(sys.argv[0] or "program").stem)
            self.config = JobConfig(script=sys.argv[0], model=NoModelConfig())
        self.device = pick_device(self.config)
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=self.config.elastic.init_timeout_s))
        self.rank, world = dist.get_rank(), dist.get_world_size()
        self.layout = Layout("full_shard", world, world)
        life = [uuid.uuid4().hex]
        if self.launched:
            self.layout = Layout.from_json(os.environ[LAYOUT_ENV])
            life = [f"{os.environ[ATTEMPT_ENV]}-{os.environ[ROUND_ENV]}"]
        dist.broadcast_object_list(life, src=0)
        self.attempt, self.life = int(os.environ.get(ATTEMPT_ENV, "0")), life[0]
        self.mesh: DeviceMesh | None = None
        self.checkpoints: Checkpoints | None = None
        self.metrics = MetricsLog(self.run, self.attempt, world, 0.0, 0.0) if self.launched and not self.rank else None
        self.control = Control(self._minutes_are_over)
        self.saved_at = self.stepped_at = time.monotonic()
        self.done = 0
        self.asked = Request.NONE
        self.values: dict[str, float] = {}  # for the next step's line
        self.report(Phase.STARTING)
        self.control.begin()

    def _minutes_are_over(self) -> bool:
        minutes = self.config.checkpoint.every_minutes
        return self.rank == 0 and minutes > 0 and time.monotonic() - self.saved_at >= minutes * 60

    def notice(self, *_signal: object) -> None:
        self.control.noticed = Request.STOP

    def report(self, phase: Phase) -> None:
        committed = self.checkpoints.committed if self.checkpoints is not None else -1
        self.control.report(self.done, committed, phase)

    @property
    def is_leaving(self) -> bool:
        return self.asked in (Request.PARK, Request.STOP)


_job: _Job | None = None


def _the_job() -> _Job:
    if _job is None:
        raise RuntimeError("call job.init() first")
    return _job


def init() -> torch.device:
    """Join the other ranks: process group, this rank's device, and the line to the launcher. Returns the device.

    Without a launcher SIGTERM and SIGUSR1 are taken as a request to leave, which `should_stop` tells.

    Raises:
        JobFailed: the cluster says cuda, and there are not enough GPUs.
    """
    global _job
    if _job is None:
        _job = _Job()
        if not _job.launched:
            signal.signal(signal.SIGTERM, _job.notice)
            signal.signal(signal.SIGUSR1, _job.notice)
    return _job.device


def device() -> torch.device:
    """This rank's device: its GPU, or the CPU."""
    return _the_job().device


def mesh() -> DeviceMesh:
    """The plan's device mesh: `shard`, or `replicate` and `shard`, over ranks in the order of the network."""
    job = _the_job()
    if job.mesh is None:
        job.mesh = build_mesh(job.layout, job.device.type)
    return job.mesh


def shard(model: nn.Module, blocks: Sequence[type[nn.Module]] = ()) -> nn.Module:
    """Apply FSDP2 to a model as the job's `fsdp` group says: strategy, precision, checkpointing, offload.

    All ranks begin with rank 0's weights. A model on the meta device is for the caller to fill afterwards.

    Args:
        model: whole, and the same on every rank.
        blocks: classes of its layers; without them a model of transformers says its own, and of any other the members
            of its module lists are taken.

    Raises:
        ValueError: no module is of these classes.
    """
    job = _the_job()
    if not any(p.is_meta for p in model.parameters()):
        _make_equal(model)
    found = _blocks_of(model, [b.__name__ for b in blocks] or wrap_classes_of(model, job.config.model))
    if blocks and not found:
        raise ValueError(f"the model has no {' and no '.join(b.__name__ for b in blocks)}")
    if job.config.fsdp.wrap != "layer":
        found = sharding.find_blocks(model, job.config.model, job.config.fsdp)
    found = sharding.apply_activation_checkpointing(model, found, job.config.fsdp)
    if job.config.fsdp.compile:
        for block in found:
            block.compile()
    sharding.apply_fsdp(model, found, job.config.fsdp, job.layout, mesh(), job.device)
    return model


def _blocks_of(model: nn.Module, classes: Sequence[str]) -> list[nn.Module]:
    if classes:
        return [m for m in model.modules() if type(m).__name__ in classes]

    def members(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            yield from child.children() if isinstance(child, nn.ModuleList) else members(child)

    return list(members(model))


def _make_equal(model: nn.Module) -> None:
    """Send rank 0's weights and buffers to all, where a few numbers of each say that they differ."""
    tensors = [*model.parameters(), *model.buffers()]
    few = [t.detach().flatten()[:8].double().sum().item() for t in tensors]
    found: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, few)
    if any(other != found[0] for other in found):
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0)


class Checkpoints:
    """Saves and restores a program's state: sharded, verified, the newest few kept. Made by `checkpointer`."""

    def __init__(self, job: _Job, model: nn.Module, optimizer: torch.optim.Optimizer, others: dict[str, Stateful]):
        self._job = job
        digest = training_digest(training_values(job.config))
        others = {"hyperparameters": _Hyperparameters(optimizer), **others}
        self._checkpointer = Checkpointer(
            *(job.run, job.config.checkpoint, job.layout, model, optimizer, None, job.device),
            *(job.attempt, job.life, digest, others),
        )
        optimizer.register_step_pre_hook(lambda *_: self._checkpointer.before_update())
        self.every_steps = job.config.checkpoint.every_steps

    @property
    def committed(self) -> int:
        """The step of the newest checkpoint, -1 when there is none."""
        return self._checkpointer.committed_step

    def restore(self) -> int:
        """Load the newest checkpoint that is whole. Returns its step, 0 when there is none.

        Raises:
            JobFailed: it is of another model.
        """
        job = self._job
        progress = self._checkpointer.resume() or Progress()
        job.done = progress.step
        if progress.step and job.rank == 0:
            world = dist.get_world_size()
            resumed = events.Resumed(progress.step, progress.samples, world, self._checkpointer.loaded_from)
            events.record(job.run, job.attempt, resumed)
            print(f"resumed from step {progress.step} on {world} ranks", flush=True)
        job.report(Phase.STARTING)
        job.stepped_at = time.monotonic()
        return progress.step

    def save(self, number: int, block: bool = False) -> None:
        """Save the state after `number` steps: written while the next ones run or, with `block`, before this returns.

        A save that fails is told and leaves the one before it.
        """
        self._checkpointer.finish()
        if self.committed != number:
            self._checkpointer.save(Progress(number), block=block)
        self._job.saved_at = time.monotonic()

    def _poll(self) -> float:
        """Take note of saves that have ended. Returns the seconds that steps have waited for saves since last time."""
        self._checkpointer.poll()
        stalled, self._checkpointer.stall_s = self._checkpointer.stall_s, 0.0
        return stalled

    def _close(self) -> None:
        self._checkpointer.close()
        if self._checkpointer.failure is not None:
            raise JobFailed(self._checkpointer.failure)


class _Hyperparameters:
    """What an optimizer's groups hold beside their parameters: schedulers compute the next rate from the last."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return {"groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for group, saved in zip(self.optimizer.param_groups, state["groups"], strict=True):
            group.update(saved)


def checkpointer(model: nn.Module, optimizer: torch.optim.Optimizer, **others: Stateful) -> Checkpoints:
    """One object that saves and restores them all, and that `step` uses when it is time to.

    Args:
        others: whatever has `state_dict` and `load_state_dict` of plain values, the same on every rank.

    Raises:
        TypeError: one of the others is a module, whose tensors may be sharded, or has no state_dict.
    """
    for name, other in others.items():
        if isinstance(other, nn.Module | torch.optim.Optimizer):
            raise TypeError(f"{name} is a {type(other).__name__}: only one model and one optimizer can be saved")
        if not isinstance(other, Stateful):
            raise TypeError(f"{name} is a {type(other).__name__} without state_dict and load_state_dict")
    job = _the_job()
    job.checkpoints = Checkpoints(job, model, optimizer, others)
    return job.checkpoints


def log(*words: object, **values: float | torch.Tensor) -> None:
    """Rank 0 prints the words; the values go into the line of the next `step`."""
    job = _the_job()
    if words and job.rank == 0:
        print(*words, flush=True)
    job.values |= _plain(values)


def _plain(values: dict[str, float | torch.Tensor]) -> dict[str, float]:
    return {name: float(v.detach() if isinstance(v, torch.Tensor) else v) for name, v in values.items()}


def step(number: int, *, tokens: int = 0, **values: float | torch.Tensor) -> None:
    """The end of an optimizer step: a line in the metrics, a sign of life, and a save when it is time to.

    Saves every `checkpoint.every_steps` steps, on request, and before the job leaves, if there is a `checkpointer`.

    Args:
        number: steps done, this one included.
        tokens: of the step over all ranks, for the speed.
        values: of rank 0, for the metrics; `loss` is what reports and sweeps look at.
    """
    job = _the_job()
    job.values = _plain(values) | job.values
    job.asked = max(job.asked, job.control.agreed())
    job.done = number
    now = time.monotonic()
    seconds, job.stepped_at = now - job.stepped_at, now
    stalled = job.checkpoints._poll() if job.checkpoints is not None else 0.0
    _write_line(job, number, tokens, max(seconds, 1e-9), stalled)
    if job.checkpoints is not None:
        every = job.checkpoints.every_steps
        if job.asked is not Request.NONE or (every and number % every == 0):
            job.checkpoints.save(number, block=job.is_leaving)
    if job.asked is Request.SAVE:
        job.asked = Request.NONE
    job.report(Phase.LEAVING if job.is_leaving else Phase.TRAINING)
    job.control.begin()


def _write_line(job: _Job, number: int, tokens: int, seconds: float, stalled: float) -> None:
    values, job.values = job.values, {}
    if job.metrics is not None and number % job.config.log_every_steps == 0:
        job.metrics.log(number, tokens, seconds, {**values, "step_s": seconds, "checkpoint_stall_s": stalled})
    elif job.rank == 0 and not job.launched:
        told = itertools.chain(((k, f"{v:.6g}") for k, v in values.items()), [("seconds", f"{seconds:.3g}")])
        print(f"step {number}", *(f"{k} {v}" for k, v in told), sep="  ", flush=True)


def should_stop() -> bool:
    """Whether the job has to leave, as all ranks agreed in the newest `step`: a time limit, a preemption, `cancel`, or
    nodes that want to join. What the checkpointer has is saved; a program that saves by itself does so now."""
    return _the_job().is_leaving


def finish() -> None:
    """The end of training: saves the last step, waits until it is written, and leaves the process group.

    Raises:
        JobFailed: the last checkpoint could not be written.
    """
    global _job
    job = _the_job()
    if job.checkpoints is not None:
        if not job.is_leaving and job.done:
            job.checkpoints.save(job.done, block=True)
        job.checkpoints._close()
    job.control.agreed()
    job.report(Phase.LEAVING if job.is_leaving else Phase.DONE)
    if job.rank == 0 and not job.is_leaving:
        events.record(job.run, job.attempt, events.Done(job.done, samples=0))
    if job.metrics is not None:
        job.metrics.close()
    dist.destroy_process_group()
    _job = None
