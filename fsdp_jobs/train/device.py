"""The device of a rank."""

from __future__ import annotations

import os

import torch

from fsdp_jobs.config.errors import JobFailed
from fsdp_jobs.config.resolve import accelerator_of_node
from fsdp_jobs.config.schema import JobConfig


def pick_device(config: JobConfig) -> torch.device:
    """This rank's device: its GPU when the cluster says cuda, or says auto and there is a GPU for every rank.

    Raises:
        JobFailed: the cluster says cuda, and there are not enough GPUs.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if accelerator_of_node(config, gpus, ranks) == "cpu":
        return torch.device("cpu")
    if gpus < ranks:
        raise JobFailed(
            f"cluster.accelerator=cuda, but this rank's torch {torch.__version__} sees {gpus} GPUs for "
            f"{ranks} ranks of its node"
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device
