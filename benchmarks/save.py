"""What a checkpoint costs: ours against plain DCP and against the disk, and how long the trainer waits.

    python benchmarks/save.py [--saves 5] [--folder DIR] [overrides]

One world of 2 x 2 ranks, hybrid_shard, about 1 GB of state. In turn, on the same folder: `dd` with fsync of as many
bytes, a blocking `dcp.save`, ours blocking (fsync, read back, manifest, rename), and ours asynchronous, of which the
time counts that the trainer waits. Medians; the first of each is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODEL = ["model.dim=1024", "model.n_layers=6", "model.ffn_dim=2816", "model.vocab_size=256"]
DATA = ["data=synthetic", "data.tokens=100000", "data.workers=0", "data.seq_len=32", "data.global_batch=4"]
JOB = ["nodes=2", "nproc_per_node=2", "fsdp=hybrid_shard", "fsdp.shard_group=2", "data.micro_batch=1", *MODEL, *DATA]


def worker(folder: Path, saves: int, overrides: list[str]) -> None:
    """One rank under torchrun; rank 0 prints what was measured."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from fsdp_jobs.checkpoints.catalog import find_checkpoints
    from fsdp_jobs.checkpoints.checkpointer import Checkpointer
    from fsdp_jobs.config.hydra import compose_job
    from fsdp_jobs.plan.plan import make_plan
    from fsdp_jobs.run.directory import RunDir
    from fsdp_jobs.train.sharding import build_mesh
    from fsdp_jobs.train.sources import open_samples
    from fsdp_jobs.train.trainer import Learner

    config = compose_job([*JOB, *overrides])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    run = RunDir(folder / "run")
    samples, layout, rank = open_samples(config.data, config.seed), make_plan(config).layout, dist.get_rank()
    learner = Learner(config, layout, build_mesh(layout, device.type), device)
    checkpoints = Checkpointer(run, config, layout, learner.model, learner.optimizer, {}, device, 0, "bench")
    checkpoints.restore()

    def step(number: int) -> None:
        """As the trainer does it: the state may be staged until just before the update."""
        tokens, labels = samples[number * 4 + rank]
        learner.backward([(tokens[None], labels[None])])
        learner.update(learner.clip())

    step(0)  # gives the optimizer its state
    state_bytes = sum(t.numel() * t.element_size() for t in checkpoints.state.live()[0].values())
    seconds: dict[str, list[float]] = {"dd": [], "dcp": [], "ours": [], "stall": []}

    def timed(what: str, began: float) -> None:
        seconds[what].append(time.perf_counter() - began)
        dist.barrier()

    for i in range(saves + 1):
        dist.barrier()
        began = time.perf_counter()
        if rank == 0:
            dd = ["dd", "if=/dev/zero", f"of={folder}/dd", "bs=4M", f"count={state_bytes >> 22}", "conv=fsync"]
            subprocess.run(dd, check=True, capture_output=True)
        dist.barrier()
        timed("dd", began)
        began = time.perf_counter()
        dcp.save(checkpoints.state.live()[0], checkpoint_id=folder / f"plain-{i}")
        timed("dcp", began)
        began = time.perf_counter()
        checkpoints.save(2 * i + 1, block=True)
        timed("ours", began)
        checkpoints.stall_s = 0.0
        checkpoints.save(2 * i + 2)
        step(i + 1)
        seconds["stall"].append(checkpoints.stall_s)
        checkpoints.finish()
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder / f"plain-{i}")
    if rank == 0:
        newest = find_checkpoints(run.checkpoints)[0]
        written = sum(f.stat().st_size for f in newest.iterdir())
        medians = {what: statistics.median(values[1:]) for what, values in seconds.items()}
        print(json.dumps({"state": state_bytes, "written": written, **medians}))
    checkpoints.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--folder", help="on the disk to be measured; default: the one for temporary files")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    if args.worker:
        return worker(args.worker, args.saves, args.overrides)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", __file__]
        command += ["--worker", folder, "--saves", str(args.saves), *args.overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        found = json.loads(done.stdout.splitlines()[-1])
    state = found["state"]
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, 4 ranks, {state / 1e6:.0f} MB of state")
    print("| | seconds | MB/s | against dcp.save |")
    print("|---|---|---|---|")
    names = {"dd": "dd conv=fsync", "dcp": "blocking dcp.save", "ours": "ours, blocking", "stall": "ours, asynchronous"}
    for what, name in names.items():
        speed = f"{state / found[what] / 1e6:.0f}" if what != "stall" else ""
        print(f"| {name} | {found[what]:.3f} | {speed} | {found[what] / found['dcp']:.1%} |")
    print(f"written: {found['written'] / state:.4f} of the state")
    return None


if __name__ == "__main__":
    main()
