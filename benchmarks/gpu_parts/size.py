"""A state of 15 GB: the longest step beside snapshots, restarts, saves and loads against the disk. For gpu.py."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from itertools import pairwise

from benchmarks.gpu_parts.bench import GIB, RANDOM, SIZES, TINY, WARMUP, Bench, Case, Job, Row
from benchmarks.gpu_parts.saving import measure
from benchmarks.restart import LINK, PLACES, restart

STEPS = 60  # at least, beside snapshots
COPY = 20e9  # bytes/s of a copy from the GPU to pinned memory, PCIe 4.0 and newer


def restarts(bench: Bench) -> Iterator[Row]:
    """A job of 1.24 billion parameters, fp32, whose rank is killed after snapshots, then one whose rank is after saves.

    On a CPU the model is tiny, and its seconds have no range.
    """
    model = [*RANDOM, *SIZES["1b"], "data.micro_batch=1", "data.global_batch=1"] if bench.gpus else [*TINY]
    for place, saves in PLACES.items():
        job = bench.job(f"size-{place}", *model, *saves, "steps=100000")
        try:
            if place == "memory":
                job.until(lambda: len(job.metrics()) >= STEPS and job.metrics()[-1]["snapshots"] >= 3, "snapshots")  # noqa: B023
                yield _longest(bench, job)
            loading, total = restart(job, 0, lambda: job.ranks()[0].kill())  # noqa: B023
            state = _state(job)
        finally:
            job.stop(at_once=True)
        goal, note = 1.5 + state / LINK, f"{state / GIB:.1f} GiB of state, of it loading {loading:.2f} s"
        yield Row(f"round to resumed, from {place}", total, 0, _limit(bench, place == "memory", goal), "s", note)


def _longest(bench: Bench, job: Job) -> Row:
    times = [m["time"] for m in job.metrics()]
    steps = [b - a for a, b in pairwise(times)]
    median = statistics.median(steps[WARMUP:])
    goal = 1.5 * median + _state(job) / COPY
    note = f"median {median:.3f} s, {job.metrics()[-1]['snapshots']:.0f} snapshots in {len(steps)} steps"
    return Row("longest step beside snapshots", max(steps), 0, _limit(bench, True, goal), "s", note)


def _limit(bench: Bench, has_goal: bool, goal: float) -> float:
    return goal if bench.gpus and has_goal else math.inf


def _state(job: Job) -> int:
    """Bytes of fp32 weights and their two moments."""
    return 12 * job.plan().parameters


def disk(bench: Bench) -> Iterator[Row]:
    """Compare a blocking save, read back, with `dd` of as many bytes, and a restore with `dcp.load`."""
    sizes = [*SIZES["1b"], "fsdp.master_dtype=bf16"] if bench.gpus else ["model.dim=256"]
    found, why = measure(bench, sizes, "--only=blocking", "--saves", "1", seconds=300)
    yield from disk_rows(found, why, bench.gpus > 0)


def disk_rows(found: dict[str, float] | None, why: str, on_gpu: bool) -> Iterator[Row]:
    """Compare what save.py measured; a CPU's small state has no range."""
    if found is None:
        yield Row("saves and loads", None, note=why)
        return
    for name, ours, theirs, goal in (
        ("blocking save / dd", "ours", "dd", 1.25),
        ("blocking save, not read back / dd", "unread", "dd", math.inf),
        ("blocking save / dcp.save", "ours", "dcp", math.inf),
        ("restore from the disk / dcp.load", "ours_disk", "dcp_disk", 1.2),
    ):
        note = f"{found['state'] / GIB:.1f} GiB, {found[ours]:.1f} and {found[theirs]:.1f} s"
        yield Row(name, found[ours] / found[theirs], 0, goal if on_gpu else math.inf, note=note)


CASES = (
    Case("size", "restarts", "from memory 1.5 s + bytes / 4 GB/s", restarts, seconds=170),
    Case("size", "against the disk", "save at most 1.25 of dd, restore 1.2 of dcp.load", disk, seconds=180),
)
