"""The goodput that the plan predicts, against that of jobs whose ranks are killed at random.

    python benchmarks/goodput.py [--failures 8] [--mtbf 25]

A job of two nodes on this machine, with snapshots in memory after every step, and one that saves to disk every 20
steps. A few kills first: they measure what restarts and saves cost, from which the plan predicts. Then as many failures
as asked for, whose times between are spread like exponential ones: what was lost, and what the plan predicts with the
costs of this second part. Starting and stopping the job are left out on both sides.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from math import log
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.plan.goodput import goodput
from fsdp_jobs.plan.plan import make_plan
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.goodput import Costs, costs_of
from fsdp_jobs.run.status import RunStatus
from tests.jobs import Job, job
from tests.world import TINY

NODES = 2
SAME = ["steps=100000", "elastic.max_failures_without_progress=1000", "elastic.exclude_after=0"]
CASES = {
    "memory, every step": ["checkpoint.memory.every_steps=1"],
    "disk, every 20 steps": ["checkpoint.every_steps=20"],
}


def predicted(overrides: list[str], costs: Costs, step_s: float, mtbf_s: float) -> float:
    """The plan's prediction for kills of single ranks, which leave the newest save of the fastest tier."""
    expected = make_plan(compose_job([*TINY, f"nodes={NODES}", "nproc_per_node=1", *overrides]), costs=costs).expected
    shares = [1.0, *[0.0] * (len(expected.tiers) - 1)]
    steps = [int(o.rpartition("=")[2]) for o in overrides]
    tiers = [replace(tier, share=share) for tier, share in zip(expected.tiers, shares, strict=True)]
    every_s = [tier.best_s for tier in tiers]
    every_s[0] = steps[0] * step_s  # as measured; the plan's time of a step is another machine's
    of_tiers = [(t.share, s, t.stall_s if t.share else 0.0) for t, s in zip(tiers, every_s, strict=True)]
    written_s = step_s if tiers[0].place == "memory" else tiers[0].written_s
    return goodput(of_tiers, expected.restart_s + written_s, mtbf_s)


def fail(running: Job, gaps: list[float], dice: random.Random) -> None:
    """Kill a rank after each gap; in a restart, as soon as there is one."""
    for gap in gaps:
        time.sleep(gap)
        ranks: list[psutil.Process] = []
        while not ranks:
            with suppress(psutil.Error, AssertionError):
                ranks = running.ranks(dice.randrange(NODES))
        with suppress(psutil.NoSuchProcess):
            ranks[0].kill()


def measure(folder: Path, name: str, overrides: list[str], gaps: list[float]) -> tuple[float, Costs, float, float]:
    """Run under failures; returns the goodput, the costs, seconds per step, and the time between failures."""
    with job(folder, name, *SAME, *overrides, nodes=str(NODES), nproc=1) as running:
        running.until_step(25)
        fail(running, gaps, random.Random(0))
        done = running.step()
        running.until(lambda: running.step() > done + 5 and running.metrics()[-1]["time"] > time.time() - 5, "recovery")
        time.sleep(gaps[0])
        write_atomic(running.run.stop_request, "measured")
        running.wait()
    status, costs = RunStatus(running.run), costs_of(running.run)
    status.update()
    went = status.goodput
    assert costs is not None
    worked = went.useful_s + went.stall_s + went.lost_s + went.recover_s
    return went.useful_s / worked, costs, went.useful_s / status.step, worked / len(status.breaks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--failures", type=int, default=8)
    parser.add_argument("--mtbf", type=float, default=25.0, help="seconds")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    gaps = [-args.mtbf * log(1 - (i + 0.5) / args.failures) for i in range(args.failures)]
    random.Random(1).shuffle(gaps)
    print(
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {args.failures} failures"
    )
    print(f"{'saved':<22}{'MTBF s':>8}{'restart s':>11}{'measured':>10}{'predicted':>11}{'before the run':>16}")
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, overrides) in enumerate(CASES.items()):
            _, before, step_s, _ = measure(Path(folder), f"before-{number}", overrides, [10.0] * 3)
            measured, costs, now_step_s, mtbf_s = measure(Path(folder), f"failing-{number}", overrides, gaps)
            now, then = (predicted(overrides, *c, mtbf_s) for c in ((costs, now_step_s), (before, step_s)))
            print(
                f"{name:<22}{mtbf_s:>8.1f}{costs.restart_s:>11.1f}{measured:>10.1%}{now:>11.1%}{then:>16.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
