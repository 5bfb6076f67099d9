"""A program whose rank 0 stands still at its fifth step, on a GPU in a kernel of two minutes and more. For gpu.py."""

import time

import torch
import torch.distributed as dist

from fsdp_jobs import job

device = job.init()
for step in range(1, 1001):
    if step == 5 and device.type == "cuda":
        torch.cuda._sleep(1 << 38)  # clock cycles
    elif step == 5:
        time.sleep(120)
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    job.step(step, loss=total.item())
