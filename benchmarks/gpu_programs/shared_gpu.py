"""Four ranks, 2 replicas x 2 shards, that share one GPU over gloo, saved and resumed: NCCL refuses to. For gpu.py."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_jobs import job

os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # the launcher hides a GPU that there is not for every rank
dist.init_process_group("gloo")
kind = "cuda" if torch.cuda.is_available() else "cpu"
if kind == "cuda":
    torch.cuda.set_device(0)
job.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).to(kind)
fully_shard(model, mesh=init_device_mesh(kind, (2, 2), mesh_dim_names=("replicate", "shard")))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
checkpoints = job.checkpointer(model, optimizer)
for step in range(checkpoints.restore() + 1, 61):
    torch.manual_seed(step * dist.get_world_size() + dist.get_rank())
    loss = model(torch.randn(8, 64, device=kind)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    job.step(step, loss=loss)
    if job.should_stop():
        break
job.finish()
