"""torch_xla's own FSDP with its own sharded checkpoints, as a job: on TPUs, or on a CPU to try it.

Needs torch_xla, whose newest release is 2.9, and the torch of the same number.

    fsdp-jobs script=examples/torch_xla_fsdp.py cluster=local nodes=1 nproc_per_node=1       # PJRT_DEVICE=CPU
"""

import argparse
import os
import pathlib

os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as Fsdp


def shard_of(folder: pathlib.Path, step: int) -> pathlib.Path:
    return folder / f"step-{step}" / f"rank-{xr.global_ordinal()}-of-{xr.world_size()}.pth"


def save(folder: pathlib.Path, step: int, model: Fsdp, optimizer: torch.optim.Optimizer) -> None:
    file = shard_of(folder, step)
    file.parent.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    xm.save({**state, "shard_metadata": model.get_shard_metadata()}, str(file), master_only=False)
    xm.rendezvous("saved")
    if xr.global_ordinal() == 0:
        (folder / "newest.tmp").write_text(str(step))
        (folder / "newest.tmp").rename(folder / "newest")


def load(folder: pathlib.Path, model: Fsdp, optimizer: torch.optim.Optimizer) -> int:
    if not (folder / "newest").exists():
        return 0
    step = int((folder / "newest").read_text())
    state = torch.load(shard_of(folder, step), map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--checkpoints", type=pathlib.Path, default="xla-checkpoints")
    args = parser.parse_args()

    device = torch_xla.device()
    print(f"rank {os.environ['RANK']}: XLA's {xr.global_ordinal()} of {xr.world_size()} on {device}", flush=True)
    torch.manual_seed(0)
    layers = [Fsdp(nn.Sequential(nn.Linear(64, 64), nn.ReLU())) for _ in range(4)]
    model = Fsdp(nn.Sequential(*layers, nn.Linear(64, 1)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = load(args.checkpoints, model, optimizer)
    for step in range(first + 1, args.steps + 1):
        torch.manual_seed(step * xr.world_size() + xr.global_ordinal())
        x = torch.randn(16, 64)
        loss = nn.functional.mse_loss(model(x.to(device)), x.sin().sum(1, keepdim=True).to(device))
        loss.backward()
        optimizer.step()  # not xm.optimizer_step: FSDP has reduced the gradients
        optimizer.zero_grad()
        torch_xla.sync()
        print(f"step {step} loss {loss.item():.4f}", flush=True)
        if step % args.save_every == 0:
            save(args.checkpoints, step, model, optimizer)


if __name__ == "__main__":
    main()
