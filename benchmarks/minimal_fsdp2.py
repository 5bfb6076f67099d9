"""The loop one would write by hand: FSDP2 under bare torchrun, nothing else. What our trainer is measured against.

    torchrun --nproc-per-node=2 benchmarks/minimal_fsdp2.py --steps 40

Prints, from rank 0, the seconds of each step as a JSON list.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.models.llama import Llama
from fsdp_jobs.train.data import Samples
from fsdp_jobs.train.sources import open_tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    config = compose_job(args.overrides)
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = Llama(config.model).to(device)  # type: ignore[arg-type]
    mesh = init_device_mesh(device.type, (world,))
    policy = MixedPrecisionPolicy(torch.bfloat16 if cuda else torch.float32, torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard([model.norm, model.output], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
    data = config.data
    samples = Samples(open_tokens(data), data.seq_len, seed=0)
    share = data.global_batch // world
    seconds = []
    for step in range(args.steps):
        began = time.perf_counter()
        first = step * data.global_batch + rank * share
        for i in range(0, share, data.micro_batch):
            model.set_requires_gradient_sync(i + data.micro_batch >= share)
            batch = [samples[first + i + j] for j in range(data.micro_batch)]
            tokens, labels = (torch.stack(t).to(device) for t in zip(*batch, strict=True))
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()) * (data.micro_batch / share)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        print(json.dumps(seconds))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
