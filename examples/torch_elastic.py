"""Training in torch elastic's own style: a state that is loaded at each start, saved as one snapshot, and capped by
time. The agents may come and go; nothing in it knows of fsdp_jobs.

    fsdp-jobs script=examples/torch_elastic.py nodes=1:2
    torchrun --nnodes=1:2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 examples/torch_elastic.py
"""

import argparse
import os
import pathlib
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel


@dataclass
class State:
    """All that a restart has to go on with."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    epoch: int = 0
    losses: list[float] = field(default_factory=list)

    def save(self, snapshot: pathlib.Path) -> None:
        content = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epoch": self.epoch,
            "losses": self.losses,
        }
        temporary = snapshot.with_suffix(".tmp")
        torch.save(content, temporary)
        temporary.rename(snapshot)

    def load(self, snapshot: pathlib.Path) -> None:
        if not snapshot.exists():
            return
        content = torch.load(snapshot, map_location="cpu")
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.epoch, self.losses = content["epoch"], content["losses"]


def train_epoch(state: State, samples: torch.Tensor) -> float:
    """Each rank's part of the samples once; returns the mean loss over all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(state.epoch))
    total = torch.zeros(())
    mine = order[rank::world].split(32)
    for picked in mine:
        x = samples[picked]
        loss = nn.functional.mse_loss(state.model(x), x.cos().mean(1, keepdim=True))
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        total += loss.detach() / len(mine)
    dist.all_reduce(total)
    return total.item() / world


@record
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--snapshot", type=pathlib.Path, default="snapshot.pt")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)))
    state = State(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    state.load(args.snapshot)
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    print(f"epoch {state.epoch} of {args.epochs}, {dist.get_world_size()} ranks, restart {restarts}", flush=True)

    samples = torch.randn(1024, 32, generator=torch.Generator().manual_seed(0))
    while state.epoch < args.epochs:
        state.losses.append(train_epoch(state, samples))
        state.epoch += 1
        if dist.get_rank() == 0:
            print(f"epoch {state.epoch} loss {state.losses[-1]:.5f}", flush=True)
            state.save(args.snapshot)
    del state, model  # first: a process group whose last owner is DDP now and then never ends (torch 2.13, gloo)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
