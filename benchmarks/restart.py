"""Where the seconds of a restart go when the state is large: a rank is killed, and goes on from memory or a disk.

    python benchmarks/restart.py [--layers 64] [--kills 3] [--from memory storage] [overrides]

One node of one rank on this machine, a Llama of 1,024 x LAYERS that hardly computes: 64 layers are 342 million
parameters, and 4.1 GB of fp32 state. Its rank is killed again and again after a snapshot, or a save, of its newest
steps. Each line is one restart, in seconds from `round_started`: until its model stands, of finding, verifying and
loading, and until `resumed`. The goal is 1.5 s and the bytes at 4 GB/s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.snapshots import WAITING
from tests.jobs import Job, cli
from tests.jobs import job as local_job
from tests.world import TINY_TASK

PLACES = {
    "memory": ("checkpoint.every_steps=0", "checkpoint.memory.every_steps=1"),
    "storage": ("checkpoint.every_steps=2", "checkpoint.memory.every_steps=0", "checkpoint.keep=1"),
}
LINK = 4e9  # bytes/s


class Restartable(Protocol):
    """A job that is watched from outside."""

    def until(self, true: Callable[[], Any], what: str) -> None: ...

    def events(self, name: str) -> list[dict[str, Any]]: ...

    def metrics(self) -> list[dict[str, Any]]: ...


def restart(job: Restartable, number: int, kill: Callable[[], None]) -> tuple[float, float]:
    """Kill its rank once it can go on. Returns the seconds of loading, and from the round's start to its end."""
    job.until(lambda: len(job.events("round_started")) > number, "a round")
    begun = job.events("round_started")[-1]["time"]

    def is_kept() -> bool:
        """Whether two later states of this round are kept."""
        snapshots = [m["snapshots"] for m in job.metrics() if m["time"] > begun]
        saves = [e for e in job.events("checkpoint") if e["time"] > begun]
        return len(saves) >= 2 or (bool(snapshots) and snapshots[-1] >= snapshots[0] + 3)

    job.until(is_kept, "a state that is kept")
    kill()
    job.until(lambda: len(job.events("resumed")) > number, "a restart")
    resumed, started = job.events("resumed")[-1], job.events("round_started")[-1]
    return resumed["seconds"], resumed["time"] - started["time"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--from", nargs="*", choices=PLACES, default=[*PLACES], dest="places")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    sized = f"model.kwargs={{seconds: 0.2, dim: 1024, n_layers: {args.layers}}}"
    same = [
        *TINY_TASK,
        *WAITING,
        sized,
        "data.global_batch=1",
        "steps=100000",
        "elastic.max_failures_without_progress=99",
    ]
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}, 1 rank")
    print(f"{'from':<8} {'GB':>5} {'until the model stands':>23} {'loading':>8} {'in all':>7} {'goal':>6}")
    for place in args.places:
        totals = []
        with (
            tempfile.TemporaryDirectory() as folder,
            local_job(
                Path(folder), place, *same, *PLACES[place], *args.overrides, nodes="1", nproc=1, tiny=False
            ) as job,
        ):
            for number in range(args.kills):
                loading, total = restart(job, number, lambda: job.ranks(0)[0].kill())
                totals.append(total)
                size = 12 * _parameters(job)
                row = f"{size / 1e9:>5.2f} {total - loading:>23.2f} {loading:>8.2f} {total:>7.2f}"
                print(f"{place:<8} {row} {1.5 + size / LINK:>6.2f}", flush=True)
            cli(Path(folder), "cancel", place, "--now")  # which frees the memory
        print(f"{place:<8} median {statistics.median(totals):.2f}")


def _parameters(job: Job) -> int:
    return int(json.loads(job.run.plan.read_text())["parameters"])


if __name__ == "__main__":
    main()
