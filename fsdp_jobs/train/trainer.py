"""The built-in trainer of language models: a program on the library `fsdp_jobs.job`, run by `__main__`."""

from __future__ import annotations

import time

import torch
import torch._dynamo  # FSDP and optimizers import it at their first use, which takes 0.7 s: once here, not in each rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_jobs import job
from fsdp_jobs.checkpoints.state import Hyperparameters
from fsdp_jobs.checkpoints.tensors import local
from fsdp_jobs.config.resolve import param_dtype
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.guards.probe.rank import Probe
from fsdp_jobs.hub.pretrained import load_initial
from fsdp_jobs.job.metrics import flops_per_token
from fsdp_jobs.job.sharding import fill_weights, set_gradient_communication, sharded_model
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.run.verdict import EXIT_DONE, EXIT_REQUEUE
from fsdp_jobs.train.data import batches, check_same_data
from fsdp_jobs.train.loss import TokenLoss
from fsdp_jobs.train.optim import build_optimizer, learning_rate
from fsdp_jobs.train.sources import open_samples


class Learner:
    """A model with its optimizer and gradient scaler, and the parts of one optimizer step.

    A checkpoint or `initialize` gives the model its weights.
    """

    def __init__(self, config: JobConfig, layout: Layout, mesh: DeviceMesh, device: torch.device):
        self.config, self.layout, self.device = config, layout, device
        self.world = dist.get_world_size()
        self.tokens_per_step = config.data.global_batch * config.data.seq_len
        self.model = sharded_model(config, layout, mesh, device)
        self.loss = TokenLoss(self.model, config.fsdp, layout.chunked_loss)
        torch.manual_seed(config.seed * 1_000_003 + dist.get_rank())
        self.optimizer = build_optimizer(self.model, config.optim, config.fsdp.master_dtype)
        is_fp16 = param_dtype(config.fsdp, device.type) == "fp16"
        self.scaler = torch.amp.GradScaler(device.type, enabled=is_fp16)  # disabled, it passes everything on
        self.shard_group = mesh.get_group("shard") if layout.shard_group > 1 else None

    def initialize(self) -> None:
        """Give the model the weights of a new run."""
        fill_weights(self.model, self.config, self.device)
        load_initial(self.model, self.config)

    def backward(self, microbatches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Compute the gradients of the mean loss of the global batch. Returns the loss summed over this rank's tokens.

        FSDP averages gradients over ranks, so each rank's summed loss is scaled by world / global tokens. This
        is exact even if ranks have unequal numbers of samples.
        """
        total = torch.zeros((), device=self.device)
        scale = self.world / self.tokens_per_step
        for i, microbatch in enumerate(microbatches):
            set_gradient_communication(self.model, self.layout, last=i == len(microbatches) - 1)
            loss = self.loss(*(part.to(self.device, non_blocking=True) for part in microbatch))
            self.scaler.scale(loss * scale).backward()
            total += loss.detach()
        return total

    def clip(self) -> Tensor:
        """Clip the gradient's global 2-norm. Returns the norm before clipping, the same on every rank to the bit.

        Reductions may add up the ranks of different shard groups in different orders, and replicas would drift apart.
        So the parts are added in rank order.
        """
        self.scaler.unscale_(self.optimizer)
        parameters, limit = list(self.model.parameters()), self.config.optim.grad_clip_norm
        own = nn.utils.get_total_norm([local(p.grad) for p in parameters if p.grad is not None]).detach()
        square = own.double().square().to(self.device)
        if self.shard_group is not None:
            squares = [torch.empty_like(square) for _ in range(self.shard_group.size())]
            dist.all_gather(squares, square, group=self.shard_group)
            square = torch.stack(squares).sum()
        norm = square.sqrt().float().to(own.device)
        if limit:
            nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm

    def update(self, norm: Tensor) -> None:
        """Apply the gradients, unless their norm is not finite, and clear them. The host does not wait for the norm."""
        if not self.scaler.is_enabled():
            self.optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined] # fused AdamW's switch
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


def main() -> int:
    """Train as one rank. Returns its exit code: 0 when done, 75 after a request to leave."""
    device = job.init()
    config, data = job.config(), job.config().data
    samples = open_samples(data, config.seed)
    check_same_data(samples, data)
    learner = Learner(config, job.layout(), job.mesh(), device)
    probe = Probe(config, learner.model, device, learner.backward)
    model, optimizer, scaler = learner.model, learner.optimizer, learner.scaler
    hyperparameters = Hyperparameters(optimizer)
    configured = hyperparameters.state_dict()
    checkpoints = job.checkpointer(model, optimizer, **({"scaler": scaler} if scaler.is_enabled() else {}))
    done = checkpoints.restore(otherwise=learner.initialize)
    hyperparameters.load_state_dict(configured)  # the configured values, not the checkpoint's
    samples.read_on(checkpoints.stream)
    steps = range(done + 1, config.steps + 1)
    pin = device.type == "cuda"
    stream = batches(samples, data, dist.get_rank(), learner.world, checkpoints.samples, len(steps), pin)
    tokens = learner.tokens_per_step
    flops = flops_per_token(model, config) * tokens
    for number in steps:
        began = time.perf_counter()
        microbatches = next(stream)
        data_s = time.perf_counter() - began
        loss = learner.backward(microbatches)
        if number % config.log_every_steps == 0:
            dist.all_reduce(loss)
        rate = learning_rate(number - 1, config.optim, config.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        grad_norm = learner.clip()
        learner.update(grad_norm)
        if probe.every_steps and number % probe.every_steps == 0:
            probe.run(number, microbatches[0])
        checkpoints.samples += data.global_batch
        checkpoints.stream = samples.mark
        if scaler.is_enabled():
            job.log(loss_scale=scaler.get_scale())
        job.step(
            number,
            tokens=tokens,
            flops=flops,
            last=number == config.steps,
            loss=loss.double() / tokens,
            lr=rate,
            grad_norm=grad_norm,
            data_s=data_s,
        )
        if number == steps[0]:
            job.set_timeout(config.elastic.step_timeout_s)
        if job.should_stop():
            break
    return EXIT_DONE if job.finish() else EXIT_REQUEUE
