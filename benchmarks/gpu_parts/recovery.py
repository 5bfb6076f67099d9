"""Seconds from a killed rank to the next step. For gpu.py."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from benchmarks.gpu_parts.bench import TINY, Bench, Case, Row


def recovery(bench: Bench) -> Iterator[Row]:
    """SIGKILL a rank; where the seconds to the next step go, without and with compiled blocks, side by side."""
    compiled = [False, True] if not bench._lack("compiler") else [False]
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda c: list(_recovered(bench, c)), compiled))
    for rows in found:
        yield from rows
    if bench.gpus:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        imported = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch; torch.ones(1).cuda()"], check=True)
        took = (time.perf_counter() - imported) - (imported - began)
        yield Row("a CUDA context, within round to loaded", took, 0, 5, "s", f"import torch {imported - began:.1f} s")


def _recovered(bench: Bench, compiled: bool) -> Iterator[Row]:
    name = "compiled" if compiled else "eager"
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(bench.folder / "inductor")} if compiled else {}
    every = ("steps=100000", "checkpoint.every_steps=10", f"fsdp.compile={str(compiled).lower()}")
    job = bench.job(f"recovery-{name}", *TINY, *every, **caches)
    job.until_step(25)
    job.until(lambda: job.events("checkpoint"), "its first checkpoint")
    before = len(job.metrics())
    killed = time.time()
    job.ranks()[0].kill()

    def again() -> list[float]:
        loaded = job.events("resumed")
        return [m["time"] for m in job.metrics()[before:] if loaded and m["time"] > loaded[-1]["time"]]

    try:
        job.until(again, "a step after the kill", 120)
    finally:
        first = again()
        job.stop()
    broken, rounds, loaded = (job.events(name)[-1]["time"] for name in ("round_broken", "round_started", "resumed"))
    begun = job.metrics()[0]["time"] - job.events("round_started")[0]["time"]
    parts = {
        "first start, round to first step": (begun, 90),
        "killed to noticed": (broken - killed, 2),
        "noticed to next round": (rounds - broken, 5),
        "round to checkpoint loaded": (loaded - rounds, 10),
        "loaded to first step": (first[0] - loaded, 20 if compiled else 5),
        "killed to first step": (first[0] - killed, 30 if compiled else 20),
    }
    for what, (seconds, limit) in parts.items():  # a CPU's seconds, maybe beside other work, have no limit
        yield Row(f"{name}: {what}", seconds, 0, limit if bench.gpus else math.inf, "s")


CASES = (Case("recovery", "a killed rank", "at most 20 s, compiled 30 s", recovery, seconds=50),)
