"""A plain torchrun program with FSDP2 and a checkpoint of its own: nothing in it knows of fsdp_jobs.

fsdp-jobs script=examples/plain_torchrun.py nodes=2     on any cluster
torchrun --nproc-per-node=2 examples/plain_torchrun.py
"""

import argparse
import os
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def save(folder: pathlib.Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder / f"step-{step}")
    if dist.get_rank() == 0:
        (folder / "newest.tmp").write_text(str(step))
        (folder / "newest.tmp").rename(folder / "newest")


def load(folder: pathlib.Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if not (folder / "newest").exists():
        return 0
    step = int((folder / "newest").read_text())
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder / f"step-{step}")
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")  # each job has checkpoints of its own
    parser.add_argument("--checkpoints", type=pathlib.Path, default=f"plain-checkpoints-{name}")
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    device = torch.device("cuda" if on_gpu else "cpu")

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)), nn.Linear(64, 1)).to(device)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = load(args.checkpoints, model, optimizer)

    for step in range(first + 1, args.steps + 1):
        torch.manual_seed(step * dist.get_world_size() + dist.get_rank())
        x = torch.randn(16, 64, device=device)
        loss = nn.functional.mse_loss(model(x), x.sin().sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if step % args.save_every == 0:
            save(args.checkpoints, step, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
