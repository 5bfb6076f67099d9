"""AdamW, and the learning rate as a pure function of the step: no schedule needs saving."""

from __future__ import annotations

import math

import torch
from torch import nn

from fsdp_jobs.config.schema import OptimConfig


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Build fused AdamW over two groups: matrices are decayed, vectors (norms, biases) are not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


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


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate
