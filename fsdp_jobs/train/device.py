"""The device of a rank."""

from __future__ import annotations

import os

import torch

from fsdp_jobs.config.errors import JobFailed
from fsdp_jobs.config.schema import JobConfig


def pick_device(config: JobConfig) -> torch.device:
    """This rank's device: its GPU when the cluster says cuda, or says auto and there is a GPU for every rank.

    Raises:
        JobFailed: the cluster says cuda, and there are not enough GPUs.
    """
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if config.cluster.accelerator == "cuda" and not enough:
        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise JobFailed(
            f"cluster.accelerator=cuda, but this rank's torch {torch.__version__} sees {seen} GPUs for "
            f"{os.environ['LOCAL_WORLD_SIZE']} ranks of its node"
        )
    if config.cluster.accelerator == "cuda" or (config.cluster.accelerator == "auto" and enough):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")
