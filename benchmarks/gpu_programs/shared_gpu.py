"""Four ranks on one GPU over gloo, 2 replicas x 2 shards: NCCL refuses ranks that share a device. For gpu.py."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # the launcher hides a GPU that there is not for every rank
torch.cuda.set_device(0)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
fully_shard(model, mesh=init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard")))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(dist.get_rank())
for _step in range(20):
    loss = model(torch.randn(8, 64, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"rank {dist.get_rank()}: loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
