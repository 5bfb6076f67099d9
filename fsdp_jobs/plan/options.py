"""One way to shard a job, priced: memory, traffic, time. The plan chooses among these."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.resolve import accelerator, backend, param_dtype, ranks_per_node
from fsdp_jobs.config.schema import AUTO, HardwareConfig, JobConfig, LlamaConfig
from fsdp_jobs.plan.grouping import Placement, group_sizes, place
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.plan.memory import DTYPE_BYTES, GIB, MARGIN, Memory, peak_memory
from fsdp_jobs.plan.shapes import ModelShape, llama_shape
from fsdp_jobs.plan.step_time import StepTime, step_time
from fsdp_jobs.plan.topology import Topology
from fsdp_jobs.plan.traffic import BACKENDS, Traffic, node_traffic, ring_bytes


@dataclass(frozen=True)
class Option:
    """A strategy over a shard group, with what it costs."""

    layout: Layout
    inside: str  # the unit that no shard group leaves: domain, node, leaf, switch-K, all
    crossing: int  # shard groups under more than one leaf switch
    nodes: int  # nodes used
    spares: int
    microbatches: int  # of one rank in a step
    memory: Memory
    fits: bool
    traffic: dict[str, Traffic]  # by backend: nccl, gloo
    time: StepTime

    @property
    def name(self) -> str:
        layout = self.layout
        if layout.strategy == "no_shard":
            return f"no_shard on {layout.world_size}"
        return f"{layout.strategy} over {layout.shard_group}" + (f" x {layout.replicas}" if layout.replicas > 1 else "")


def shape_of(config: JobConfig) -> ModelShape:
    """The configured model's shape, without torch.

    Raises:
        BadInput: a custom model, whose shape must be probed first (planning/probe.py) and handed in.
    """
    if isinstance(config.model, LlamaConfig):
        return llama_shape(config.model, config.fsdp.wrap, config.fsdp.min_num_params, accelerator(config))
    raise BadInput(
        [Problem(f"model={config.model.kind}", "its shape is not known here", "probe it: fsdp_jobs.plan.shape_client")]
    )


def usable_bytes(hardware: HardwareConfig) -> int:
    """Device bytes that a plan may fill: the memory less the margin."""
    return int(hardware.memory_gib * GIB * (1 - MARGIN))


def price(config: JobConfig, shape: ModelShape, strategy: str, placement: Placement) -> Option:
    """Memory, traffic and time of one strategy on one placement.

    `fsdp.accumulate_unsharded=auto` saves the traffic between microbatches where the memory is there for it.
    """
    if config.fsdp.accumulate_unsharded == AUTO:
        silent = _price(config, shape, strategy, placement, True)
        if silent.fits and silent.microbatches > 1 and placement.group > 1:
            return silent
        return _price(config, shape, strategy, placement, False)
    return _price(config, shape, strategy, placement, bool(config.fsdp.accumulate_unsharded))


def _price(config: JobConfig, shape: ModelShape, strategy: str, placement: Placement, unsharded: bool) -> Option:
    per_node = ranks_per_node(config)
    layout = Layout(strategy, len(placement.used) * per_node, placement.group, unsharded)
    device = accelerator(config)
    dtype = param_dtype(config.fsdp, device)
    per_rank = -(-config.data.global_batch // layout.world_size)  # samples of the busiest rank in a step
    data = replace(config.data, micro_batch=min(config.data.micro_batch, per_rank))
    microbatches = -(-per_rank // data.micro_batch)
    memory = peak_memory(shape, layout, config.fsdp, data, device, microbatches)
    rings = {b: ring_bytes(shape, layout, config.fsdp, DTYPE_BYTES[dtype], microbatches, b) for b in BACKENDS}
    host = config.hardware.host_memory_gib * GIB
    host_fits = not host or memory.host * per_node <= host * (1 - MARGIN)
    return Option(
        layout=layout,
        inside=placement.inside,
        crossing=placement.crossing,
        nodes=len(placement.used),
        spares=len(placement.spares),
        microbatches=microbatches,
        memory=memory,
        fits=memory.total <= usable_bytes(config.hardware) and host_fits,
        traffic={b: node_traffic(r, layout, per_node) for b, r in rings.items()},
        time=step_time(
            shape,
            layout,
            config.fsdp,
            data,
            config.hardware,
            rings[backend(config)],
            per_node,
            dtype,
            placement.inside == "domain",
        ),
    )


def strategies_for(group: int, world: int) -> tuple[str, ...]:
    """Strategies that differ from each other at this group size."""
    if group == 1:
        return ("no_shard",)
    if group == world:
        return ("full_shard", "shard_grad_op")
    return ("hybrid_shard", "hybrid_shard_zero2")


def all_options(config: JobConfig, shape: ModelShape, topology: Topology) -> list[Option]:
    """Every strategy on every group size worth considering, smaller groups first."""
    per_node, domain = ranks_per_node(config), config.hardware.nvlink_domain
    options = []
    for group in group_sizes(topology, per_node, domain):
        placement = place(topology, group, per_node, domain)
        if placement is not None:
            world = len(placement.used) * per_node
            options += [price(config, shape, s, placement) for s in strategies_for(group, world)]
    return options
