"""How long planning and regrouping take, and how much memory, by size: python benchmarks/plan_scale.py"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

SIZES = (128, 512, 2048, 5000, 10_000)  # nodes of 8 GPUs, leaves of 16 nodes, blocks of 8 leaves


def peak_mib() -> float:
    """This process's largest resident size in MiB."""
    status = Path("/proc/self/status")  # Linux; getrusage would count the parent's, too
    if status.exists():
        return int(next(x for x in status.read_text().splitlines() if x.startswith("VmHWM")).split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(nodes: int) -> None:
    """Plan once in this process and print: nodes, ranks, seconds, seconds to regroup, peak MiB, the choice."""
    from fsdp_jobs.config.hydra import compose_job
    from fsdp_jobs.plan.plan import make_plan
    from fsdp_jobs.plan.topology import Node, Topology

    config = compose_job(
        [
            "hardware=h100",
            "model=llama3_70b",
            "data=synthetic",
            "data.seq_len=8192",
            "data.micro_batch=1",
            f"data.global_batch={nodes * 8}",
            "fsdp.activation_checkpointing=full",
            f"nodes={nodes}",
        ]
    )
    started = time.perf_counter()
    places = (Node(f"node{i + 1}", (f"block{i // 128}", f"leaf{i // 16}")) for i in range(nodes))
    topology = Topology.of(places)
    plan = make_plan(config, topology)
    plan.to_json()
    seconds = time.perf_counter() - started
    started = time.perf_counter()
    left = topology.first(nodes - -(-nodes // 100))  # one node in a hundred is lost
    make_plan(config, left, seek_remedies=False, previous_group=plan.layout.shard_group)
    again = time.perf_counter() - started
    assert "torch" not in sys.modules
    peak = peak_mib()
    layout = plan.layout
    choice = f"{layout.strategy} over {layout.shard_group}"
    print(f"{nodes:>7} {layout.world_size:>7} {seconds:>9.3f} {again:>9.3f} {peak:>8.0f}   {choice}")


def main() -> None:
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, help="measure this size only, in this process")
    only = parser.parse_args().nodes
    if only:
        measure(only)
        return
    print(f"{'nodes':>7} {'ranks':>7} {'seconds':>9} {'regroup':>9} {'peak MiB':>8}   choice")
    for size in SIZES:  # a process each, so that peaks do not add up
        subprocess.run([sys.executable, __file__, "--nodes", str(size)], check=True)


if __name__ == "__main__":
    main()
