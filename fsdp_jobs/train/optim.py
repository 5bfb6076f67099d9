"""AdamW, also for bf16 weights, and the learning rate as a pure function of the step: no schedule needs saving."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_jobs.checkpoints.tensors import local
from fsdp_jobs.config.schema import OptimConfig


def build_optimizer(model: nn.Module, config: OptimConfig, master_dtype: str) -> torch.optim.AdamW:
    """Build AdamW over two groups: matrices are decayed, vectors (norms, biases) are not.

    It is fused; with `master_dtype=bf16_stochastic` it is `StochasticAdamW`.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    is_stochastic = master_dtype == "bf16_stochastic"
    return (StochasticAdamW if is_stochastic else torch.optim.AdamW)(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=not is_stochastic,
    )


class StochasticAdamW(torch.optim.AdamW):
    """AdamW for bf16 parameters and moments: computed in fp32, then rounded up or down at random, without bias.

    Rounding to nearest loses every update below 2^-9 of a weight. Random numbers depend only on the step and on
    the shard, so that replicas stay equal and a repeated step gives the same weights.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient, as `torch.optim.AdamW` does; none if `found_inf` is set."""
        if bool(getattr(self, "found_inf", False)):
            return None
        for number, group in enumerate(self.param_groups):
            beta1, beta2 = group["betas"]
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] += 1
                count = int(state["step"])
                seed = hash((count, number, index, _shard_of(parameter)))
                generator = torch.Generator(parameter.device).manual_seed(seed)
                stored = [local(t) for t in (parameter, state["exp_avg"], state["exp_avg_sq"])]
                weight, mean, square = (t.float() for t in stored)
                gradient = local(parameter.grad).float()
                mean.lerp_(gradient, 1 - beta1)
                square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                denominator = (square / (1 - beta2**count)).sqrt_().add_(group["eps"])
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1**count))
                for target, exact in zip(stored, (weight, mean, square), strict=True):
                    round_stochastically(target, exact, generator)
        return None


def round_stochastically(target: Tensor, exact: Tensor, generator: torch.Generator) -> None:
    """Write fp32 values into a bf16 tensor: each goes to one of its two neighbours, to the nearer more often.

    bf16 is fp32 without its last 16 bits: a random number below 2^16, added before they are cut, carries into
    the others with a probability proportional to the cut bits.
    """
    noise = torch.randint(0, 1 << 16, exact.shape, dtype=torch.int32, device=exact.device, generator=generator)
    cut = (exact.view(torch.int32) + noise).bitwise_and_(-(1 << 16)).view(torch.float32)
    target.copy_(torch.where(exact.isfinite(), cut, exact))


def _shard_of(parameter: Tensor) -> int:
    """Return which shard of a parameter this rank holds; 0 if it holds all of it."""
    if not isinstance(parameter, DTensor):
        return 0
    dims = [i for i, placement in enumerate(parameter.placements) if placement.is_shard()]
    return parameter.device_mesh.get_local_rank(dims[0]) if dims else 0


def learning_rate(step: int, config: OptimConfig, steps: int) -> float:
    """Return the rate of the 0-based `step`: linear warmup to `lr`, half a cosine to `lr * min_lr_ratio`.

    The cosine ends at `decay_steps`, or at the job's `steps`; it is Loshchilov and Hutter 2017,
    arXiv:1608.03983, without restarts.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    end = config.decay_steps or steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, end - config.warmup_steps))
    low = config.lr * config.min_lr_ratio
    return low + (config.lr - low) * 0.5 * (1.0 + math.cos(math.pi * progress))
