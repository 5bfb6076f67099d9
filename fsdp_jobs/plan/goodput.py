"""Predict the goodput of a job: how often its nodes fail, how often to save, and what that leaves. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, sqrt

from fsdp_jobs.config.keys import AUTO
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.plan.memory import Memory
from fsdp_jobs.run.goodput import Costs
from fsdp_jobs.run.table import duration

_RESTART_S = 180.0  # noticing the loss, new processes, NCCL, loading, the first step; an estimate until measured
_LEAST_STALL_S = 0.5  # that steps wait for a save beyond the copy of the state


@dataclass(frozen=True)
class Expected:
    """What failures will cost, by the exponential model of Daly 2006 (doi:10.1016/j.future.2004.11.016)."""

    mtbf_s: float  # between failures of the job
    stall_s: float  # of steps, per save
    restart_s: float  # from a failure to the next step
    measured: bool  # the two above, on this run
    best_s: float  # from save to save
    every_s: float  # as configured; 0: unknown, because steps are counted and their time is not known
    goodput: float  # with every_s, or else best_s; 0 to 1

    def __str__(self) -> str:
        how = "measured" if self.measured else "assumed"
        every = f"saved every {duration(self.every_s)}, " if self.every_s else ""
        return (
            f"a failure every {duration(self.mtbf_s)}, {self.restart_s:.0f} s to restart and {self.stall_s:.1f} s per "
            f"save ({how}): {every}goodput {self.goodput:.1%}; best interval {duration(self.best_s)}"
        )


def expect(
    config: JobConfig, nodes: int, memory: Memory | None, step_s: float | None, costs: Costs | None = None
) -> Expected:
    """Predict the goodput of a job.

    Args:
        config: the job; `hardware.failures_per_1000_node_days` is the rate of failures.
        nodes: that take part.
        memory: of a rank; None: not known, the copy of the state is not counted.
        step_s: seconds per step; None: not known.
        costs: measured on this run; None: a new run.
    """
    hardware = config.hardware
    mtbf_s = 86400e3 / max(1e-9, nodes * hardware.failures_per_1000_node_days)
    copied = (memory.parameters + memory.optimizer) / (hardware.host_gb_s * 1e9) if memory and hardware.host_gb_s else 0
    stall_s, restart_s, write_s = _LEAST_STALL_S + copied, _RESTART_S, 0.0
    if costs is not None:
        stall_s, restart_s, write_s = costs.stall_s, costs.restart_s or restart_s, costs.write_s
    best_s = max(best_interval(stall_s, mtbf_s), write_s, 60.0)
    minutes, steps = config.checkpoint.every_minutes, config.checkpoint.every_steps
    configured = [best_s if minutes == AUTO else minutes * 60] if minutes else []
    configured += [steps * step_s] if steps and step_s else []
    every_s = min(configured, default=0.0)
    kept = goodput(every_s or best_s, stall_s, restart_s, mtbf_s)
    return Expected(mtbf_s, stall_s, restart_s, costs is not None, best_s, every_s, kept)


def best_interval(stall_s: float, mtbf_s: float) -> float:
    """Return the seconds from save to save that lose least: sqrt(2 x stall x MTBF) (Young 1974, Daly 2006)."""
    return sqrt(2 * stall_s * mtbf_s)


def goodput(every_s: float, stall_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the part of the time that goes into steps that are kept: failures are exponential, also in restarts."""
    exponent = (every_s + stall_s) / mtbf_s
    if exponent > 500:
        return 0.0
    return every_s / (mtbf_s * exp(min(500.0, restart_s / mtbf_s)) * expm1(exponent))
