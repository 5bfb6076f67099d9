"""Training with fsdp_jobs' small library: sharding, checkpoints, metrics and preemption in a few lines.

fsdp-jobs script=examples/small_library.py nodes=2      on any cluster
torchrun --nproc-per-node=2 examples/small_library.py   without fsdp_jobs' launchers
python examples/small_library.py                        one process
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fsdp_jobs import job


class Network(nn.Module):
    def __init__(self, width: int = 64, depth: int = 4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    device = job.init()
    torch.manual_seed(0)
    inputs = torch.randn(4096, 64)
    data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))

    model = job.shard(Network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    checkpoints = job.checkpointer(model, optimizer, schedule=schedule)
    first = checkpoints.restore()

    order = job.ElasticSampler(data, batch=64).after(first)
    loader = DataLoader(data, batch_sampler=order, generator=order.generator)  # else it draws from the restored one
    for number, (x, y) in zip(range(first + 1, args.steps + 1), loader, strict=False):
        loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        job.step(number, loss=loss, lr=schedule.get_last_lr()[0])
        if job.should_stop():
            break
    job.finish()


if __name__ == "__main__":
    main()
