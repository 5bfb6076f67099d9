"""Rates of one GPU, as conf/hardware states them: the best of several sizes, medians of 20. For gpu.py. Prints JSON."""

import json
import statistics
from collections.abc import Callable

import torch


def seconds(work: Callable[[], object]) -> float:
    """Median time of `work` on the device."""
    times = []
    for _ in range(25):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[5:])


def matmul(n: int) -> float:
    """TFLOP/s of a square product in bf16."""
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / seconds(lambda: a @ b) / 1e12


buffer = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
other = torch.empty_like(buffer)
pinned = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
print(
    json.dumps(
        {
            "bf16_tflops": max(matmul(n) for n in (4096, 8192, 10240, 16384)),
            "memory_gb_s": 2 * buffer.numel() / seconds(lambda: other.copy_(buffer)) / 1e9,  # read and written
            "host_gb_s": pinned.numel() / seconds(lambda: buffer[: 1 << 28].copy_(pinned, non_blocking=True)) / 1e9,
        }
    )
)
