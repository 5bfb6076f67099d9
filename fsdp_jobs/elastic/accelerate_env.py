"""The FSDP policy of a job as environment variables that Accelerate's Accelerator reads."""

from __future__ import annotations

from fsdp_jobs.config.resolve import param_dtype
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.plan.layout import HYBRID, Layout

_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
_WRAP = {"layer": "TRANSFORMER_BASED_WRAP", "size": "SIZE_BASED_WRAP", "none": "NO_WRAP"}


def environment(config: JobConfig, layout: Layout, accelerator: str) -> dict[str, str]:
    """Return what `accelerate launch` would set for this layout with FSDP2; no_shard is left to its DDP.

    Args:
        accelerator: "cuda" or "cpu", as this node has it.
    """
    fsdp = config.fsdp
    dtype = param_dtype(fsdp, accelerator)
    variables = {"ACCELERATE_MIXED_PRECISION": _PRECISION[dtype], "ACCELERATE_USE_CPU": _word(accelerator == "cpu")}
    if fsdp.compile:
        variables |= {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true"}
    variables["ACCELERATE_USE_FSDP"] = _word(layout.shard_group > 1)
    if layout.shard_group == 1:
        return variables
    variables |= {
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": _word(layout.reshard_after_forward),
        "FSDP_OFFLOAD_PARAMS": _word(fsdp.cpu_offload),
        "FSDP_AUTO_WRAP_POLICY": _WRAP[fsdp.wrap],
        "FSDP_MIN_NUM_PARAMS": str(fsdp.min_num_params),
        "FSDP_ACTIVATION_CHECKPOINTING": _word(fsdp.activation_checkpointing != "none"),
        "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": _word(fsdp.activation_offload),
        "FSDP_CPU_RAM_EFFICIENT_LOADING": _word(fsdp.meta_init),
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    }
    if fsdp.wrap == "layer" and config.model.wrap_classes:
        variables["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(config.model.wrap_classes)
    if layout.strategy in HYBRID:
        variables |= {
            "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
            "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": str(layout.replicas),
            "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(layout.shard_group),
        }
    return variables


def _word(value: bool) -> str:
    return str(value).lower()
