"""A rank's main: process group, device, trainer. What it needs to know is in its environment."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from fsdp_jobs.config import JobConfig, load_config
from fsdp_jobs.planning.layout import Layout
from fsdp_jobs.problems import JobFailed
from fsdp_jobs.run_dir import RunDir
from fsdp_jobs.training.trainer import Trainer


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


def main() -> int:
    """Train as one rank. Returns its exit code: 0 when done, 75 after a requested stop."""
    run = RunDir(os.environ["FSDP_JOBS_RUN_DIR"])
    attempt, round_ = int(os.environ["FSDP_JOBS_ATTEMPT"]), os.environ["FSDP_JOBS_ROUND"]
    config = load_config(run.config)
    layout = Layout.from_json(os.environ["FSDP_JOBS_LAYOUT"])
    device = pick_device(config)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=config.elastic.init_timeout_s))
    exit_code = Trainer(config, run, layout, attempt, f"{attempt}-{round_}", device).train()
    dist.destroy_process_group()
    return exit_code
