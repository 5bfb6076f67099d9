"""Predict a job's goodput: how often its nodes fail, how often to save to each tier, what remains. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, exp, expm1, sqrt

from fsdp_jobs.config.keys import AUTO
from fsdp_jobs.config.resolve import ranks_per_node, seconds_per_byte
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.plan.memory import Memory
from fsdp_jobs.run.goodput import Costs, Failures
from fsdp_jobs.run.table import counted, duration, percent, size

_RESTART_S = 180.0  # noticing the loss, new processes, NCCL, loading, the first step; an estimate until measured
_LEAST_STALL_S = 0.5  # delay of steps per save, beyond the copy of the state
_SNAPSHOT_S = 0.008  # delay of steps per snapshot that is copied beside them (lm-resiliency: 7.7 ms for 12 GB)
_SNAPSHOTS_COST = 0.01  # share of a step that `checkpoint.memory.every_steps=auto` spends
_CHECKSUM_GB_S = 16.0  # XXH3 of an agent, one thread; measured on an AMD EPYC
_RELIED_ON = 2.0  # failures: the weight of the configured rate against those that the cluster had

# Of Llama 3's 419 interruptions (arXiv:2407.21783, table 5): 54 in software, after which the same nodes continue; 35
# in switches and cables, which may take down several nodes at once.
_NODES_STAY, _SEVERAL_NODES = 54 / 419, 35 / 419
_LEAST_BEYOND_MEMORY = 0.01  # of failures that no memory survives: power, or all nodes at once; an estimate


@dataclass(frozen=True)
class Tier:
    """One place that a job is saved to."""

    place: str  # memory | local_dir | storage, as in the event `resumed`
    share: float  # part of the failures after which this tier has the newest state
    stall_s: float  # delay of steps per save
    best_s: float  # best save interval
    every_s: float  # configured interval; 0: unknown, because it is in steps of unknown time
    written_s: float = 0.0  # from a save until a restart can use it; 0: unknown
    every_steps: float = 0.0  # `every_s` in steps, of snapshots in memory; 0: unknown
    bytes: int = 0  # of each node's memory; 0: none, or unknown

    def __str__(self) -> str:
        steps = f"{self.every_steps:.3g} step{'s' * (self.every_steps != 1)}, " if self.every_steps else ""
        best = "the best interval" if self.every_s == self.best_s else f"best: {duration(self.best_s)}"
        every = f"saved every {steps}{duration(self.every_s)} ({best})" if self.every_s else best
        memory = f", {size(self.bytes)} per node" if self.bytes else ""
        share = "all" if self.share == 1 else f"{self.share:.1%} of"
        return f"{self.place}: {every}, each costs {self.stall_s:.3g} s{memory}; {share} failures go back to it"


@dataclass(frozen=True)
class Expected:
    """The expected cost of failures."""

    mtbf_s: float  # between failures of the job
    rate: float  # of failures per 1,000 node-days
    seen: Failures  # of this cluster, included in the rate
    restart_s: float  # from a failure to the next step
    measured: bool  # the restart, on this run
    best_s: float  # best interval of saves to a disk
    tiers: tuple[Tier, ...]
    goodput: float  # 0 to 1, at the configured intervals or, without any, the best

    def __str__(self) -> str:
        source = "by the configuration"
        if self.seen.node_days:
            here = f"{self.seen.node_days:,.3g} node-days of {counted(self.seen.runs, 'run')} here"
            source += f" and {counted(self.seen.count, 'failure')} in {here}"
        how = "measured" if self.measured else "assumed"
        rate = f"{self.rate:.3g} per 1,000 node-days, {source}"
        first = f"goodput {percent(self.goodput, 1)} expected: a failure every {duration(self.mtbf_s)} ({rate}), "
        write_s = self.tiers[-1].written_s
        written = f"{write_s:.3g} s to write a save" if write_s else "writing a save counts as 0 s (not known yet)"
        first += f"{self.restart_s:.0f} s to restart ({how}), {written}"
        return "\n".join([first, *(f"  {tier}" for tier in self.tiers)])


def expect(
    config: JobConfig,
    layout: Layout,
    nodes: int,
    memory: Memory | None,
    step_s: float,
    costs: Costs | None,
    seen: Failures | None,
) -> Expected:
    """Predict the goodput of a job.

    Args:
        config: the job; `hardware.failures_per_1000_node_days` is the expected rate of failures.
        layout: the sharding.
        nodes: that take part.
        memory: of a rank; None: unknown, so the copy of the state is not counted.
        step_s: seconds per step; 0: unknown.
        costs: measured on this run; None: a new run.
        seen: failures that this cluster had.
    """
    seen, configured = seen or Failures(), config.hardware.failures_per_1000_node_days
    rate = 1e3 * (_RELIED_ON + seen.count) / (_RELIED_ON * 1e3 / configured + seen.node_days)
    mtbf_s = 86400e3 / (nodes * rate)
    known = costs or Costs(0.0, 0.0, 0.0)
    tiers = tuple(_tiers(config, layout, nodes, memory or Memory("unknown"), step_s, known, mtbf_s))
    restart_s = known.restart_s or _RESTART_S
    lag_s = sum(t.share * t.written_s for t in tiers)  # a failure before then restarts from the previous save
    kept = goodput([(t.share, t.every_s or t.best_s, t.stall_s) for t in tiers], restart_s + lag_s, mtbf_s)
    return Expected(mtbf_s, rate, seen, restart_s, bool(known.restart_s), tiers[-1].best_s, tiers, kept)


def _tiers(
    config: JobConfig, layout: Layout, nodes: int, memory: Memory, step_s: float, costs: Costs, mtbf_s: float
) -> Iterator[Tier]:
    """Yield the places that the job is saved to, fastest first; shared storage is always the last."""
    checkpoint, hardware, per_node, left = config.checkpoint, config.hardware, ranks_per_node(config), 1.0
    copied = memory.parameters + memory.optimizer
    copy_s = copied * seconds_per_byte(hardware.host_gb_s)
    if every := checkpoint.memory.every_steps:
        holders = max(2, min(layout.replicas, nodes)) - 1  # other nodes with the same state: replicas or a partner
        together = _SEVERAL_NODES * float(nodes - 1) ** -holders if nodes > 1 else 1 - _NODES_STAY
        left = max(_LEAST_BEYOND_MEMORY, together)
        stall_s = costs.snapshot_s or _SNAPSHOT_S + max(0.0, copy_s - (step_s or copy_s))
        if every == AUTO:
            network_gb_s = hardware.inter_node_gb_s if layout.replicas == 1 else 0.0  # replicas send nothing
            send_s = copied * seconds_per_byte(network_gb_s)
            busy_s = max(copy_s, send_s, copied * per_node / (_CHECKSUM_GB_S * 1e9), stall_s / _SNAPSHOTS_COST)
            every = costs.snapshot_steps or (ceil(busy_s / step_s) if step_s else 0)
        best_s = max(best_interval(stall_s, mtbf_s / (1 - left)), step_s)
        in_memory = memory.snapshots * per_node
        yield Tier("memory", 1 - left, stall_s, best_s, every * step_s, step_s, every, in_memory)
    write_s = costs.write_s
    stall_s = costs.stall_s if write_s else _LEAST_STALL_S + copy_s
    best_s = max(best_interval(stall_s, mtbf_s / left), write_s, 60.0, step_s)
    minutes, steps = checkpoint.every_minutes, checkpoint.every_steps
    configured = [best_s if minutes == AUTO else max(minutes * 60, step_s)] if minutes else []
    configured += [steps * step_s] if steps and step_s else []
    every_s = min(configured, default=0.0)
    if checkpoint.local_dir is not None:
        yield Tier("local_dir", left * _NODES_STAY, stall_s, best_s, every_s, write_s)
        left, stall_s = left * (1 - _NODES_STAY), 0.0
        every_s = max(every_s, write_s) if every_s else 0.0
    yield Tier("storage", left, stall_s, best_s, every_s, write_s)


def best_interval(stall_s: float, mtbf_s: float) -> float:
    """Return the interval between saves that loses least, seconds: sqrt(2 x stall x MTBF) (Young 1974, Daly 2006)."""
    return sqrt(2 * stall_s * mtbf_s)


def goodput(tiers: Sequence[tuple[float, float, float]], restart_s: float, mtbf_s: float) -> float:
    """Return the share of time spent on steps that are kept; failures are exponential, also during restarts.

    With one tier this is the model of Daly 2006 (doi:10.1016/j.future.2004.11.016). With several, a restart uses the
    newest save of one of them, and the others' stalls are part of its interval.

    Args:
        tiers: of each, the share of failures that restart from it, and the seconds between saves and per save.
        restart_s: from a failure to the next step.
        mtbf_s: between failures.
    """
    stalls = 1 + sum(stall_s / every_s for _, every_s, stall_s in tiers)
    again = 1.0
    for share, every_s, _ in tiers:
        exponent = share * every_s * stalls / mtbf_s
        if exponent > 500:
            return 0.0
        again *= expm1(exponent) / exponent if exponent else 1.0
    return 1 / (exp(min(500.0, restart_s / mtbf_s)) * stalls * again)
