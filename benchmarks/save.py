"""What a checkpoint costs: ours against plain DCP and against the disk, and how long the trainer waits.

    python benchmarks/save.py [--saves 5] [--ranks 4] [--only blocking] [--folder DIR] [overrides]

One world of 2 x 2 ranks, hybrid_shard, about 1 GB of state; other worlds by `--ranks` and overrides. In turn, on the
same folder: `dd` with fsync of as many bytes, a blocking `dcp.save` and ours (fsync, manifest, rename), without and
with reading back, `dcp.load` and our restore, from the disk and from the system's cache, `dcp.async_save` and ours
asynchronous: of these the time that the trainer waits, and until it is written. Medians, and the least; the first of
each is left out. Each save is removed before the next. CPU seconds and bytes read (`rchar` of /proc/self/io) are of all
ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

MODEL = ["model.dim=1024", "model.n_layers=6", "model.ffn_dim=2816", "model.vocab_size=256"]
DATA = ["data=synthetic", "data.tokens=100000", "data.workers=0", "data.seq_len=32", "data.global_batch=4"]
JOB = ["nodes=2", "nproc_per_node=2", "fsdp=hybrid_shard", "fsdp.shard_group=2", "data.micro_batch=1", *MODEL, *DATA]

NAMES = {
    "dd": "dd conv=fsync",
    "dcp": "blocking dcp.save",
    "unread": "ours, blocking, checkpoint.read_back=false",
    "ours": "ours, blocking",
    "dcp_disk": "dcp.load, from the disk",
    "ours_disk": "ours, restored from the disk",
    "dcp_cache": "dcp.load, from the cache",
    "ours_cache": "ours, restored from the cache",
    "dcp_stall": "dcp.async_save: the trainer waits",
    "dcp_async": "dcp.async_save, until written",
    "stall": "ours, asynchronous: the trainer waits",
    "ours_async": "ours, asynchronous, until written",
}

LOADS = {"ours_disk": "dcp_disk", "ours_cache": "dcp_cache"}  # rows that are compared with another than the saves


def _spent() -> list[float]:
    """Return CPU seconds and bytes read of this process so far."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return [time.process_time(), float(counts["rchar"])]


def worker(folder: Path, saves: int, only: str | None, overrides: list[str]) -> None:
    """One rank under torchrun; rank 0 prints what was measured."""
    from concurrent.futures import Future

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from fsdp_jobs.checkpoints.catalog import find_checkpoints
    from fsdp_jobs.checkpoints.checkpointer import Checkpointer
    from fsdp_jobs.config.hydra import compose_job, merge_overrides
    from fsdp_jobs.job.sharding import build_mesh
    from fsdp_jobs.plan.plan import make_plan
    from fsdp_jobs.run.directory import RunDir
    from fsdp_jobs.train.sources import open_samples
    from fsdp_jobs.train.trainer import Learner

    config = compose_job(merge_overrides(JOB, overrides))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    run = RunDir(folder / "run")
    samples, layout, rank = open_samples(config.data, config.seed), make_plan(config).layout, dist.get_rank()
    learner = Learner(config, layout, build_mesh(layout, device.type), device)
    learner.initialize()
    checkpoints = Checkpointer(run, config, layout, learner.model, learner.optimizer, {}, device, 0, "bench")
    checkpoints.restore()

    def step(number: int) -> None:
        """As the trainer does it: the state may be staged until just before the update."""
        tokens, labels = samples[number * 4 + rank]
        learner.backward([(tokens[None], labels[None])])
        learner.update(learner.clip())

    plain = dist.new_group(backend="gloo")  # of DCP's thread: the steps' collectives must not meet its own
    step(0)  # gives the optimizer its state
    state_bytes = sum(t.numel() * t.element_size() for t in checkpoints.state.live()[0].values())
    seconds: dict[str, list[float]] = {}
    costs: dict[str, list[list[float]]] = {}
    written = 0

    def timed(what: str, act: Callable[[], object]) -> None:
        """Note the seconds that something takes all ranks, their CPU seconds, and the bytes they read."""
        dist.barrier()
        before, began = _spent(), time.perf_counter()
        act()
        dist.barrier()
        seconds.setdefault(what, []).append(time.perf_counter() - began)
        spent = torch.tensor(_spent(), dtype=torch.float64) - torch.tensor(before, dtype=torch.float64)
        dist.all_reduce(spent)
        costs.setdefault(what, []).append(spent.tolist())

    def remove() -> None:
        """Make room."""
        nonlocal written
        dist.barrier()
        if rank == 0:
            for checkpoint in find_checkpoints(run.checkpoints):
                written = sum(f.stat().st_size for f in checkpoint.iterdir())
                shutil.rmtree(checkpoint)
            shutil.rmtree(folder / "plain", ignore_errors=True)
        dist.barrier()

    def dd() -> None:
        if rank == 0:
            dd = ["dd", "if=/dev/zero", f"of={folder}/dd", "bs=4M", f"count={state_bytes >> 22}", "conv=fsync"]
            subprocess.run(dd, check=True, capture_output=True)

    def load(whose: str, where: Path, act: Callable[[], object]) -> None:
        for file in where.iterdir() if rank == 0 else ():
            with file.open("rb") as f:
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        timed(f"{whose}_disk", act)
        timed(f"{whose}_cache", act)

    def save_blocking(number: int) -> None:
        timed("dd", dd)
        timed("dcp", lambda: dcp.save(checkpoints.state.live()[0], checkpoint_id=folder / "plain"))
        load("dcp", folder / "plain", lambda: dcp.load(checkpoints.state.live()[0], checkpoint_id=folder / "plain"))
        remove()
        for what in ("unread", "ours"):
            checkpoints.config.read_back = what == "ours"
            timed(what, lambda: checkpoints.save(number + (what == "ours"), block=True))  # noqa: B023
            assert checkpoints.failure is None, checkpoints.failure
            if what == "ours":
                load("ours", find_checkpoints(run.checkpoints)[0], checkpoints.restore)
            remove()

    for i in range(saves + 1):
        dist.barrier()
        if only != "asynchronous":
            save_blocking(3 * i + 1)
        if only == "blocking":
            continue
        dist.barrier()
        began = time.perf_counter()
        uploaded = dcp.async_save(checkpoints.state.live()[0], checkpoint_id=folder / "plain", process_group=plain)
        seconds.setdefault("dcp_stall", []).append(time.perf_counter() - began)
        step(2 * i + 1)
        assert isinstance(uploaded, Future)
        uploaded.result()
        dist.barrier()
        seconds.setdefault("dcp_async", []).append(time.perf_counter() - began)
        remove()
        checkpoints.stall_s, began = 0.0, time.perf_counter()
        checkpoints.save(3 * i + 3)
        step(2 * i + 2)
        seconds.setdefault("stall", []).append(checkpoints.stall_s)
        checkpoints.finish()
        dist.barrier()
        seconds.setdefault("ours_async", []).append(time.perf_counter() - began)
        remove()
    if rank == 0:
        medians = {what: statistics.median(values[1:]) for what, values in seconds.items()}
        spent = {what: [statistics.median(v) for v in zip(*values[1:], strict=True)] for what, values in costs.items()}
        least = {what: min(values[1:]) for what, values in seconds.items()}
        print(json.dumps({"state": state_bytes, "written": written, "costs": spent, "least": least, **medians}))
    checkpoints.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--only", choices=("blocking", "asynchronous"))
    parser.add_argument("--json", action="store_true", help="print what was measured as one line of JSON")
    parser.add_argument("--folder", help="on the disk to be measured; default: the one for temporary files")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    if args.worker:
        return worker(args.worker, args.saves, args.only, args.overrides)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        run = ["torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}", __file__, "--worker", folder]
        only = [f"--only={args.only}"] if args.only else []
        command = [sys.executable, "-m", *run, "--saves", str(args.saves), *only, *args.overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        found = json.loads(done.stdout.splitlines()[-1])
    if args.json:
        print(json.dumps(found))
        return None
    state = found["state"]
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {args.ranks} ranks, {state / 1e6:.0f} MB of state")
    base = "dcp_async" if args.only == "asynchronous" else "dcp"
    columns = f"seconds | least | MB/s | against {NAMES[base]}, or dcp.load | CPU s | read / state"
    print(f"| load {os.getloadavg()[0]:.0f} | {columns} |")
    print("|---|---|---|---|---|---|---|")
    for what, name in NAMES.items():
        if what in found:
            speed = f"{state / found[what] / 1e6:.0f}" if "stall" not in what else ""
            against = found[LOADS.get(what, base)]
            cpu_s, read = found["costs"].get(what, (math.nan, math.nan))
            ratio = f"{found[what] / against:.1%}"
            times = f"{found[what]:.3f} | {found['least'][what]:.3f}"
            print(f"| {name} | {times} | {speed} | {ratio} | {cpu_s:.2f} | {read / state:.2f} |")
    print(f"written: {found['written'] / state:.4f} of the state")
    return None


if __name__ == "__main__":
    main()
