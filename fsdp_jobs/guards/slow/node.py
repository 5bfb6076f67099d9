"""Ask NVIDIA's driver why GPUs of this node are throttled. No torch."""

from __future__ import annotations

import subprocess
from contextlib import suppress

from fsdp_jobs.guards.slow.messages import Slow, Throttled
from fsdp_jobs.node import guard
from fsdp_jobs.run.threads import start_thread

# A software power limit is normal for a healthy GPU at full load, so it is not a reason.
_REASONS = ("hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown")
_NAMES = ("clocks_event_reasons", "clocks_throttle_reasons")  # of newer and of older drivers
_TIMEOUT_S = 10.0


class Guard(guard.Guard):
    """Answers `Slow`."""

    takes = (Slow,)

    def on_message(self, message: Slow) -> None:
        start_thread(lambda: self.node.link.send(Throttled(throttled())), "driver")


def throttled() -> list[str]:
    """Return a sentence per throttled GPU; empty if none is throttled or nvidia-smi is not installed."""
    for name in _NAMES:
        fields = ",".join(["index", "clocks.sm", "clocks.max.sm", *(f"{name}.{reason}" for reason in _REASONS)])
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        with suppress(OSError, subprocess.SubprocessError):
            output = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
            return [why for line in output.splitlines() if (why := _why(line.split(", ")))]
    return []


def _why(cells: list[str]) -> str:
    index, now, most, *are = cells
    reasons = [reason for reason, is_active in zip(_REASONS, are, strict=True) if is_active.strip() == "Active"]
    return f"GPU {index} at {now} of {most}: {' and '.join(reasons)}" if reasons else ""
