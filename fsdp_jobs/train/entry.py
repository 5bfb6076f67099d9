"""A rank's main: process group, device, trainer. What it needs to know is in its environment."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from fsdp_jobs.config.schema import load_config
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import ATTEMPT_ENV, LAYOUT_ENV, ROUND_ENV, RUN_DIR_ENV
from fsdp_jobs.train.device import pick_device
from fsdp_jobs.train.trainer import Trainer


def main() -> int:
    """Train as one rank. Returns its exit code: 0 when done, 75 after a requested stop."""
    run = RunDir(os.environ[RUN_DIR_ENV])
    attempt, round_ = int(os.environ[ATTEMPT_ENV]), os.environ[ROUND_ENV]
    config = load_config(run.config)
    layout = Layout.from_json(os.environ[LAYOUT_ENV])
    device = pick_device(config)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=config.elastic.init_timeout_s))
    exit_code = Trainer(config, run, layout, attempt, f"{attempt}-{round_}", device).train()
    dist.destroy_process_group()
    return exit_code
