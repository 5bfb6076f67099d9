"""The library for training programs: `from fsdp_jobs import job`. docs/guides/library.md shows each name in use.

The same program runs under `fsdp-jobs script=...`, under plain torchrun, and by itself, on CPU or GPU: without a
launcher there is one shard group, checkpoints go to `runs/<program>/`, and metrics to stdout. The built-in trainer,
train/trainer.py, is such a program.

Every rank calls every function, in the same order; `log`, `config`, `device` and `layout` may be called by one rank.
"""

from __future__ import annotations

import math
import operator
import os
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from fsdp_jobs.checkpoints.checkpointer import Checkpointer
from fsdp_jobs.checkpoints.ranks import Ranks
from fsdp_jobs.config import torch_version
from fsdp_jobs.config.errors import JobFailed
from fsdp_jobs.config.resolve import accelerator_of_node
from fsdp_jobs.config.schema import JobConfig, NoModelConfig, load_config
from fsdp_jobs.job import sharding
from fsdp_jobs.job.metrics import MetricsLog
from fsdp_jobs.job.sampler import ElasticSampler, begin_worker
from fsdp_jobs.job.timer import StepTimer
from fsdp_jobs.models.build import find_blocks
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import ATTEMPT_ENV, LAYOUT_ENV, RANK_STATE_ENV, ROUND_ENV, RUN_DIR_ENV
from fsdp_jobs.run.processes import age_s, free_port
from fsdp_jobs.run.rank_state import SAVES_NOTHING, Phase, RankState, Request
from fsdp_jobs.run.term import job_time

__all__ = ["Checkpointer", "ElasticSampler", "begin_worker", "checkpointer", "config", "device", "finish", "init"]
__all__ += ["layout", "log", "mesh", "set_timeout", "shard", "should_stop", "step"]

Value = float | Tensor


@dataclass
class _Line:
    """A step's line of the metrics; the GPU may still be copying its values."""

    step: int
    done_at: float  # seconds since 1970
    tokens: int
    flops: float
    seconds: float
    stall_s: float
    values: dict[str, Value]
    copied: torch.cuda.Event | None


class _Job:
    """This rank's part of the job."""

    def __init__(self) -> None:
        self.imports_s, began = age_s(), time.monotonic()
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        env = os.environ
        env |= alone | env  # variables that are set keep their values
        self.launched = LAYOUT_ENV in env
        if self.launched:
            self.run = RunDir(env[RUN_DIR_ENV])
            self.config = load_config(self.run.config)
        else:
            self.run = RunDir(Path("runs") / Path(sys.argv[0] or "program").stem)
            self.config = JobConfig(script=sys.argv[0], model=NoModelConfig())
        self.device = _pick_device(self.config)
        self.owns_group = not dist.is_initialized()
        if self.owns_group:
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=self.config.elastic.init_timeout_s))
        self.rank, world = dist.get_rank(), dist.get_world_size()
        self.layout = Layout.from_json(env[LAYOUT_ENV]) if self.launched else Layout("full_shard", world, world)
        self.attempt = int(env.get(ATTEMPT_ENV, "0"))
        unique = f"{self.attempt}-{env[ROUND_ENV]}" if self.launched else uuid.uuid4().hex
        self.restart = Ranks().from_rank_0(lambda: unique)
        self.mesh: DeviceMesh | None = None
        self.checkpoints: Checkpointer | None = None
        has_metrics = self.launched and self.rank == 0
        self.metrics = MetricsLog(self.run, self.attempt, self.config, self.device) if has_metrics else None
        folder = env.get(RANK_STATE_ENV)
        self.rank_state = RankState(folder, int(env["LOCAL_RANK"])) if folder else None
        self.stepped_at = time.monotonic()
        self.group_s = self.stepped_at - began
        self.done = 0
        self.skipped = 0  # steps in a row without an update
        self.request = Request.NONE  # agreed by all ranks
        self.was_signalled = False
        self.values: dict[str, Value] = {}  # for the next step's line
        self.line: _Line | None = None  # of the newest step
        self.timer = StepTimer(self.device)
        self.report(Phase.STARTING)
        self.agreement_group = dist.new_group(backend="gloo")
        self.begin_agreement()

    def begin_agreement(self) -> None:
        """Begin to exchange requests; `agreed` returns the result. The step in between does not wait for it."""
        is_overdue = self.checkpoints is not None and self.checkpoints.is_overdue()
        request = Request.STOP if self.was_signalled else Request.SAVE if is_overdue else Request.NONE
        if self.rank_state is not None:
            request = max(request, self.rank_state.requested())
            if request is Request.SAVE:
                self.rank_state.request(Request.NONE)  # served once; other requests stay until the ranks have ended
        self._words = torch.tensor([request, int(self.timer.compute_s * 1e6)], device="cpu")  # and its own time, µs
        self._agreeing = dist.all_reduce(self._words, dist.ReduceOp.MAX, group=self.agreement_group, async_op=True)

    def agreed(self) -> tuple[Request, float]:
        """Return the highest of all ranks' requests, and the longest of their own times in seconds."""
        self._agreeing.wait()
        request, microseconds = self._words.tolist()
        return Request(request), microseconds / 1e6

    def on_signal(self, *_signal: object) -> None:
        self.was_signalled = True

    def on_restored(self, step: int) -> None:
        joined_at, self.stepped_at, self.done = self.stepped_at, time.monotonic(), step
        if self.metrics is not None:
            self.metrics.steps.resume(step, job_time())
            spent = (self.imports_s, self.group_s, self.stepped_at - joined_at)
            events.record(self.run, self.attempt, events.TrainingBegun(*(round(s, 3) for s in spent)))
        self.report(Phase.STARTING)

    def report(self, phase: Phase) -> None:
        """Report this rank's progress to its node's agent."""
        if self.rank_state is not None:
            committed = self.checkpoints.safe_step if self.checkpoints is not None else SAVES_NOTHING
            self.rank_state.report(self.done, committed, phase)
            self.rank_state.report_times(self.timer.sums)

    def write_line(self) -> None:
        """Write the newest step's line, if it is not yet written.

        Raises:
            JobFailed: the loss is not finite, and `elastic.stop_on_nan_loss` is set; or too many steps had no update.
        """
        line, self.line = self.line, None
        if line is None:
            return
        if line.copied is not None:
            line.copied.synchronize()
        values = {name: float(value) for name, value in line.values.items()}
        self._count_skipped(line.step, values.get("grad_norm", 0.0))
        if line.step % self.config.log_every_steps:
            return
        if self.skipped:
            values["skipped_updates"] = self.skipped
        loss = values.get("loss", 0.0)
        if self.config.elastic.stop_on_nan_loss and not math.isfinite(loss):
            raise JobFailed(f"the loss of step {line.step} is {loss}: lower optim.lr, or check the data")
        if self.metrics is not None:
            values |= {"step_s": line.seconds, "checkpoint_stall_s": line.stall_s}
            self.metrics.log(line.step, line.done_at, line.tokens, line.flops, values)
        elif self.rank == 0:
            shown = [f"{name} {value:.6g}" for name, value in values.items()]
            print(f"step {line.step}", *shown, f"seconds {line.seconds:.3g}", sep="  ", flush=True)

    def _count_skipped(self, step: int, norm: float) -> None:
        """Count the steps in a row whose gradient norm is not finite, so that there was no update.

        Raises:
            JobFailed: there are as many as `elastic.max_skipped_updates`.
        """
        self.skipped = 0 if math.isfinite(norm) else self.skipped + 1
        if 0 < self.config.elastic.max_skipped_updates == self.skipped:
            newest = self.checkpoints.committed_step if self.checkpoints is not None else -1
            good = f"the newest finite checkpoint is of step {newest}" if newest >= 0 else "there is no checkpoint yet"
            raise JobFailed(
                f"the gradient norm of step {step} is {norm}, and {self.skipped} steps in a row had no update: "
                f"lower optim.lr, or check the data; {good}"
            )

    @property
    def is_leaving(self) -> bool:
        return self.request in (Request.PARK, Request.STOP)


def _pick_device(config: JobConfig) -> torch.device:
    """Return this rank's GPU, or the CPU.

    Raises:
        JobFailed: the accelerator is cuda, but there are not enough GPUs.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if accelerator_of_node(config, gpus, ranks) == "cpu":
        return torch.device("cpu")
    if gpus < ranks:
        raise JobFailed(
            f"cluster.accelerator=cuda, but this rank's torch {torch.__version__} sees {gpus} GPUs for "
            f"{ranks} ranks of its node"
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


_job: _Job | None = None
_is_over = False


def _the_job() -> _Job:
    if _job is None:
        raise RuntimeError("call job.init() first")
    return _job


def init() -> torch.device:
    """Join the other ranks: process group, device, connection to the agent. Returns the device.

    A process group that the program has made itself is used as it is. Without a launcher, SIGTERM and SIGUSR1 are
    requests to leave, which `should_stop` returns.

    Raises:
        JobFailed: the accelerator is cuda, but there are not enough GPUs; or `finish` has ended the process group.
    """
    global _job
    if _is_over:
        raise JobFailed("job.init() after job.finish(): call finish() once, at the end, or submit a job per training")
    if _job is None:
        _job = _Job()
        if not _job.launched:
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, _job.on_signal)
        elif signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent also got it, and asks all ranks to save
    return _job.device


def device() -> torch.device:
    """Return this rank's device: its GPU, or the CPU."""
    return _the_job().device


def config() -> JobConfig:
    """Return the job's configuration; without a launcher, the defaults."""
    return _the_job().config


def layout() -> Layout:
    """Return the plan's layout: strategy, ranks per shard group, replicas."""
    return _the_job().layout


def mesh() -> DeviceMesh:
    """Return the plan's device mesh, `shard` or `replicate` and `shard`, over ranks in network order."""
    job = _the_job()
    if job.mesh is None:
        job.mesh = sharding.build_mesh(job.layout, job.device.type)
    return job.mesh


def shard(model: nn.Module, blocks: Sequence[type[nn.Module]] = ()) -> nn.Module:
    """Apply FSDP2 to a model as the job's `fsdp` group says: strategy, precision, checkpointing, offload, compile.

    All ranks begin with rank 0's weights. The caller fills a model on the meta device afterwards.

    Args:
        model: whole, and the same on every rank.
        blocks: classes of its layers; by default those that a model of transformers names, and in any other model the
            members of its module lists.

    Raises:
        ValueError: no module is of these classes.
    """
    job = _the_job()
    if not any(p.is_meta for p in model.parameters()):
        sharding.make_equal(model, job.agreement_group)
    fsdp = job.config.fsdp
    units = find_blocks(model, job.config.model, fsdp, [b.__name__ for b in blocks])
    sharding.shard(model, units, fsdp, job.layout, mesh(), job.device)
    return model


def checkpointer(model: nn.Module, optimizer: torch.optim.Optimizer, **others: Stateful) -> Checkpointer:
    """Return one object that saves and restores them all; `step` uses it when a save is due.

    Args:
        others: objects with `state_dict` and `load_state_dict` of plain values, the same on every rank.

    Raises:
        TypeError: one of the others is a module, whose tensors may be sharded, or a data loader, whose position
            differs between ranks, or has no state_dict; or model or optimizer hold what cannot be saved.
        RuntimeError: there is one already.
    """
    one = "put several networks into one nn.Module, with one optimizer"
    for name, other in others.items():
        what = f"{name} is a {type(other).__name__}"
        if isinstance(other, nn.Module | torch.optim.Optimizer):
            raise TypeError(f"{what}, and a job saves one model and one optimizer: {one}")
        of_nodes = any(kind.__module__.startswith("torchdata.nodes") for kind in type(other).__mro__)
        if isinstance(other, DataLoader) or of_nodes:
            cure = "begin it at a step with job.ElasticSampler, or save the position of a stream that all read"
            raise TypeError(f"{what}, whose state fits one rank and one world size: {cure}")
        if not isinstance(other, Stateful):
            raise TypeError(f"{what} without state_dict and load_state_dict")
    job = _the_job()
    if job.checkpoints is not None:
        raise RuntimeError(f"a job has one checkpointer: {one}")
    job.timer.watch(model)
    of_job = (job.device, job.attempt, job.restart, job.on_restored, job.report)
    job.checkpoints = Checkpointer(job.run, job.config, job.layout, model, optimizer, others, *of_job)
    return job.checkpoints


def set_timeout(seconds: float) -> None:
    """Set the timeout of all further collectives: one that a rank has not joined by then fails.

    At first it is `elastic.init_timeout_s`.
    """
    for group in (None, _the_job().agreement_group):
        torch_version.set_timeout(timedelta(seconds=seconds), group)


def log(*words: object, **values: Value) -> None:
    """Print the words on rank 0, and add the values to the line of the next `step`."""
    job = _the_job()
    if words and job.rank == 0:
        print(*words, flush=True)
    job.values |= _on_host(values)


def _on_host(values: dict[str, Value]) -> dict[str, Value]:
    """Begin to copy values that are on a GPU to the host."""
    for name, value in values.items():
        if not _is_number(value):
            raise TypeError(f"{name}={value!r} is not a number: metrics have numbers, and tensors of one element")
    return {
        name: value.detach().to("cpu", non_blocking=True, copy=True) if isinstance(value, Tensor) else value
        for name, value in values.items()
    }


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def step(number: int, *, tokens: int = 0, flops: float = 0.0, last: bool = False, **values: Value) -> None:
    """End an optimizer step: write a metrics line, report progress to the agent, and save if a save is due.

    With a `checkpointer`, saves as `checkpoint.every_steps` and `every_minutes` say, on request, and before it leaves.
    Values on a GPU are read, and the line is written, a step later: by then they have been copied, so nothing waits
    for them.

    Args:
        number: steps done, this one included; NumPy's integers are taken, too.
        tokens: of the step over all ranks, for the speed.
        flops: of the step over all ranks, for the MFU.
        last: only `finish` follows, even if the job was asked to leave.
        values: of rank 0, for the metrics; reports and sweeps compare `loss`. A `grad_norm` is the same on every rank;
            steps where it is not finite count as steps without an update.

    Raises:
        JobFailed: a logged loss is not finite, and `elastic.stop_on_nan_loss` is set; or the gradient norm was not
            finite for `elastic.max_skipped_updates` steps in a row.
        TypeError: `number` is not an integer, or a value is not a number.
    """
    job = _the_job()
    checkpoints = job.checkpoints
    job.done = number = operator.index(number)
    agreed, slowest_s = job.agreed()
    job.request = Request.NONE if last else max(job.request, agreed)
    now = time.monotonic()
    seconds, job.stepped_at = max(now - job.stepped_at, 1e-9), now
    stall_s = 0.0
    if checkpoints is not None:
        checkpoints.poll()
        stall_s, snapshot_s = checkpoints.take_stall()
        if snapshot_s:
            job.values["snapshot_s"] = snapshot_s
    job.write_line()
    data_s = values.get("data_s", 0.0)
    job.timer.end_step(seconds, data_s if isinstance(data_s, float) else 0.0, stall_s, slowest_s)
    all_values, job.values = _on_host(values) | job.values, {}
    copied = torch.cuda.current_stream().record_event() if job.device.type == "cuda" else None
    job.line = _Line(number, job_time(), tokens, flops, seconds, stall_s, all_values, copied)
    if checkpoints is not None:
        is_end = last or job.is_leaving
        if not last and (job.request is not Request.NONE or checkpoints.is_due(number)):
            job.write_line()  # before the save: a saved step has its line
            checkpoints.save(number, block=job.is_leaving)
        if not is_end:
            checkpoints.snapshot(number, record=job.write_line)  # before the snapshot
        checkpoints.watch(number, is_end)
    if job.request is Request.SAVE:
        job.request = Request.NONE
    job.report(Phase.LEAVING if job.is_leaving else Phase.TRAINING)
    job.begin_agreement()


def should_stop() -> bool:
    """Whether the job has to leave, as all ranks agreed in the newest `step`.

    Reasons are a time limit, a preemption, `cancel`, or nodes that join or leave. The checkpointer has saved by then; a
    program that saves by itself does so now.
    """
    return _the_job().is_leaving


def finish() -> bool:
    """End the training: save the last step, wait until it is written, and leave the process group.

    Returns whether the training is done; False if the job leaves, to continue later.

    Raises:
        JobFailed: the last checkpoint could not be written.
    """
    global _job, _is_over
    job = _the_job()
    if job.checkpoints is not None:
        job.checkpoints.poll()  # also for a snapshot, whose thread writes the line as well
    job.write_line()
    if job.metrics is not None:
        job.metrics.close()
    if job.checkpoints is not None:
        if not job.is_leaving and job.done:
            job.checkpoints.save(job.done, block=True)
        job.report(Phase.ENDING)
        job.checkpoints.close()
    job.agreed()  # all ranks have saved: a rank that leaves now ends the round for the others
    job.report(Phase.LEAVING if job.is_leaving else Phase.DONE)
    if job.rank == 0 and not job.is_leaving:
        samples = job.checkpoints.samples if job.checkpoints is not None else 0
        events.record(job.run, job.attempt, events.Done(job.done, samples))
    _job, _is_over = None, job.owns_group and dist.get_world_size() > 1
    if job.owns_group:
        dist.destroy_process_group()
    return not job.is_leaving
