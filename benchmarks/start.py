"""Seconds from the command to the first all-reduce of a program on one node, against torchrun.

    python benchmarks/start.py [--pairs 5] [--ranks 2] [--programs plain library]

Both run the same program, in alternation, from the start of the command to the time at which rank 0 has the result:
`plain` imports torch alone, `library` begins with `job.init()`. For fsdp_jobs also when its parts were there.
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
from collections.abc import Sequence
from pathlib import Path

from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.tail import read_json_lines

BEGIN = {
    "plain": 'import torch\nimport torch.distributed as dist\n\ndist.init_process_group("gloo")\n',
    "library": "import torch\nimport torch.distributed as dist\n\nfrom fsdp_jobs import job\n\njob.init()\n",
}
PROGRAM = """
import os, sys, time

began = time.time()
{begin}
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    with open(sys.argv[1], "w") as f:
        f.write(f"[{{began}}, {{time.time()}}]")
"""


def seconds(command: Sequence[str], out: Path) -> list[float]:
    """Return after how many seconds the program began, and had its first all-reduce."""
    began = time.time()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    return [at - began for at in json.loads(out.read_text())]


def parts(run: RunDir, began: float) -> list[float]:
    """Return after how many seconds the job was written, the supervisor ran, and the round began."""
    at = {e["event"]: e["time"] for e in read_json_lines(run.events)}
    return [run.token.stat().st_mtime - began, at["attempt_started"] - began, at["round_started"] - began]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--programs", nargs="*", choices=BEGIN, default=list(BEGIN))
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {args.ranks} ranks")
    print(f"{'':>8} {'fsdp_jobs':>10} {'torchrun':>9} {'ratio':>6}   written, supervised, round, program begins")
    with tempfile.TemporaryDirectory() as folder:
        for name in args.programs:
            program, out, ratios = Path(folder) / f"{name}.py", Path(folder) / "out", []
            program.write_text(PROGRAM.format(begin=BEGIN[name]))
            for pair in range(args.pairs):
                run = RunDir(Path(folder) / f"{name}-{pair}")
                ours = [sys.executable, "-m", "fsdp_jobs", f"script={program}", f"script_args={out}", "nodes=1"]
                ours += [f"nproc_per_node={args.ranks}", f"name={run.path.name}", f"runs_dir={folder}"]
                theirs = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
                theirs += [f"--nproc-per-node={args.ranks}", str(program), str(out)]
                took, began = {}, 0.0
                for command in (ours, theirs) if pair % 2 else (theirs, ours):
                    began = time.time() if command is ours else began
                    took[command is ours] = seconds(command, out)
                ratios.append(took[True][1] / took[False][1])
                where = ", ".join(f"{s:.2f}" for s in (*parts(run, began), took[True][0]))
                print(
                    f"{name:>8} {took[True][1]:>10.2f} {took[False][1]:>9.2f} {ratios[-1]:>6.2f}   {where}", flush=True
                )
            print(f"{name:>8} median ratio {statistics.median(ratios):.2f} (goal: at most 1.1)")


if __name__ == "__main__":
    main()
