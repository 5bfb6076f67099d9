"""Rates of the device against conf/hardware. For gpu.py."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import yaml

from benchmarks.gpu_parts.bench import HARDWARE, PROGRAMS, Bench, Case, Row


def rates(bench: Bench) -> Iterator[Row]:
    """Matmul, memory and host rates of the device against conf/hardware, and the lines that they would be there."""
    done = subprocess.run([sys.executable, str(PROGRAMS / "rates.py")], capture_output=True, text=True)
    if done.returncode:
        yield Row("rates", None, note=done.stderr.strip()[-200:])
        return
    said = yaml.safe_load((HARDWARE / f"{bench.hardware}.yaml").read_text())
    yield from rate_rows(json.loads(done.stdout.splitlines()[-1]), said)


def rate_rows(measured: dict[str, float], said: dict[str, Any]) -> Iterator[Row]:
    """Compare measured rates with a file of conf/hardware; the notes are its lines with what was measured."""
    efficiency = measured["bf16_tflops"] / said["bf16_tflops"]
    lines = {
        "bf16_tflops": (said["bf16_tflops"] * said["matmul_efficiency"], f"matmul_efficiency: {efficiency:.3f}"),
        "memory_gb_s": (said["memory_gb_s"], f"memory_gb_s: {measured['memory_gb_s']:.1f}"),
        "host_gb_s": (said["host_gb_s"], f"host_gb_s: {measured['host_gb_s']:.1f}"),
    }
    for key, (known, line) in lines.items():
        note = f"{line}  # python benchmarks/gpu.py rates, {time.strftime('%Y-%m-%d')}; {known:,.1f} until now"
        yield Row(key, measured[key] / known, 0.85, 1.15, note=note)


CASES = (Case("rates", "device", "0.85 to 1.15 of conf/hardware", rates, ("gpu",), 10),)
