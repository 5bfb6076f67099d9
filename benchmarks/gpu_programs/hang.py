"""A program whose rank 0 launches a kernel that never ends, at its fifth step. For gpu.py."""

import torch

from fsdp_jobs import job

device = job.init()
for step in range(1, 1001):
    if step == 5:
        torch.cuda._sleep(1 << 62)
    job.step(step, loss=torch.ones(1, device=device).sum().item())
