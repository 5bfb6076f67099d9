"""A program around FSDP1 (FullyShardedDataParallel) with fsdp_jobs' small library: sharded as planned, resumed.

The plan's groups come as a mesh, and the checkpointer saves and loads what FSDP1 has sharded, on any number of ranks.

    fsdp-jobs script=examples/fsdp1_library.py nodes=2 fsdp=hybrid_shard
    torchrun --nproc-per-node=2 examples/fsdp1_library.py
"""

import argparse
import functools

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, TensorDataset

from fsdp_jobs import job

STRATEGIES = {  # fsdp= by the names of FSDP1
    "full_shard": ShardingStrategy.FULL_SHARD,
    "shard_grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "no_shard": ShardingStrategy.NO_SHARD,
    "hybrid_shard": ShardingStrategy.HYBRID_SHARD,
    "hybrid_shard_zero2": ShardingStrategy._HYBRID_SHARD_ZERO2,
}


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    device = job.init()
    torch.manual_seed(0)
    inputs = torch.randn(4096, 64)
    data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))

    model = FullyShardedDataParallel(
        nn.Sequential(*(Block(64) for _ in range(4)), nn.Linear(64, 1)),
        device_mesh=job.mesh(),
        sharding_strategy=STRATEGIES[job.layout().strategy],
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        device_id=device,
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoints = job.checkpointer(model, optimizer)
    first = checkpoints.restore()

    order = job.ElasticSampler(data, batch=64).after(first)
    loader = DataLoader(data, batch_sampler=order, generator=order.generator)  # else it draws from the restored one
    for number, (x, y) in zip(range(first + 1, args.steps + 1), loader, strict=False):
        loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.step(number, loss=loss)
        if job.should_stop():
            break
    job.finish()


if __name__ == "__main__":
    main()
