"""Resolve `auto` in one place for the plan, the launchers and the ranks. No torch."""

from __future__ import annotations

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.keys import AUTO
from fsdp_jobs.config.schema import CustomModelConfig, ElasticConfig, FsdpConfig, HardwareConfig, JobConfig

LOGITS_AT_ONCE = 2**27
PROGRAMS_STALL_S = 1800.0  # a user's program may evaluate or do other long work between steps


def accelerator(config: JobConfig) -> str:
    """Return cpu or cuda: what the job is planned for and its nodes are requested with.

    `cluster.accelerator` decides or, if it is auto, the assumed hardware.
    """
    chosen = config.cluster.accelerator
    return config.hardware.accelerator if chosen == AUTO else chosen


def accelerator_of_node(config: JobConfig, gpus: int, ranks: int) -> str:
    """Return cpu or cuda: the devices for the `ranks` ranks of a node that sees `gpus` GPUs.

    With `cluster.accelerator=auto` the ranks use the GPUs if there is one for each rank.
    """
    chosen = config.cluster.accelerator
    if chosen == AUTO:
        return "cuda" if gpus >= ranks else "cpu"
    return chosen


def backend(config: JobConfig) -> str:
    """Return nccl or gloo, the library for which the plan predicts the time of collectives."""
    return "nccl" if accelerator(config) == "cuda" else "gloo"


def ranks_per_node(config: JobConfig) -> int:
    """Return `nproc_per_node`; auto is one rank per device of the assumed hardware.

    Raises:
        BadInput: it is not a number of at least 1.
    """
    if config.nproc_per_node == AUTO:
        return config.hardware.gpus_per_node
    ranks = config.nproc_per_node
    if not isinstance(ranks, int) or ranks < 1:
        raise BadInput.at(f"nproc_per_node={ranks}", "is neither auto nor a number of at least 1", "nproc_per_node=8")
    return int(ranks)  # YAML reads true as a number


def silence_s(elastic: ElasticConfig) -> float:
    """Return for how many seconds a program that reports no steps may be silent: `stall_timeout_s` or its default."""
    return elastic.stall_timeout_s or PROGRAMS_STALL_S


_MOST_NODES = 100_000


def node_range(nodes: int | str) -> tuple[int, int]:
    """Return the minimum and maximum number of nodes: `4` is (4, 4), `"2:4"` is (2, 4).

    Raises:
        BadInput: it has neither of these forms, is below 1, or the minimum exceeds the maximum.
    """
    where, instead = f"nodes={nodes}", 'nodes=4, or nodes=2:4 for "at least 2, at most 4"'
    low, colon, high = str(nodes).partition(":")
    try:
        least, most = int(low), int(high if colon else low)
    except ValueError:
        raise BadInput.at(where, "is neither a number nor min:max", instead) from None
    if least < 1:
        raise BadInput.at(where, "a job needs at least 1 node", instead)
    if most > _MOST_NODES:
        raise BadInput.at(where, f"no cluster has more than {_MOST_NODES} nodes", instead)
    if least > most:
        raise BadInput.at(where, "the minimum is above the maximum", f"did you mean {most}:{least}?")
    return least, most


def least_nodes(config: JobConfig) -> int:
    """Return the minimum number of a job's nodes."""
    return node_range(config.nodes)[0]


def most_nodes(config: JobConfig) -> int:
    """Return the maximum number of a job's nodes."""
    return node_range(config.nodes)[1]


def param_dtype(fsdp: FsdpConfig, device: str) -> str:
    """Return fp32, bf16 or fp16, the dtype of gathered parameters and of computation; auto is bf16 on CUDA.

    Args:
        device: cpu or cuda.
    """
    if fsdp.param_dtype == AUTO:
        return "bf16" if device == "cuda" else "fp32"
    return fsdp.param_dtype


def probe_every_steps(config: JobConfig) -> int:
    """Return the steps between two probes, 0 for none; auto is off for models whose code may hold any kind of state."""
    chosen = config.integrity.probe_every_steps
    if config.is_program:
        return 0
    if chosen == AUTO:
        return 0 if isinstance(config.model, CustomModelConfig) else 1000
    return int(chosen)


def output_dtype(fsdp: FsdpConfig) -> str | None:
    """Return the dtype to which the model's output is cast, None for no cast."""
    return None if fsdp.output_dtype == AUTO else fsdp.output_dtype


def loss_chunk(fsdp: FsdpConfig, tokens: float, vocabulary: int, planned: bool | None = None) -> int:
    """Return how many tokens of a microbatch have logits in memory at once in the loss; 0: all tokens.

    A chunk has about 2^27 logits, but at least 256 tokens. fp16's loss scaling and a cast of the output need all of
    them.

    Args:
        planned: the plan's decision, which auto follows; None without a plan: auto chunks above 2^27 logits.
    """
    is_possible = fsdp.param_dtype != "fp16" and output_dtype(fsdp) is None
    wanted = planned if fsdp.chunked_loss == AUTO else fsdp.chunked_loss
    if wanted is None:
        wanted = tokens * vocabulary > LOGITS_AT_ONCE
    return max(256, LOGITS_AT_ONCE // vocabulary) if wanted and vocabulary and is_possible else 0


def peak_flops(hardware: HardwareConfig, dtype: str) -> float:
    """Return the dense peak of one device for matmuls in `dtype`, FLOP/s; conf/hardware names the sources."""
    return (hardware.fp32_tflops if dtype == "fp32" else hardware.bf16_tflops) * 1e12


def seconds_per_byte(gb_s: float) -> float:
    """Return the time of a byte at a rate in GB/s; 0 for a rate of 0, which means unknown."""
    return 1 / (gb_s * 1e9) if gb_s else 0.0
