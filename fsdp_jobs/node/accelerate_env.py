"""The FSDP policy of a job as variables that Accelerate reads; the agent sets them for ranks of programs."""

from __future__ import annotations

import os

from fsdp_jobs.config.resolve import param_dtype
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.plan.layout import HYBRID, Layout

_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
_WRAP = {"layer": "TRANSFORMER_BASED_WRAP", "size": "SIZE_BASED_WRAP", "none": "NO_WRAP"}


def environment(config: JobConfig, layout: Layout, accelerator: str) -> dict[str, str]:
    """Return the variables that `accelerate launch` sets for this layout: FSDP2, or DDP for no_shard.

    Variables that the user's environment sets keep their values.

    Args:
        accelerator: of this node, "cuda" or "cpu".
    """
    fsdp = config.fsdp
    variables: dict[str, object] = {
        "ACCELERATE_MIXED_PRECISION": _PRECISION[param_dtype(fsdp, accelerator)],
        "ACCELERATE_USE_CPU": accelerator == "cpu",
        "ACCELERATE_USE_FSDP": layout.shard_group > 1,
    }
    if fsdp.compile:
        variables |= {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": True}
    if layout.shard_group > 1:
        variables |= {
            "FSDP_VERSION": 2,
            "FSDP_RESHARD_AFTER_FORWARD": layout.reshard_after_forward,
            "FSDP_OFFLOAD_PARAMS": fsdp.cpu_offload,
            "FSDP_AUTO_WRAP_POLICY": _WRAP[fsdp.wrap],
            "FSDP_MIN_NUM_PARAMS": fsdp.min_num_params,
            "FSDP_ACTIVATION_CHECKPOINTING": fsdp.activation_checkpointing != "none",
            "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": fsdp.activation_offload,
            "FSDP_CPU_RAM_EFFICIENT_LOADING": fsdp.meta_init,
            "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        }
        if fsdp.wrap == "layer" and config.model.wrap_classes:
            variables["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(config.model.wrap_classes)
        if layout.strategy in HYBRID:
            variables |= {
                "ACCELERATE_USE_PARALLELISM_CONFIG": True,
                "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": layout.replicas,
                "PARALLELISM_CONFIG_DP_SHARD_SIZE": layout.shard_group,
            }
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in variables.items()}
    return texts | {name: os.environ[name] for name in texts.keys() & os.environ.keys()}
