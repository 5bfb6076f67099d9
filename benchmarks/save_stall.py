"""Under torchrun: how long a trainer waits for an asynchronous save, and for a blocking dcp.save of the same state.

Prints, from rank 0, {"bytes", "blocking_s", "stall_s"}; seconds are medians over alternating saves.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from fsdp_jobs.checkpoints.store import Progress
from fsdp_jobs.compose import compose_job
from fsdp_jobs.planning.plan import make_plan
from fsdp_jobs.run_dir import RunDir
from fsdp_jobs.training.trainer import Trainer

SAVES = 5


def main() -> None:
    config = compose_job([*sys.argv[1:], "data=synthetic", "data.tokens=100000", "data.workers=0"])
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    run = RunDir(shared[0])
    trainer = Trainer(config, run, make_plan(config).layout, 0, "bench", device)
    trainer.checkpoints.resume()
    data = config.data

    def microbatch(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        batch = [trainer.samples[step * data.micro_batch + i] for i in range(data.micro_batch)]
        tokens, labels = (torch.stack(t) for t in zip(*batch, strict=True))
        return [(tokens, labels)]

    def step(number: int) -> None:
        """As the trainer does it: the state may be staged until just before the update."""
        trainer._forward_backward(microbatch(number))
        trainer.checkpoints.before_update()
        trainer._update()

    step(0)  # gives the optimizer its state
    blocking, stalls = [], []
    for i in range(SAVES + 1):
        dist.barrier()
        began = time.perf_counter()
        dcp.save(trainer.checkpoints.live_state(), checkpoint_id=f"{shared[0]}/blocking-{i}")
        seconds = time.perf_counter() - began
        dist.barrier()
        trainer.checkpoints.stall_s = 0.0
        trainer.checkpoints.save(Progress(i + 1, 0))
        step(i + 1)
        stalled = trainer.checkpoints.stall_s
        trainer.checkpoints.finish()
        if i:  # the first of each allocates and plans
            blocking.append(seconds)
            stalls.append(stalled)
    if dist.get_rank() == 0:
        shard_files = Path(shared[0], "blocking-0").iterdir()
        size = sum(f.stat().st_size for f in shard_files)
        found = {"bytes": size, "blocking_s": statistics.median(blocking), "stall_s": statistics.median(stalls)}
        print(json.dumps(found))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(shared[0])
    trainer.checkpoints.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
