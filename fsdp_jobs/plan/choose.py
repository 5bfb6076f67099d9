"""Choose how to shard: price options by memory, traffic and time, choose one, and explain why not the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.keys import AUTO
from fsdp_jobs.config.resolve import accelerator, backend, param_dtype, ranks_per_node
from fsdp_jobs.config.schema import HardwareConfig, JobConfig
from fsdp_jobs.plan.grouping import Grouping, Placement
from fsdp_jobs.plan.layout import HYBRID, WHOLE, Layout, only_group
from fsdp_jobs.plan.memory import DTYPE_BYTES, GIB, MARGIN, Memory, peak_memory, snapshot_bytes
from fsdp_jobs.plan.shapes import ModelShape
from fsdp_jobs.plan.step_time import StepTime, step_time
from fsdp_jobs.plan.topology import Topology
from fsdp_jobs.plan.traffic import BACKENDS, Traffic, hops, node_traffic, ring_bytes
from fsdp_jobs.run.env import LAYOUT_ENV
from fsdp_jobs.run.table import listed, size

NEAR = 1.03  # steps this close to the shortest count as equally fast
_ALIKE = 1.05  # bytes between nodes this close to the fewest count as equal
_WORTH_MEMORY = 1.01  # a step this many times as long justifies whole gradients between microbatches
_SHORT_RING = 32  # ranks, below which rings are predicted well
CLOSE = 0.97  # share of the usable memory above which the plan warns
WORTH_REGROUPING = 1.1  # tokens/s relative to the held group size that justify changing it


@dataclass(frozen=True)
class Option:
    """A strategy over a shard group, with its costs."""

    layout: Layout
    placement: Placement
    microbatches: int  # of one rank in a step
    memory: Memory
    usable: int  # bytes of a device that may be filled
    host_fits: bool  # what is offloaded, and snapshots, in the host's memory
    traffic: dict[str, Traffic]  # of a node, by backend: nccl, gloo
    sent: float  # bytes that all nodes together send to other nodes in a step
    time: StepTime

    @property
    def name(self) -> str:
        layout = self.layout
        if layout.strategy == "no_shard":
            return f"no_shard on {layout.world_size}"
        return f"{layout.strategy} over {layout.shard_group}" + (f" x {layout.replicas}" if layout.replicas > 1 else "")

    @property
    def over(self) -> int:
        """Bytes beyond the device's usable memory; below 0: bytes left."""
        return self.memory.total - self.usable

    @property
    def fits(self) -> bool:
        return self.over <= 0 and self.host_fits

    @property
    def closeness(self) -> str:
        """Warn if it nearly fills the memory: the allocator may have to free cached blocks."""
        is_close = CLOSE < self.memory.total / self.usable <= 1
        return f", within {1 - CLOSE:.0%} of the limit" if is_close else ""

    @property
    def fits_well(self) -> bool:
        """Whether it fits, and not so closely that the plan warns of it."""
        return self.fits and not self.closeness

    @property
    def spares(self) -> int:
        return len(self.placement.spares)


@dataclass(frozen=True)
class Considered:
    """One option as the plan keeps it, chosen or not, with the reason."""

    name: str
    fits: bool
    memory_bytes: int
    traffic: dict[str, Traffic]  # per node and step, by backend
    step_s: float
    tokens_per_s: float
    why: str
    taken: bool


@dataclass(frozen=True)
class Choice:
    """The option taken, the reasons, and what else there was."""

    option: Option
    reasons: list[str]
    considered: tuple[Considered, ...]


def device_of(config: JobConfig) -> str:
    """Return the plan's word for the device of one rank."""
    return "GPU" if accelerator(config) == "cuda" else "rank"


def usable_bytes(hardware: HardwareConfig) -> int:
    """Return the device bytes that a plan may fill: the memory less the margin."""
    return int(hardware.memory_gib * GIB * (1 - MARGIN))


def price(config: JobConfig, shape: ModelShape, strategy: str, placement: Placement) -> Option:
    """Price one strategy on one placement.

    `fsdp.accumulate_unsharded=auto` keeps whole gradients between microbatches if they fit well and save over 1% of
    the time, or any time and over 5% of the bytes between nodes.
    `fsdp.chunked_loss=auto` computes the loss in chunks if whole logits do not fit well, or if their memory saves more
    time when used otherwise. `fsdp.objective=memory` takes the one that needs less.
    """
    fsdp, is_speed = config.fsdp, config.fsdp.objective == "speed"

    def accumulating(chunked: bool) -> Option:
        sharded = _price(config, shape, strategy, placement, fsdp.accumulate_unsharded is True, chunked)
        is_free = fsdp.accumulate_unsharded == AUTO and sharded.microbatches > 1 and placement.group > 1
        if not is_free or not is_speed:
            return sharded
        unsharded = _price(config, shape, strategy, placement, True, chunked)
        worth = 1.0 if sharded.sent > _ALIKE * unsharded.sent else _WORTH_MEMORY
        pays = sharded.time.step > worth * unsharded.time.step
        return unsharded if pays and unsharded.fits_well else sharded

    whole = accumulating(chunked=fsdp.chunked_loss is True)
    is_best = whole.fits_well and (whole.microbatches == 1 or whole.layout.accumulate_unsharded)
    if fsdp.chunked_loss != AUTO or (is_speed and is_best):
        return whole
    chunked = accumulating(chunked=True)
    if not (is_speed and whole.fits_well and chunked.fits):
        return min(whole, chunked, key=lambda o: (not o.fits, o.memory.total))
    return whole if whole.time.step <= NEAR * chunked.time.step else chunked


def _price(
    config: JobConfig, shape: ModelShape, strategy: str, placement: Placement, unsharded: bool, chunked: bool
) -> Option:
    fsdp, per_node, device = config.fsdp, ranks_per_node(config), accelerator(config)
    layout = Layout(strategy, len(placement.used) * per_node, placement.group, unsharded, chunked)
    per_rank = -(-config.data.global_batch // layout.world_size)  # samples of the busiest rank in a step
    config = replace(config, data=replace(config.data, micro_batch=min(config.data.micro_batch, per_rank)))
    microbatches = -(-per_rank // config.data.micro_batch)
    memory = peak_memory(shape, layout, fsdp, config.data, device, microbatches)
    if config.checkpoint.memory.every_steps:
        snapshots = snapshot_bytes(shape, layout, fsdp, is_one_node=layout.world_size == per_node)
        memory = replace(memory, snapshots=snapshots)
    param_bytes = DTYPE_BYTES[param_dtype(fsdp, device)]
    rings = {b: ring_bytes(shape, layout, fsdp, param_bytes, microbatches, b) for b in BACKENDS}
    host_bytes = config.hardware.host_memory_gib * GIB * (1 - MARGIN)
    host_fits = not host_bytes or (memory.host + memory.snapshots) * per_node <= host_bytes
    at = hops(layout, per_node, in_domain=placement.inside == "domain")
    traffic = {b: node_traffic(r, at) for b, r in rings.items()}
    sent = traffic[backend(config)].inter_node * len(placement.used)
    time = step_time(config, shape, layout, rings[backend(config)], at)
    usable = usable_bytes(config.hardware)
    return Option(layout, placement, microbatches, memory, usable, host_fits, traffic, sent, time)


def options_of(
    config: JobConfig, shape: ModelShape, grouping: Grouping, strategy: str = AUTO, group: int | str = AUTO
) -> list[Option]:
    """Price every strategy on every group size, smaller groups first; auto means all that are worth considering.

    Raises:
        BadInput: at run time, with fewer nodes than the group needs.
    """
    least = 2 if strategy in HYBRID and grouping.world > 1 else 1
    sizes = [s for s in grouping.sizes() if s >= least] if group == AUTO else [int(group)]
    fixed = only_group(strategy, grouping.world)
    options = []
    for placement in filter(None, map(grouping.place, [fixed] if fixed else sizes)):
        # a group that the user asked for remains a hybrid when it takes all nodes but the spares
        world = len(placement.used) * grouping.per_node if group == AUTO else grouping.world
        differing = ("no_shard",) if placement.group == 1 else WHOLE if placement.group == world else HYBRID
        names = differing if strategy == AUTO else (strategy,)
        options += [price(config, shape, name, placement) for name in names]
    if not options:
        raise BadInput([grouping.impossible(group)])
    if strategy == AUTO and grouping.world == 1 and not options[0].fits_well:
        # It frees blocks after their forward.
        options.append(price(config, shape, "full_shard", options[0].placement))
    return options


def choose(config: JobConfig, shape: ModelShape, topology: Topology, previous_group: int | None = None) -> Choice:
    """Choose the option for this topology; the user's configuration or the previous group size comes first.

    Of the options that fit, `fsdp.objective=speed` takes the shortest predicted step; among those within 3% of it,
    the fewest bytes between nodes, where 5% more count as equal, then the shortest ring between nodes, if it is above
    32 ranks, then the least memory, then the smallest group. `memory` takes the least memory.
    """
    grouping, strategy, group = Grouping(config, topology), config.fsdp.strategy, config.fsdp.shard_group
    options = options_of(config, shape, grouping)
    allowed = options if strategy == group == AUTO else options_of(config, shape, grouping, strategy, group)
    best, reason = _best(config, allowed)
    if previous_group is not None and group == AUTO and strategy in (AUTO, *HYBRID):
        best, reason = _held(config, allowed, best, reason, previous_group)
    reasons = [reason]
    if len(allowed) < len(options) and (unrestricted := _best(config, options)[0]).name != best.name:
        reasons.append(_criticism(config, best, unrestricted))
    if best not in options:
        options.append(best)
    if best.placement.crossing:
        reasons.append(f"{best.placement.crossing} of {best.layout.replicas} shard groups cross a leaf switch.")
    reasons += _spares_sentence(grouping, best.placement)
    return Choice(best, reasons, tuple(_considered(o, best) for o in options))


def choose_without_shape(config: JobConfig, topology: Topology) -> tuple[Layout, Placement, list[str]]:
    """Choose the layout of a program whose model is unknown, only by the topology and the configuration.

    `auto` is full_shard over all ranks: it takes the least memory, and uses any number of nodes. A hybrid's group
    is one node unless the user says otherwise. Returns the reasons, too.
    """
    grouping, strategy, group = Grouping(config, topology), config.fsdp.strategy, config.fsdp.shard_group
    per_node, world = grouping.per_node, grouping.world
    basis = "The model is not known, so memory comes first" if strategy == group == AUTO else "As configured"
    if strategy == AUTO:
        strategy = "no_shard" if group == 1 else "full_shard" if group in (AUTO, world) else "hybrid_shard"
    wanted = only_group(strategy, world) or (per_node if group == AUTO else int(group))
    placement = grouping.place(wanted)
    if placement is None:  # at run time, with fewer nodes than the group needs
        strategy, placement = "full_shard", grouping.place(world)
        assert placement is not None
    layout = Layout(strategy, len(placement.used) * per_node, placement.group)
    over = f"over {layout.shard_group} ranks" if layout.shard_group > 1 else "on every rank"
    node = ", a node" if layout.strategy in HYBRID and layout.shard_group == per_node else ""
    reason = f"{basis}: {layout.strategy} {over}{node}. The program finds it in {LAYOUT_ENV}."
    return layout, placement, [reason, *_spares_sentence(grouping, placement)]


def _spares_sentence(grouping: Grouping, placement: Placement) -> list[str]:
    names = [grouping.topology.nodes[i].name for i in placement.spares]
    one, many = "completes no shard group and stands by as a spare", "complete no shard group and stand by as spares"
    return [f"{listed(names)} {one if len(names) == 1 else many}."] if names else []


def _best(config: JobConfig, options: list[Option]) -> tuple[Option, str]:
    """Return the option to take and what decided; if none fits, the one that comes nearest."""
    fitting = [o for o in options if o.fits]
    if not fitting:
        nearest = min(options, key=lambda o: (o.memory.total, o.memory.host))
        return nearest, f"Nothing fits; {nearest.name} comes nearest: {_excess(config, nearest)}."

    def order(o: Option) -> tuple[int, float, str]:
        return o.layout.shard_group, o.sent, o.name

    fastest = min(fitting, key=lambda o: (o.time.step, o.memory.total, *order(o)))
    asked = "" if config.fsdp.strategy == config.fsdp.shard_group == AUTO else " asked for"
    if len(fitting) == 1:
        best, decided = fastest, f"is the only option{asked} that fits"
    elif config.fsdp.objective == "memory":
        best = min(fitting, key=lambda o: (o.memory.total, o.time.step, *order(o)))
        faster = f"{fastest.name} would be {best.time.step / fastest.time.step - 1:.0%} faster"
        decided = f"takes the least memory of the {len(fitting)} options{asked} that fit"
        decided += f" (fsdp.objective=memory; {faster})"
    else:
        near = left = [o for o in fitting if o.time.step <= NEAR * fastest.time.step]
        decided = ""
        for what, amount, alike in _CRITERIA:
            before, least = left, min(map(amount, left))
            left = [o for o in before if amount(o) <= alike * least]
            if len(left) < len(before):
                few = " that send few bytes between nodes" if len(before) < len(near) else ""
                within = f"within {NEAR - 1:.0%} of the shortest predicted step"
                decided = f"{what} of the {len(before)} options{asked} {within}{few}"
        best = min(left, key=lambda o: (o.time.step, o.name))
        if best is fastest:
            decided = f"has the shortest predicted step of the {len(fitting)} options{asked} that fit"
    need = f"{size(best.memory.total)} of {size(best.usable)} usable per {device_of(config)}"
    return best, f"{best.name} {decided}: {need}{best.closeness}{_where(best)}."


# What decides among options that are equally fast, in this order, and up to which ratio amounts are equal. Long rings
# between nodes are slower than predicted, so shorter ones come before less memory.
_CRITERIA: tuple[tuple[str, Callable[[Option], float], float], ...] = (
    ("sends the fewest bytes between nodes", lambda o: o.sent, _ALIKE),
    ("gathers over the fewest ranks", lambda o: max(_SHORT_RING, o.layout.shard_group) if o.sent else 1, 1.0),
    ("takes the least memory", lambda o: o.memory.total, 1.0),
    ("has the smallest shard group", lambda o: o.layout.shard_group, 1.0),
)


def _where(o: Option) -> str:
    if o.layout.strategy == "no_shard":
        return ", nothing is sharded"
    inside = o.placement.inside
    if o.layout.replicas == 1 or inside == "all":
        return ""
    units = {"domain": "one NVLink domain", "node": "one node", "leaf": "one leaf switch"}
    unit = units.get(inside, f"one switch {inside.removeprefix('switch-')} above the leaves")
    return f", each shard group inside {unit}"


def _excess(config: JobConfig, o: Option) -> str:
    """Describe by how much an option exceeds each limit, with the limit's key."""
    hardware, exceeded = config.hardware, []
    if o.over > 0:
        name, most = next(iter(o.memory.parts().items()))
        usable = f"the {size(o.usable)} usable per {device_of(config)} (hardware.memory_gib={hardware.memory_gib:g})"
        exceeded.append(f"{size(o.over)} over {usable}, {size(most)} of it {name}")
    if not o.host_fits:
        parts = {"offloaded": o.memory.host, "snapshots (checkpoint.memory)": o.memory.snapshots}
        needed = [f"{what} {size(n * ranks_per_node(config))}" for what, n in parts.items() if n]
        what = f"in host memory per node, of which 95% may be filled, {' and '.join(needed)}"
        exceeded.append(f"{what} (hardware.host_memory_gib={hardware.host_memory_gib:g})")
    return "; ".join(exceeded)


def _held(
    config: JobConfig, allowed: list[Option], best: Option, why_best: str, previous_group: int
) -> tuple[Option, str]:
    """Return the option of the previous group size if it is still good enough, else the best; and why."""
    same = [o for o in allowed if o.layout.shard_group == previous_group]
    if not same:
        return best, f"Regrouped from {previous_group}: no shard group of that size can be formed. {why_best}"
    held, _ = _best(config, same)
    gain = best.time.tokens_per_s / held.time.tokens_per_s
    if not held.fits and best.fits:
        why = "it no longer fits"
    elif best.spares < held.spares and gain > WORTH_REGROUPING and best.fits:
        left = f"the {held.spares} nodes it leaves" if held.spares > 1 else "the node it leaves"
        why = f"{left} idle give{'s' if held.spares == 1 else ''} {(gain - 1) * 100:.0f}% more tokens/s otherwise"
    else:
        return held, f"Held the shard group of {previous_group}; replicas are now {held.layout.replicas}."
    return best, f"Regrouped from {previous_group}: {why}. {why_best}"


def _considered(o: Option, best: Option) -> Considered:
    why = _why_not(o, best) if o != best else "chosen" if o.fits else "nearest to fitting"
    return Considered(o.name, o.fits, o.memory.total, o.traffic, o.time.step, o.time.tokens_per_s, why, o == best)


def _why_not(o: Option, best: Option) -> str:
    """Say in one sentence why an option was not taken."""
    if not o.fits:
        if o.over <= 0:
            return f"Takes {size(o.memory.host + o.memory.snapshots)} of host memory per rank: a node has less."
        name, most = next(iter(o.memory.parts().items()))
        return f"Over by {size(o.over)}: {size(most)} of {name}."
    change = o.time.tokens_per_s / best.time.tokens_per_s - 1
    speed = "as fast" if abs(change) < 0.005 else f"{abs(change):.0%} {'faster' if change > 0 else 'slower'}"
    sends = _sends(o, best)
    if o.spares > best.spares:
        return f"Leaves {o.spares} node{'s' if o.spares > 1 else ''} idle: {speed}{sends}."
    if o.layout.shard_group == best.layout.shard_group:
        more = o.memory.total - best.memory.total
        return f"The same group: {speed}{sends}, {size(abs(more))} {'more' if more > 0 else 'less'} memory."
    which = "larger" if o.layout.shard_group > best.layout.shard_group else "smaller"
    return f"A {which} group: {speed}{sends}."


def _sends(o: Option, other: Option) -> str:
    if not other.sent or abs(o.sent / other.sent - 1) <= _ALIKE - 1:
        return ""
    ratio = o.sent / other.sent
    return f", {ratio:{'.1f' if ratio > 1 else '.2g'}} x the bytes between nodes"


def _criticism(config: JobConfig, best: Option, unrestricted: Option) -> str:
    """Describe the option that the plan would choose if the configuration did not exclude it."""
    if unrestricted.fits and not best.fits:
        return f"As configured it does not fit; left to itself the plan takes {unrestricted.name}, which does."
    change = (unrestricted.time.tokens_per_s / best.time.tokens_per_s - 1) * 100
    saved = best.memory.total - unrestricted.memory.total
    memory = f"{size(abs(saved))} {'less' if saved > 0 else 'more'} memory per {device_of(config)}"
    gain = f"{change:+.0f}% tokens/s predicted, {memory}{_sends(unrestricted, best)}"
    return f"As configured; left to itself the plan takes {unrestricted.name}: {gain}."
