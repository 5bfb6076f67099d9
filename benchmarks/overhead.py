"""What the trainer costs: tokens/s against a hand-written FSDP2 loop.

    python benchmarks/overhead.py [--pairs 5] [--steps 40] [overrides]

Alternating pairs of whole jobs, ours (coordinator, agent, checkpoints off) and `minimal_fsdp2.py` under bare
torchrun: the same model, data, dtype and ranks. Each side's figure is the median step after the first five.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from fsdp_jobs.run.tail import read_json_lines

HERE = Path(__file__).parent
RANKS = 2
SAME = ["nodes=1", f"nproc_per_node={RANKS}", "fsdp=full_shard", "data.micro_batch=4", "checkpoint.every_steps=0"]
WARMUP = 5


def ours(folder: Path, name: str, steps: int, overrides: list[str]) -> list[float]:
    """Seconds of each step after the first, from the time stamps of `metrics.jsonl`."""
    command = [sys.executable, "-m", "fsdp_jobs", f"name={name}", f"runs_dir={folder}", f"steps={steps}", *SAME]
    subprocess.run([*command, *overrides], check=True, stdout=subprocess.DEVNULL)
    times = [m["time"] for m in read_json_lines(folder / name / "metrics.jsonl")]
    return [b - a for a, b in pairwise(times)]


def minimal(steps: int, overrides: list[str]) -> float:
    """Median seconds of a step of the hand-written loop."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += [str(HERE / "minimal_fsdp2.py"), "--steps", str(steps), *SAME, *overrides]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return statistics.median(json.loads(done.stdout.splitlines()[-1])[WARMUP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {RANKS} ranks, {args.steps} steps a run")
    print(f"{'pair':>4}  {'ours s/step':>12}  {'by hand s/step':>14}  {'ours/by hand tokens/s':>22}")
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(args.pairs):
            sides = {}
            for side in ("ours", "hand") if pair % 2 == 0 else ("hand", "ours"):
                if side == "ours":
                    seconds = ours(Path(folder), f"pair-{pair}", args.steps, args.overrides)
                    sides[side] = statistics.median(seconds[WARMUP:])
                else:
                    sides[side] = minimal(args.steps, args.overrides)
            ratios.append(sides["hand"] / sides["ours"])
            print(f"{pair:>4}  {sides['ours']:>12.4f}  {sides['hand']:>14.4f}  {ratios[-1]:>22.3f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.3f} (goal: at least 0.98)")


if __name__ == "__main__":
    main()
