"""Peak memory of optimizer steps on one GPU: by torch's allocator, by the driver, and planned. For gpu.py.

    python benchmarks/gpu_programs/memory.py '[["model=llama_1b", ...], ...]'

Prints a line of JSON for each list of overrides: bytes, or why there are none. The model, its sharding, the step and
the allocator's settings are the trainer's; tokens are random. The allocator gets no more than is planned for it: how
often it had to free its cache for that is counted.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.schema import HfConfig
from fsdp_jobs.job.sharding import build_mesh
from fsdp_jobs.plan.memory import CUDA_CONTEXT, NCCL_PER_GROUP
from fsdp_jobs.plan.plan import make_plan
from fsdp_jobs.plan.shape_client import probe
from fsdp_jobs.run.processes import free_port
from fsdp_jobs.train.trainer import Learner

STEPS = 3


def peak_by_driver() -> int:
    """Return the most bytes of the device that were in use, by whomever: torch's cache was at its largest."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved() + torch.cuda.max_memory_reserved()


def measure(overrides: list[str], device: torch.device) -> dict[str, Any]:
    """Do a few steps of a configuration, and return the most that they took beside what is planned."""
    config = compose_job(overrides)
    shape = probe(config) if isinstance(config.model, HfConfig) else None
    plan, on_gpu = make_plan(config, shape=shape, seek_remedies=False), device.type == "cuda"
    assert plan.memory is not None
    if not plan.fits:
        return {"too large": plan.memory.total}
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        allocators = plan.memory.total - CUDA_CONTEXT - NCCL_PER_GROUP
        torch.cuda.set_per_process_memory_fraction(min(1.0, allocators / torch.cuda.mem_get_info()[1]))
    retries = _retries() if on_gpu else 0
    left_over = torch.cuda.memory_allocated() if on_gpu else 0
    learner = Learner(config, plan.layout, build_mesh(plan.layout, device.type), device)
    learner.initialize()
    for _ in range(STEPS):
        tokens = torch.randint(config.data.vocab_size, (config.data.micro_batch, config.data.seq_len + 1))
        total = learner.backward([(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())])
        learner.update(learner.clip())
    if not torch.isfinite(total):
        return {"error": f"the loss is {total.item()}"}
    planned = {"planned": plan.memory.total, "reserve": plan.memory.reserve}
    if not on_gpu:
        return planned
    peak = torch.cuda.max_memory_allocated() - left_over
    return {**planned, "torch": peak, "driver": peak_by_driver(), "retries": _retries() - retries, "steps": STEPS}


def _retries() -> int:
    return int(torch.cuda.memory_stats()["num_alloc_retries"])


def main() -> None:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    for overrides in json.loads(sys.argv[1]):
        try:
            found = measure(overrides, device)
        except Exception as e:
            found = {"error": f"{type(e).__name__}: {e}"[:200]}
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
