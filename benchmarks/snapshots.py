"""What checkpoints in memory cost: tokens/s with a snapshot every step against the same job without.

    python benchmarks/snapshots.py [--pairs 5] [--steps 60] [--wait 0.4] [overrides]
    python benchmarks/snapshots.py --pairs 2 --wait 0.4 'model.kwargs={seconds: 0.4, dim: 1024, n_layers: 13}'   # 2 GB

Alternating pairs of whole jobs of two nodes on this machine. Each side's figure is the median step after the first
five; with snapshots also the longest of all steps. Two ranks that compute fill two cores, so that whatever agents do is
taken from a rank. With `--wait` the host waits so many seconds in each forward pass, as it does for a GPU, and there is
little to compute besides; the state in a snapshot is the same.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.overhead import WARMUP, ours
from fsdp_jobs.config.schema import LlamaConfig
from fsdp_jobs.models.llama import Llama

WAITING = ["model=custom", "model._target_=benchmarks.snapshots.waiting", "model.wrap_classes=[TransformerBlock]"]
WAITING += ["data.seq_len=16", "data.micro_batch=1", "data.global_batch=2"]
SAME = ["nodes=2", "nproc_per_node=1", "elastic.join_window_s=0"]


class Waiting(Llama):
    """Llama of `model=llama_debug` whose forward pass waits first."""

    def __init__(self, seconds: float, **sizes: int):
        super().__init__(LlamaConfig(**{"n_kv_heads": 4, **sizes}))
        self.seconds = seconds

    def forward(self, tokens: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return super().forward(tokens)


def waiting(seconds: float, **sizes: int) -> nn.Module:
    return Waiting(seconds, **sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--wait", type=float, default=0.0, help="seconds")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    same = [*SAME, *WAITING, f"model.kwargs={{seconds: {args.wait}}}"] if args.wait else SAME
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, 2 nodes of 1 rank, {args.steps} steps a run")
    print(f"{'pair':>4}  {'each step s/step':>16}  {'longest':>8}  {'without s/step':>14}  {'with/without':>13}")
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(args.pairs):
            seconds: dict[int, list[float]] = {}
            for every in (0, 1) if pair % 2 == 0 else (1, 0):
                overrides = [*same, *args.overrides, f"checkpoint.memory.every_steps={every}"]
                seconds[every] = ours(Path(folder), f"pair-{pair}-{every}", args.steps, overrides)
            each, without = (statistics.median(seconds[every][WARMUP:]) for every in (1, 0))
            ratios.append(without / each)
            longest = max(seconds[1])
            print(f"{pair:>4}  {each:>16.4f}  {longest:>8.4f}  {without:>14.4f}  {ratios[-1]:>13.3f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.3f} (goal: at least 0.99)")


if __name__ == "__main__":
    main()
