"""Choosing an option: the smallest shard group that fits, then the shortest step; a sentence for the rest."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_jobs.config.resolve import ranks_per_node
from fsdp_jobs.config.schema import AUTO, HardwareConfig, JobConfig
from fsdp_jobs.plan.grouping import Placement, place
from fsdp_jobs.plan.layout import HYBRID
from fsdp_jobs.plan.memory import GIB
from fsdp_jobs.plan.options import Option, all_options, price, usable_bytes
from fsdp_jobs.plan.shapes import ModelShape
from fsdp_jobs.plan.topology import Topology

FEW_SPARES = 0.05  # of the nodes: what a smaller shard group may leave idle
WORTH_REGROUPING = 1.1  # tokens/s against the held group size that make a change of it worth while


@dataclass(frozen=True)
class Chosen:
    """The option taken, where its groups go, and the reasons."""

    option: Option
    placement: Placement
    reasons: list[str]
    considered: list[tuple[Option, str]]


def choose(config: JobConfig, shape: ModelShape, topology: Topology, previous_group: int | None = None) -> Chosen:
    """The option for this topology; the user's strategy and group, or the previous group size, come first.

    `auto` takes, of the options that fit: few spares before many, then the smallest group, then the shortest
    predicted step. That order makes the group size fall, never rise, as memory grows.
    """
    options = all_options(config, shape, topology)
    free = _best(options)
    asked = _asked(config, shape, topology, options)
    best = _best(asked)
    reasons: list[str] = []
    free_size = config.fsdp.shard_group == AUTO and config.fsdp.strategy in (AUTO, *HYBRID)
    if previous_group is not None and free_size:
        best, reasons = _held(asked, best, previous_group, config.hardware)
    else:
        reasons.append(_why_chosen(best, config.hardware))
    if len(asked) < len(options) and free.name != best.name:
        reasons.append(_criticism(best, free, config.hardware))
    if best not in options:
        options.append(best)
    taken = "chosen" if best.fits else "nearest to fitting"
    considered = [(o, taken if o is best else _why_not(o, best, config.hardware)) for o in options]
    placement = place(topology, best.layout.shard_group, ranks_per_node(config), config.hardware.nvlink_domain)
    assert placement is not None
    if placement.crossing:
        reasons.append(f"{placement.crossing} of {best.layout.replicas} shard groups cross a leaf switch.")
    if placement.spares:
        names = [topology.nodes[i].name for i in placement.spares]
        listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        reasons.append(f"{listed} complete no shard group and stand by as spares.")
    return Chosen(best, placement, reasons, considered)


def _order(option: Option) -> tuple[bool, int, float, str]:
    many_spares = option.spares > FEW_SPARES * (option.nodes + option.spares)
    return (many_spares, option.layout.shard_group, option.time.step, option.name)


def _best(options: list[Option]) -> Option:
    """The first that fits in order; when none fits, the one that comes nearest."""
    fitting = [o for o in options if o.fits]
    return min(fitting, key=_order) if fitting else min(options, key=lambda o: (o.memory.total, o.memory.host))


def _asked(config: JobConfig, shape: ModelShape, topology: Topology, options: list[Option]) -> list[Option]:
    """The options that the user's words leave."""
    strategy, group = config.fsdp.strategy, config.fsdp.shard_group
    if strategy == AUTO and group == AUTO:
        return options
    per_node, domain = ranks_per_node(config), config.hardware.nvlink_domain
    world = len(topology.nodes) * per_node
    sizes = sorted({o.layout.shard_group for o in options}) if group == AUTO else [group]
    if strategy == AUTO:
        names = ("no_shard",) if group == 1 else ("full_shard", "shard_grad_op") if group == world else HYBRID
    else:
        names = (strategy,)
        if strategy not in HYBRID:
            sizes = [1 if strategy == "no_shard" else world]
        elif group == AUTO and world > 1:
            sizes = [s for s in sizes if s > 1]
    by_name = {(o.layout.strategy, o.layout.shard_group): o for o in options}
    found = []
    for size in sizes:
        placement = place(topology, size, per_node, domain)
        if placement is not None:
            found += [by_name.get((n, size)) or price(config, shape, n, placement) for n in names]
    return found


def _held(asked: list[Option], best: Option, previous_group: int, hardware: HardwareConfig) -> tuple[Option, list[str]]:
    """The option of the previous group size if it still serves, else the best."""
    same = [o for o in asked if o.layout.shard_group == previous_group]
    if not same:
        return best, [
            f"Regrouped from {previous_group}: no shard group of that size can be formed. "
            + _why_chosen(best, hardware)
        ]
    held = _best(same)
    if not held.fits and best.fits:
        return best, [f"Regrouped from {previous_group}: it no longer fits. " + _why_chosen(best, hardware)]
    gain = best.time.tokens_per_s / held.time.tokens_per_s
    if best.spares < held.spares and gain > WORTH_REGROUPING and best.fits:
        why = f"the {held.spares} nodes it leaves idle give {(gain - 1) * 100:.0f}% more tokens/s otherwise. "
        return best, [f"Regrouped from {previous_group}: " + why + _why_chosen(best, hardware)]
    return held, [f"Held the shard group of {previous_group}; replicas are now {held.layout.replicas}."]


def _gib(n: float) -> str:
    return f"{n / GIB:.1f} GiB" if n >= 0.1 * GIB else f"{n / 2**20:.1f} MiB"


def _seconds(s: float) -> str:
    return f"{s:.2f} s" if s >= 1 else f"{s * 1e3:.3g} ms"


def _why_chosen(o: Option, hardware: HardwareConfig) -> str:
    need = f"{_gib(o.memory.total)} of {_gib(usable_bytes(hardware))} usable a GPU"
    if not o.fits:
        host = f", and {_gib(o.memory.host)} of host memory a rank" if o.memory.host else ""
        return f"Nothing fits; {o.name} comes nearest: {need}{host}."
    if o.layout.strategy == "no_shard":
        return f"Each rank can hold everything ({need}), so nothing is sharded."
    if o.layout.replicas == 1:
        return f"{o.name} ranks fits ({need})."
    units = {"domain": "one NVLink domain", "node": "one node", "leaf": "one leaf switch", "all": "the job"}
    unit = units.get(o.inside, f"one switch {o.inside.removeprefix('switch-')} above the leaves")
    return f"{o.name} fits ({need}); each shard group stays inside {unit}."


def _why_not(o: Option, best: Option, hardware: HardwareConfig) -> str:
    """One sentence for an option that was not taken."""
    if not o.fits:
        name, most = next(iter(o.memory.parts().items()))
        over = o.memory.total - usable_bytes(hardware)
        if over <= 0:
            return f"Offload needs {_gib(o.memory.host)} of host memory a rank, more than a node has."
        return f"Over by {_gib(over)}: {_gib(most)} of {name}."
    change = o.time.tokens_per_s / best.time.tokens_per_s - 1
    speed = "as fast" if abs(change) < 0.005 else f"{abs(change):.0%} {'faster' if change > 0 else 'slower'}"
    far, near = (x.traffic["nccl"].inter_node for x in (o, best))
    sends = f", {far / near:.1f} x the bytes between nodes" if near and abs(far / near - 1) > 0.05 else ""
    if o.spares > best.spares:
        return f"Leaves {o.spares} node{'s' if o.spares > 1 else ''} idle: {speed}{sends}."
    if o.layout.shard_group == best.layout.shard_group:
        return f"The same group: {speed}{sends}, {_gib(abs(o.memory.total - best.memory.total))} " + (
            "more memory." if o.memory.total > best.memory.total else "less memory."
        )
    which = "larger" if o.layout.shard_group > best.layout.shard_group else "smaller"
    return f"A {which} group: {speed}{sends}."


def _criticism(best: Option, free: Option, hardware: HardwareConfig) -> str:
    """What the plan would have done by itself, when the user's words exclude it."""
    if free.fits and not best.fits:
        return f"As asked it does not fit; left to itself the plan takes {free.name}, which does."
    change = (free.time.tokens_per_s / best.time.tokens_per_s - 1) * 100
    saved = best.memory.total - free.memory.total
    memory = f" and {_gib(abs(saved))} {'less' if saved > 0 else 'more'} memory a GPU"
    if change > 2:
        speed = f"{change:.0f}% more tokens/s predicted{memory}"
        return f"As asked; left to itself the plan takes {free.name}: {speed}."
    return f"As asked; {free.name} would be the plan's own choice ({change:+.0f}% tokens/s predicted{memory})."
