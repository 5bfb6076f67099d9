"""What a checkpoint costs: ours against plain DCP and against the disk, and how long the trainer waits.

    python benchmarks/save.py [--saves 5] [--ranks 4] [--only-asynchronous] [--folder DIR] [overrides]

One world of 2 x 2 ranks, hybrid_shard, about 1 GB of state; other worlds by `--ranks` and overrides. In turn, on the
same folder: `dd` with fsync of as many bytes, a blocking `dcp.save`, ours blocking (fsync, read back, manifest,
rename), `dcp.async_save` and ours asynchronous: of these the time that the trainer waits, and until it is written.
Medians; the first of each is left out. Each save is removed before the next begins.
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

NAMES = {
    "dd": "dd conv=fsync",
    "dcp": "blocking dcp.save",
    "ours": "ours, blocking",
    "dcp_stall": "dcp.async_save: the trainer waits",
    "dcp_async": "dcp.async_save, until written",
    "stall": "ours, asynchronous: the trainer waits",
    "ours_async": "ours, asynchronous, until written",
}


def worker(folder: Path, saves: int, blocking: bool, overrides: list[str]) -> None:
    """One rank under torchrun; rank 0 prints what was measured."""
    from concurrent.futures import Future

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from fsdp_jobs.checkpoints.catalog import find_checkpoints
    from fsdp_jobs.checkpoints.checkpointer import Checkpointer
    from fsdp_jobs.config.hydra import compose_job, merge_overrides
    from fsdp_jobs.plan.plan import make_plan
    from fsdp_jobs.run.directory import RunDir
    from fsdp_jobs.train.sharding import build_mesh
    from fsdp_jobs.train.sources import open_samples
    from fsdp_jobs.train.trainer import Learner

    config = compose_job(merge_overrides(JOB, overrides))
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
    seconds: dict[str, list[float]] = {}
    written = 0

    def timed(what: str, began: float) -> None:
        """Note the seconds since `began`, and make room."""
        nonlocal written
        seconds.setdefault(what, []).append(time.perf_counter() - began)
        dist.barrier()
        if rank == 0:
            for checkpoint in find_checkpoints(run.checkpoints):
                written = sum(f.stat().st_size for f in checkpoint.iterdir())
                shutil.rmtree(checkpoint)
            shutil.rmtree(folder / "plain", ignore_errors=True)
        dist.barrier()

    def save_blocking(number: int) -> None:
        began = time.perf_counter()
        if rank == 0:
            dd = ["dd", "if=/dev/zero", f"of={folder}/dd", "bs=4M", f"count={state_bytes >> 22}", "conv=fsync"]
            subprocess.run(dd, check=True, capture_output=True)
        dist.barrier()
        timed("dd", began)
        began = time.perf_counter()
        dcp.save(checkpoints.state.live()[0], checkpoint_id=folder / "plain")
        timed("dcp", began)
        began = time.perf_counter()
        checkpoints.save(number, block=True)
        timed("ours", began)

    for i in range(saves + 1):
        dist.barrier()
        if blocking:
            save_blocking(2 * i + 1)
        began = time.perf_counter()
        uploaded = dcp.async_save(checkpoints.state.live()[0], checkpoint_id=folder / "plain")
        seconds.setdefault("dcp_stall", []).append(time.perf_counter() - began)
        step(2 * i + 1)
        assert isinstance(uploaded, Future)
        uploaded.result()
        timed("dcp_async", began)
        checkpoints.stall_s, began = 0.0, time.perf_counter()
        checkpoints.save(2 * i + 2)
        step(2 * i + 2)
        seconds.setdefault("stall", []).append(checkpoints.stall_s)
        checkpoints.finish()
        timed("ours_async", began)
    if rank == 0:
        medians = {what: statistics.median(values[1:]) for what, values in seconds.items()}
        print(json.dumps({"state": state_bytes, "written": written, **medians}))
    checkpoints.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--only-asynchronous", action="store_true")
    parser.add_argument("--json", action="store_true", help="print what was measured as one line of JSON")
    parser.add_argument("--folder", help="on the disk to be measured; default: the one for temporary files")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    if args.worker:
        return worker(args.worker, args.saves, not args.only_asynchronous, args.overrides)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        run = ["torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}", __file__, "--worker", folder]
        asynchronous = ["--only-asynchronous"] * args.only_asynchronous
        command = [sys.executable, "-m", *run, "--saves", str(args.saves), *asynchronous, *args.overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        found = json.loads(done.stdout.splitlines()[-1])
    if args.json:
        print(json.dumps(found))
        return None
    state = found["state"]
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {args.ranks} ranks, {state / 1e6:.0f} MB of state")
    base = "dcp_async" if args.only_asynchronous else "dcp"
    print(f"| | seconds | MB/s | against {NAMES[base]} |")
    print("|---|---|---|---|")
    for what, name in NAMES.items():
        if what in found:
            speed = f"{state / found[what] / 1e6:.0f}" if "stall" not in what else ""
            print(f"| {name} | {found[what]:.3f} | {speed} | {found[what] / found[base]:.1%} |")
    print(f"written: {found['written'] / state:.4f} of the state")
    return None


if __name__ == "__main__":
    main()
