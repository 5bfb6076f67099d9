"""What checkpoints in memory cost: tokens/s with a capture every step against the same job without.

    python benchmarks/captures.py [--pairs 5] [--steps 60] [overrides]

Alternating pairs of whole jobs of two nodes on this machine. Each side's figure is the median step after the first
five.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.overhead import ours

SAME = ["nodes=2", "nproc_per_node=1", "elastic.join_window_s=0"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, 2 nodes of 1 rank, {args.steps} steps a run")
    print(f"{'pair':>4}  {'each step s/step':>16}  {'without s/step':>14}  {'with/without tokens/s':>22}")
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(args.pairs):
            seconds = {}
            for every in (0, 1) if pair % 2 == 0 else (1, 0):
                overrides = [*SAME, *args.overrides, f"checkpoint.memory.every_steps={every}"]
                seconds[every] = ours(Path(folder), f"pair-{pair}-{every}", args.steps, overrides)
            ratios.append(seconds[0] / seconds[1])
            print(f"{pair:>4}  {seconds[1]:>16.4f}  {seconds[0]:>14.4f}  {ratios[-1]:>22.3f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.3f} (goal: at least 0.99)")


if __name__ == "__main__":
    main()
