"""Saves of a large state. For gpu.py."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

import psutil

from benchmarks.gpu_parts.bench import GIB, ROOT, SIZES, Bench, Case, Row


def saving(bench: Bench) -> Iterator[Row]:
    """Asynchronous saves of the largest model that fits, bf16 states, against `dcp.async_save`: save.py of one rank."""
    disk, host = shutil.disk_usage(bench.folder).free, psutil.virtual_memory().available
    name = fitting(disk, host) if bench.gpus else "small"
    sizes = [*SIZES[name], "fsdp.master_dtype=bf16"] if bench.gpus else ["model.dim=256"]
    found, why = measure(bench, sizes, "--only=asynchronous", "--saves", "1" if name == "8b" else "3")
    yield from saving_rows(name, found, why, bench.gpus > 0)


def measure(
    bench: Bench, sizes: Sequence[str], *options: str, seconds: float = 300
) -> tuple[dict[str, float] | None, str]:
    """Run save.py of one rank; return what it measured, or None and why."""
    one = ["nodes=1", "nproc_per_node=1", "fsdp=full_shard", "fsdp.shard_group=auto", f"hardware={bench.hardware}"]
    command = [sys.executable, str(ROOT / "benchmarks" / "save.py"), "--ranks", "1", "--json"]
    command += ["--folder", str(bench.folder), *options, *one, *sizes, "data.seq_len=128"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None, done.stderr.strip()[-200:]


def fitting(disk: float, host: float) -> str:
    """Return the largest of `SIZES` whose bf16 states, once on the disk and twice in host memory, have room."""
    states = {"8b": 8.03e9 * 6, "3b": 3.2e9 * 6, "1b": 1.24e9 * 6}
    return next((name for name, size in states.items() if 1.1 * size < disk and 2.2 * size < host), "160m")


def saving_rows(name: str, found: dict[str, float] | None, why: str, on_gpu: bool) -> Iterator[Row]:
    """Compare what save.py measured; a CPU's copies of a small state have no range."""
    if found is None:
        yield Row(name, None, note=why)
        return
    size = f"{found['state'] / GIB:.1f} GiB of state"
    of_save, of_dcp = found["stall"] / found["ours_async"], found["stall"] / found["dcp_stall"]
    rate = found["state"] / found["ours_async"] / GIB
    waits = f"{found['stall']:.3f} s, dcp.async_save {found['dcp_stall']:.3f} s"
    yield Row(f"{name}: waits / its duration", of_save, 0, 0.05 if on_gpu else math.inf, note=size)
    yield Row(f"{name}: waits / dcp.async_save's", of_dcp, 0, 1 if on_gpu else math.inf, note=waits)
    lasts = f"{found['ours_async']:.1f} and {found['dcp_async']:.1f} s, ours {rate:.2f} GiB/s with checksums read back"
    yield Row(f"{name}: duration / dcp.async_save's", found["ours_async"] / found["dcp_async"], 0, 4, note=lasts)


CASES = (Case("saving", "asynchronous", "waits at most dcp.async_save's time", saving, seconds=70),)
