"""Resolve `auto`: one answer to each question that the plan, the launchers and the ranks all ask. No torch."""

from __future__ import annotations

from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.keys import AUTO
from fsdp_jobs.config.schema import CustomModelConfig, ElasticConfig, FsdpConfig, HardwareConfig, JobConfig

LOGITS_AT_ONCE = 2**27
PROGRAMS_STALL_S = 1800.0  # a user's program may evaluate or do other long work between steps


def accelerator(config: JobConfig) -> str:
    """Return cpu or cuda, for which the job is planned and its nodes are requested.

    `cluster.accelerator` decides; where it is auto, the assumed hardware does.
    """
    chosen = config.cluster.accelerator
    return config.hardware.accelerator if chosen == AUTO else chosen


def accelerator_of_node(config: JobConfig, gpus: int, ranks: int) -> str:
    """Return cpu or cuda, on which the `ranks` ranks of a node that sees `gpus` GPUs run.

    With `cluster.accelerator=auto` they take the GPUs if there is one for each of them.
    """
    chosen = config.cluster.accelerator
    if chosen == AUTO:
        return "cuda" if gpus >= ranks else "cpu"
    return chosen


def backend(config: JobConfig) -> str:
    """Return nccl or gloo, the library that the job's collectives are priced for."""
    return "nccl" if accelerator(config) == "cuda" else "gloo"


def ranks_per_node(config: JobConfig) -> int:
    """Return `nproc_per_node`; auto is one rank per device of the assumed hardware.

    Raises:
        BadInput: not a number of at least 1.
    """
    if config.nproc_per_node == AUTO:
        return config.hardware.gpus_per_node
    ranks = config.nproc_per_node
    if not isinstance(ranks, int) or ranks < 1:
        raise BadInput([Problem(f"nproc_per_node={ranks}", "is neither auto nor a number of at least 1")])
    return int(ranks)  # true is a number to YAML


def silence_s(elastic: ElasticConfig) -> float:
    """Return for how many seconds a program that reports no steps may do nothing: `stall_timeout_s`, or its default."""
    return elastic.stall_timeout_s or PROGRAMS_STALL_S


def node_range(nodes: int | str) -> tuple[int, int]:
    """Return the minimum and maximum number of nodes: `4` is (4, 4), `"2:4"` is (2, 4).

    Raises:
        BadInput: not of these two forms, below 1, or the minimum above the maximum.
    """
    where, instead = f"nodes={nodes}", 'nodes=4, or nodes=2:4 for "at least 2, at most 4"'
    low, colon, high = str(nodes).partition(":")
    try:
        least, most = int(low), int(high if colon else low)
    except ValueError:
        raise BadInput([Problem(where, "is neither a number nor min:max", instead)]) from None
    if least < 1:
        raise BadInput([Problem(where, "a job needs at least 1 node", instead)])
    if least > most:
        raise BadInput([Problem(where, "the minimum is above the maximum", f"did you mean {most}:{least}?")])
    return least, most


def param_dtype(fsdp: FsdpConfig, device: str) -> str:
    """Return fp32, bf16 or fp16, in which parameters are gathered and computed with; auto is bf16 on CUDA.

    Args:
        device: cpu or cuda.
    """
    if fsdp.param_dtype == AUTO:
        return "bf16" if device == "cuda" else "fp32"
    return fsdp.param_dtype


def probe_every_steps(config: JobConfig) -> int:
    """Return the steps between two probes, 0 for none; auto is off for models whose code may hold state of any kind."""
    chosen = config.integrity.probe_every_steps
    if config.is_program:
        return 0
    if chosen == AUTO:
        return 0 if isinstance(config.model, CustomModelConfig) else 1000
    return int(chosen)


def output_dtype(fsdp: FsdpConfig) -> str | None:
    """Return the dtype that the model's output is cast to, None for no cast."""
    return None if fsdp.output_dtype == AUTO else fsdp.output_dtype


def loss_chunk(fsdp: FsdpConfig, tokens: int, vocabulary: int, planned: bool | None = None) -> int:
    """Return the tokens of a microbatch whose logits exist at once in the loss; 0: all of them.

    A chunk has about 2^27 logits, at least 256 tokens. fp16's loss scaling and a cast of the output need whole logits.

    Args:
        planned: the plan's decision, which auto follows; None: there is no plan, and auto means above 2^27 logits.
    """
    is_possible = fsdp.param_dtype != "fp16" and output_dtype(fsdp) is None
    wanted = planned if fsdp.chunked_loss == AUTO else fsdp.chunked_loss
    if wanted is None:
        wanted = tokens * vocabulary > LOGITS_AT_ONCE
    return max(256, LOGITS_AT_ONCE // vocabulary) if wanted and vocabulary and is_possible else 0


def peak_flops(hardware: HardwareConfig, dtype: str) -> float:
    """Return the dense peak of one device for matmuls in `dtype`, FLOP/s; conf/hardware names the sources."""
    return (hardware.fp32_tflops if dtype == "fp32" else hardware.bf16_tflops) * 1e12
