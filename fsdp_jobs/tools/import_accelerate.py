"""Convert a file of `accelerate config`: each of its keys becomes an override, a note or a problem."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from rich.console import Console

from fsdp_jobs.config.errors import BadInput, Problem, nearest
from fsdp_jobs.run.directory import write_atomic


def _is_true(value: Any) -> bool:
    return str(value).lower() in ("true", "yes", "1")


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def _names(value: Any) -> list[str] | None:
    return ([name.strip() for name in value.split(",")] if isinstance(value, str) else list(value)) if value else None


_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")  # numbered from 1
_GROUPS = {"fsdp_config": "fsdp_", "parallelism_config": "parallelism_config_", "dynamo_config": "dynamo_"}
_OTHER_TRAINING = ("fp8_config", "deepspeed_config", "megatron_lm_config", "mpirun_config")

# Accelerate's key -> our key, and how its value is converted; None sets nothing.
_RENAMED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "num_machines": ("nodes", lambda v: int(float(v))),
    "use_cpu": ("cluster.accelerator", lambda v: "cpu" if _is_true(v) else None),
    "fsdp_offload_params": ("fsdp.cpu_offload", _is_true),
    "fsdp_transformer_layer_cls_to_wrap": ("model.wrap_classes", _names),
    "fsdp_min_num_params": ("fsdp.min_num_params", lambda v: int(float(v)) if v else None),
    "fsdp_forward_prefetch": ("fsdp.forward_prefetch", lambda v: int(_is_true(v))),
    "fsdp_cpu_ram_efficient_loading": ("fsdp.meta_init", _is_true),
    "fsdp_activation_checkpointing": ("fsdp.activation_checkpointing", lambda v: "full" if _is_true(v) else "none"),
    "fsdp_activation_checkpointing_offload": ("fsdp.activation_offload", _is_true),
}


def _dtypes(dtype: str) -> dict[str, Any]:
    """Accelerate reduces gradients and returns outputs in the dtype of the parameters."""
    return {f"fsdp.{use}_dtype": dtype for use in ("param", "reduce", "output")}


# Accelerate's key -> its value -> our values
_CHOICES: dict[str, dict[str, dict[str, Any]]] = {
    "compute_environment": {"LOCAL_MACHINE": {}},
    "distributed_type": {
        "FSDP": {},
        "MULTI_GPU": {"fsdp.strategy": "no_shard"},
        "MULTI_CPU": {"fsdp.strategy": "no_shard", "cluster.accelerator": "cpu"},
        "NO": {"fsdp.strategy": "no_shard"},
    },
    "mixed_precision": {"no": {"fsdp.param_dtype": "fp32"}, "bf16": _dtypes("bf16"), "fp16": _dtypes("fp16")},
    "fsdp_auto_wrap_policy": {
        "TRANSFORMER_BASED_WRAP": {"fsdp.wrap": "layer"},
        "SIZE_BASED_WRAP": {"fsdp.wrap": "size"},
        "NO_WRAP": {"fsdp.wrap": "none"},
    },
    "dynamo_backend": {"NO": {}, "INDUCTOR": {"fsdp.compile": True}},
}

_TPU_KEYS = ("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm", "tpu_env")
_SIZES = tuple(f"parallelism_config_{kind}_size" for kind in ("tp", "cp", "sp"))

# Accelerate's key -> whether a value asks for it, why that is not available, what to write instead
_UNAVAILABLE: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    **dict.fromkeys(_OTHER_TRAINING, (bool, "is for another kind of training", "FSDP, without it")),
    **dict.fromkeys(_TPU_KEYS, (bool, "is for TPUs", "leave it out")),
    **dict.fromkeys(_SIZES, (lambda v: int(v) > 1, "jobs are data parallel: sharded and replicated", "1")),
    "downcast_bf16": (_is_true, "is for TPUs", "leave it out"),
    "fsdp_ignored_modules": (bool, "every parameter is sharded here", "leave it out"),
}

_SP_KEYS = ("backend", "seq_length", "seq_length_is_variable", "attn_implementation")
_PREFETCH_KEYS = ("fsdp_backward_prefetch", "fsdp_backward_prefetch_policy")  # the second is of older versions

# Accelerate's key -> why it sets nothing
_NOTES = {
    "compute_environment": "cluster= chooses where a job runs",
    "machine_rank": "the coordinator numbers the nodes",
    "main_process_ip": "the job's coordinator has an address of its own",
    "main_process_port": "the job's coordinator chooses a port",
    **dict.fromkeys(("rdzv_backend", "same_network"), "the job's coordinator is the rendezvous"),
    "main_training_function": "a program is run as its main",
    "debug": "TORCH_DISTRIBUTED_DEBUG=DETAIL in the environment checks collectives",
    "enable_cpu_affinity": "bind ranks by the cluster's own means, in SLURM --cpu-bind",
    "gpu_ids": "ranks use all GPUs of a node; CUDA_VISIBLE_DEVICES on the node limits them",
    "fsdp_version": "it is always FSDP2",
    "fsdp_state_dict_type": "checkpoints are sharded, and fsdp-jobs export makes one file of them",
    "fsdp_use_orig_params": "FSDP2 always does",
    "fsdp_sync_module_states": "all ranks always start with the same weights",
    **dict.fromkeys(_PREFETCH_KEYS, "FSDP2 gathers the next block before a block's backward in any case"),
    "dynamo_mode": "torch.compile's default mode is used",
    "dynamo_use_fullgraph": "each block may break into graphs",
    "dynamo_use_dynamic": "torch.compile decides about dynamic shapes itself",
    "dynamo_use_regional_compilation": "fsdp.compile always compiles block by block",
    **{f"parallelism_config_cp_{key}": "context parallelism is not used" for key in ("backend", "comm_strategy")},
    **{f"parallelism_config_sp_{key}": "sequence parallelism is not used" for key in _SP_KEYS},
}

_TOGETHER = (  # converted together with others
    "num_processes",
    "fsdp_sharding_strategy",
    "fsdp_reshard_after_forward",
    "parallelism_config_dp_replicate_size",
    "parallelism_config_dp_shard_size",
)
_NUMBERS = ("num_machines", "num_processes", "fsdp_version", "fsdp_min_num_params", *_SIZES, *_TOGETHER[3:])
KNOWN = {*_RENAMED, *_CHOICES, *_UNAVAILABLE, *_NOTES, *_TOGETHER}


@dataclass
class Imported:
    """What a file was converted to."""

    values: dict[str, Any] = field(default_factory=dict)  # our key -> its value
    notes: dict[str, str] = field(default_factory=dict)  # Accelerate's key -> why it sets nothing

    def overrides(self) -> list[str]:
        return [f"{key}={_as_override(value)}" for key, value in self.values.items()]

    def experiment(self, source: str) -> str:
        """Return a file for the group `experiment`; `source` is the name of Accelerate's file."""
        tree = OmegaConf.create()
        for key, value in self.values.items():
            OmegaConf.update(tree, key, value)
        comments = "".join(f"# {key}: {note}\n" for key, note in self.notes.items())
        return (
            f"# @package _global_\n# Converted from {source} of accelerate config.\n{comments}{OmegaConf.to_yaml(tree)}"
        )


def read(path: Path) -> Imported:
    """Convert a file.

    Raises:
        BadInput: it cannot be read, or asks for what is not available here; all such keys at once.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as e:
        raise BadInput([Problem(str(path), str(e).splitlines()[0], "a file that accelerate config wrote")]) from e
    if not isinstance(content, dict):
        raise BadInput([Problem(str(path), "is not a configuration of Accelerate")])
    flat, result = dict(_flat(content)), Imported()
    wrong = [key for key in _NUMBERS if flat.get(key) and not _is_number(flat[key])]
    problems = [Problem(f"{key}: {flat.pop(key)}", "is not a number") for key in wrong]
    problems += [problem for key, value in flat.items() for problem in _convert(key, value, result)]
    problems += _convert_ranks(flat, result)
    if str(flat.get("distributed_type", "FSDP")) == "FSDP":
        replicas, group = (int(flat.get(f"parallelism_config_dp_{kind}_size", 1)) for kind in ("replicate", "shard"))
        convert = _convert_fsdp1 if int(flat.get("fsdp_version", 1)) == 1 else _convert_fsdp2
        problems += convert(flat, replicas, group, result)
    if problems:
        raise BadInput(problems)
    return result


def _flat(content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys of the file and of its groups, where keys may lack the group's prefix."""
    for key, value in content.items():
        if key in _GROUPS:
            for name, inner in (value or {}).items():
                yield _GROUPS[key] + name.removeprefix(_GROUPS[key]), inner
        elif key not in _OTHER_TRAINING or value:
            yield key, value


def _convert(key: str, value: Any, result: Imported) -> Iterator[Problem]:
    """Enter a key's values and note into `result`; yield what is wrong with it."""
    if key in _RENAMED:
        ours, convert = _RENAMED[key]
        if (converted := convert(value)) is not None:
            result.values[ours] = converted
    elif key in _CHOICES:
        word = "no" if value is False else str(value).lower()  # YAML reads a bare no as false
        choices = {choice.lower(): values for choice, values in _CHOICES[key].items()}
        if word not in choices:
            yield Problem(f"{key}: {value}", "is not available here", f"one of {', '.join(_CHOICES[key])}")
        result.values |= choices.get(word, {})
    elif key in _UNAVAILABLE:
        is_wanted, why, cure = _UNAVAILABLE[key]
        if is_wanted(value):
            yield Problem(f"{key}: {value}", why, cure)
        result.notes[key] = why
    elif key not in KNOWN:
        yield Problem(f"{key}: {value}", "is not a known key of Accelerate", nearest(key, KNOWN) or "leave it out")
    if key in _NOTES:
        result.notes[key] = _NOTES[key]


def _convert_ranks(flat: dict[str, Any], result: Imported) -> Iterator[Problem]:
    if "num_processes" not in flat:
        return
    processes, machines = int(flat["num_processes"]), int(flat.get("num_machines", 1))
    if processes < 0:
        result.notes["num_processes"] = "a node has as many ranks as GPUs"
    elif processes % machines:
        what = f"is not a multiple of num_machines: {machines}; all nodes have the same number of ranks here"
        yield Problem(f"num_processes: {processes}", what, str(-(-processes // machines) * machines))
    else:
        result.values["nproc_per_node"] = processes // machines


def _convert_fsdp1(flat: dict[str, Any], replicas: int, group: int, result: Imported) -> Iterator[Problem]:
    if replicas * group > 1:
        yield Problem(f"parallelism_config: {replicas} x {group}", "is for fsdp_version: 2", "fsdp_version: 2")
        return
    given = [flat[key] for key in ("fsdp_reshard_after_forward", "fsdp_sharding_strategy") if flat.get(key) is not None]
    named = given[0] if given else _STRATEGIES[0]
    by_number = {str(number): name for number, name in enumerate(_STRATEGIES, 1)}
    strategy = by_number.get(str(named), str(named).lower())
    if strategy not in _STRATEGIES:
        what = "is not a sharding strategy"
        yield Problem(f"fsdp_sharding_strategy: {named}", what, f"one of {', '.join(_STRATEGIES)}")
        return
    result.values["fsdp.strategy"] = strategy
    if strategy.startswith("hybrid") and "nproc_per_node" in result.values:
        result.values["fsdp.shard_group"] = result.values["nproc_per_node"]  # FSDP1 shards within nodes


def _convert_fsdp2(flat: dict[str, Any], replicas: int, group: int, result: Imported) -> Iterator[Problem]:
    reshard = flat.get("fsdp_reshard_after_forward")
    reshards = reshard is None or _is_true(reshard)
    if replicas > 1 and group > 1:
        strategy = "hybrid_shard" if reshards else "hybrid_shard_zero2"
        result.values |= {"fsdp.strategy": strategy, "fsdp.shard_group": group}
        ranks = int(flat.get("num_processes", -1))
        if ranks > 0 and ranks != replicas * group:
            yield Problem(f"num_processes: {ranks}", f"is not {replicas} replicas x {group}", str(replicas * group))
    elif replicas > 1:
        result.values["fsdp.strategy"] = "no_shard"
    else:
        result.values["fsdp.strategy"] = "full_shard" if reshards else "shard_grad_op"
    if "fsdp_sharding_strategy" in flat:
        result.notes["fsdp_sharding_strategy"] = "for fsdp_version: 1; here fsdp_reshard_after_forward decides"


def _as_override(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"'[{','.join(value)}]'" if isinstance(value, list) else str(value)


def main(args: list[str]) -> int:
    """Run the verb `import-accelerate`."""
    parser = argparse.ArgumentParser(prog="fsdp-jobs import-accelerate", allow_abbrev=False)
    parser.add_argument("file", type=Path, help="that accelerate config wrote")
    parser.add_argument("--experiment", metavar="NAME", help="as a file for the group experiment")
    parser.add_argument("--config-dir", metavar="DIR", type=Path, help="where to write that file")
    flags = parser.parse_args(args)
    imported = read(flags.file)
    text = imported.experiment(flags.file.name) if flags.experiment else " ".join(imported.overrides()) + "\n"
    if flags.experiment and flags.config_dir is not None:
        file = flags.config_dir / "experiment" / f"{flags.experiment}.yaml"
        write_atomic(file, text)
        text = f"{file}\n"
    sys.stdout.write(text)
    errors = Console(stderr=True, highlight=False)
    for key, note in imported.notes.items():
        errors.print(f"{key}: {note}", style="dim", markup=False, soft_wrap=True)
    return 0
