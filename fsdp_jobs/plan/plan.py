"""The plan: how a job is sharded over the nodes it gets, what that costs, and why not otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.keys import AUTO
from fsdp_jobs.config.resolve import accelerator, backend, node_range, param_dtype, ranks_per_node
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.plan.choose import Considered, Option, choose, choose_without_shape, usable_bytes
from fsdp_jobs.plan.goodput import Expected, expect
from fsdp_jobs.plan.grouping import Grouping
from fsdp_jobs.plan.layout import HYBRID, Layout, only_group, partners
from fsdp_jobs.plan.memory import Memory
from fsdp_jobs.plan.remedies import Remedy, advice, remedies
from fsdp_jobs.plan.shape_client import shape_of
from fsdp_jobs.plan.shapes import ModelShape
from fsdp_jobs.plan.step_time import ATTENTION_UNKNOWN, StepTime
from fsdp_jobs.plan.topology import Node, Topology
from fsdp_jobs.plan.traffic import Traffic
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.goodput import Costs, Failures
from fsdp_jobs.run.record import Record
from fsdp_jobs.run.table import listed, size


@dataclass(frozen=True)
class Plan(Record):
    """A decided sharding. Node i of `nodes` holds ranks [i x ranks_per_node, (i + 1) x ranks_per_node).

    A program's own model is unknown: memory, traffic and time are missing, and `fits` promises nothing.
    """

    model: str
    parameters: int
    hardware: str
    backend: str  # nccl | gloo
    layout: Layout
    ranks_per_node: int
    nodes: tuple[str, ...]  # in rank order
    leaves: tuple[str, ...]  # each node's leaf switch, empty when flat
    spares: tuple[str, ...]
    inside: str  # unit that holds each shard group: domain, node, leaf, switch-K, all
    crossing: int  # groups that cross a leaf switch
    microbatches: int  # of one rank in an optimizer step; 0: unknown
    fits: bool
    memory: Memory | None
    usable_bytes: int  # of one device, less the margin
    traffic: dict[str, Traffic]  # per node and step, by backend
    time: StepTime | None
    considered: tuple[Considered, ...]
    reasons: tuple[str, ...]
    remedies: tuple[Remedy, ...]
    expected: Expected

    @property
    def snapshot_bytes(self) -> int:
        """Return the host memory per node that snapshots take; 0 also if the model is unknown."""
        return self.ranks_per_node * self.memory.snapshots if self.memory is not None else 0

    @classmethod
    def of(cls, run: RunDir) -> Plan | None:
        """Return the plan of a run's newest submission; None if there is none that this version can read."""
        with suppress(BadInput):
            return cls.from_file(run.plan)
        return None


def make_plan(
    config: JobConfig,
    topology: Topology | None = None,
    nodes: int | None = None,
    shape: ModelShape | None = None,
    seek_remedies: bool = True,
    costs: Costs | None = None,
    seen: Failures | None = None,
    previous_group: int | None = None,
) -> Plan:
    """Decide how the job is sharded.

    Args:
        config: the job.
        topology: where its nodes are; without one, all are assumed to be under one switch.
        nodes: how many of them take part; by default the job's maximum, or all of a smaller topology.
        shape: the model's, if it is known already; else it is found, which may take a process (`shape_of`).
        seek_remedies: find settings that make an oversized job fit, or better ones; each try is a plan.
        costs: of checkpoints and restarts, measured on this run.
        seen: failures that this cluster had.
        previous_group: at run time, ranks of a shard group until now: all nodes of the topology take part, and the
            size is kept. It changes if the job no longer fits with it, if no group of it can be formed, or if another
            size gains enough by using more of the nodes; the first reason says which.

    Raises:
        BadInput: a shard group cannot be formed, or the topology has too few nodes or GPUs.
    """
    low, high = node_range(config.nodes)
    topology = topology or Topology.flat(nodes or high, ranks_per_node(config))
    least, most = nodes or low, nodes or high
    if previous_group is not None:
        least = most = len(topology.nodes)
    topology, notes = _settled(config, topology, least, most)
    if previous_group is None and (problems := list(sharding_problems(config, topology))):
        raise BadInput(problems)
    if (chosen := accelerator(config)) != config.hardware.accelerator:
        asks = f"the job asks for {'GPUs' if chosen == 'cuda' else 'no GPUs'} (cluster.accelerator={chosen})"
        notes.append(f"Warning: the plan is for hardware={config.hardware.name}, but {asks}: change one of the two.")
    shape = shape or shape_of(config)
    option: Option | None = None
    considered: tuple[Considered, ...] = ()
    found: Sequence[Remedy] = ()
    if shape is None:
        layout, placement, reasons = choose_without_shape(config, topology)
    else:
        if problems := list(_hardware_problems(config)):
            raise BadInput(problems)
        notes += _left_out(config, shape, topology)
        choice = choose(config, shape, topology, previous_group)
        option, reasons, considered = choice.option, choice.reasons, choice.considered
        layout, placement = option.layout, option.placement
        if option.fits and previous_group is None and low < min(high, len(topology.nodes)):
            notes.append(_at_minimum(config, shape, topology, low))
        if seek_remedies and option.fits:
            notes += advice(config, shape, topology, option)
        elif seek_remedies:
            found = remedies(config, shape, topology)
    used = [topology.nodes[i] for i in placement.used]
    if config.checkpoint.memory.every_steps:
        notes += _where_snapshots_are(layout, used)
    memory, time = (option.memory, option.time) if option else (None, None)
    return Plan(
        model=config.model.kind,
        parameters=shape.numel if shape else 0,
        hardware=config.hardware.name,
        backend=backend(config),
        layout=layout,
        ranks_per_node=ranks_per_node(config),
        nodes=tuple(n.name for n in used),
        leaves=tuple(n.switch_path[-1] if n.switch_path else "" for n in used),
        spares=tuple(topology.nodes[i].name for i in placement.spares),
        inside=placement.inside,
        crossing=placement.crossing,
        microbatches=option.microbatches if option else 0,
        fits=option is None or option.fits,
        memory=memory,
        usable_bytes=usable_bytes(config.hardware),
        traffic=option.traffic if option else {},
        time=time,
        considered=considered,
        reasons=(*notes, *reasons),
        remedies=tuple(found),
        expected=expect(config, layout, len(used), memory, time.step if time else 0.0, costs, seen),
    )


def _settled(config: JobConfig, topology: Topology, low: int, high: int) -> tuple[Topology, list[str]]:
    """Return the topology of the `low` to `high` nodes that take part, and what was assumed about it."""
    per_node = ranks_per_node(config)
    if low > len(topology.nodes):
        what = f"the topology has {len(topology.nodes)} nodes"
        raise BadInput.at(f"nodes={low}", what, f"nodes={len(topology.nodes)}, or a topology with more")
    topology = topology.first(high)
    few = [n for n in topology.nodes if n.gpus < per_node]
    if few:
        what = f"{len(few)} nodes have fewer GPUs, {few[0].name} has {few[0].gpus}"
        raise BadInput.at(f"nproc_per_node={per_node}", what, f"nproc_per_node={min(n.gpus for n in few)}")
    unknown = [n.name for n in topology.nodes if not n.switch_path]
    if len(unknown) in (0, len(topology.nodes)):
        return topology, []
    alone = Topology.of(replace(n, switch_path=n.switch_path or (f"leaf-of-{n.name}",)) for n in topology.nodes)
    return alone, [f"Warning: the switches of {listed(unknown)} are unknown; each counts as its own leaf switch."]


def sharding_problems(config: JobConfig, topology: Topology) -> Iterator[Problem]:
    """Yield the reasons why the configured sharding cannot be formed on these nodes."""
    strategy, group, grouping = config.fsdp.strategy, config.fsdp.shard_group, Grouping(config, topology)
    where, world = f"fsdp.shard_group={group}", grouping.world
    if strategy in HYBRID and world == 1:
        yield Problem(f"fsdp.strategy={strategy}", "a hybrid needs at least 2 ranks", "fsdp=no_shard")
    elif group == AUTO:
        return
    elif not isinstance(group, int) or group < 1:
        yield Problem(where, "must be auto or a number of ranks", f"fsdp.shard_group={grouping.per_node}")
    elif (fixed := only_group(strategy, world) or group) != group:
        what = f"{strategy} over {world} ranks always has a shard group of {fixed}"
        yield Problem(where, what, "leave shard_group=auto, or choose fsdp=hybrid_shard")
    elif grouping.place(group) is None:
        yield grouping.impossible(group)


def _hardware_problems(config: JobConfig) -> Iterator[Problem]:
    """Yield the numbers of the assumed hardware without which memory and time of a model cannot be predicted."""
    dtype = "fp32" if param_dtype(config.fsdp, accelerator(config)) == "fp32" else "bf16"
    for key in ("memory_gib", f"{dtype}_tflops"):
        if (value := getattr(config.hardware, key)) <= 0:
            cure = "that of the data sheet" + ", or fp16's" * (key == "bf16_tflops")
            yield Problem(f"hardware.{key}={value:g}", "a plan needs a number above 0", cure)


def _left_out(config: JobConfig, shape: ModelShape, topology: Topology) -> Iterator[str]:
    """Yield what the prediction leaves out or has wrong: frozen parameters, numbers of the hardware."""
    if shape.frozen:
        share = f"{shape.frozen / shape.numel:.0%} of the parameters are frozen"
        yield f"{share}: the plan counts no gradients and moments for them; backward makes only those of their inputs."
    if shape.unmeasured:
        why = f"the model's forward could not be measured ({shape.unmeasured})"
        yield f"Warning: {why}: memory lacks all activations, and time is 6 FLOPs per parameter and token."
    ranks, gpus = ranks_per_node(config), config.hardware.gpus_per_node
    if accelerator(config) == "cuda" and ranks > gpus:
        why = f"a node of {config.hardware.name} has {gpus} GPUs (hardware.gpus_per_node), and each rank needs its own"
        yield f"Warning: nproc_per_node={ranks}: {why}."
    is_offloaded = config.fsdp.cpu_offload or config.fsdp.activation_offload
    attends = param_dtype(config.fsdp, accelerator(config)) != "fp32" and shape.activations.attention_width > 0
    uses = (
        ("attention_tflops", f"takes {ATTENTION_UNKNOWN:.0%} of the matmul rate for attention", attends),
        ("intra_node_gb_s", "counts no time for traffic inside nodes", ranks > 1),
        ("inter_node_gb_s", "counts no time for traffic between nodes", len(topology.nodes) > 1),
        ("memory_gb_s", "counts no time for elementwise work and the optimizer", accelerator(config) == "cuda"),
        ("host_gb_s", "counts no time for copies to and from the host", is_offloaded),
        ("host_memory_gib", "does not ask whether the host has the memory for what is offloaded", is_offloaded),
    )
    for key, lack, is_used in uses:
        if is_used and not getattr(config.hardware, key):
            yield f"Warning: hardware.{key} is not set: the prediction {lack}."
    attention, peak = config.hardware.attention_tflops, config.hardware.bf16_tflops
    if attention > peak:
        what = f"hardware.attention_tflops={attention:g} is above hardware.bf16_tflops={peak:g}"
        yield f"Warning: {what}: set the rate of this GPU, or 0."


def _where_snapshots_are(layout: Layout, nodes: Sequence[Node]) -> Iterator[str]:
    """Yield which snapshots have no second copy in memory, or none in another failure domain."""
    if len(nodes) == 1:
        yield "Snapshots in memory have no copy: there is one node, and what is lost with it is read from a disk."
    elif layout.replicas == 1 and not all(node.switch_path for node in nodes):
        yield "Snapshots in memory are copied to the node that is half of all nodes away; no switches are known."
    elif layout.replicas == 1:
        pairs = zip(nodes, (nodes[i] for i in partners(len(nodes)) if i is not None), strict=True)
        if near := [node.name for node, other in pairs if node.switch_path[-1] == other.switch_path[-1]]:
            where = "under their own leaf switch, which has most nodes"
            yield f"Warning: the snapshots of {listed(near)} are copied {where}."


def _at_minimum(config: JobConfig, shape: ModelShape, topology: Topology, low: int) -> str:
    option = choose(config, shape, topology.first(low)).option
    if option.fits:
        return f"At the minimum of {low} nodes it still fits: {option.name}."
    return f"At the minimum of {low} nodes it does NOT fit: {option.name} is {size(option.over)} over."
