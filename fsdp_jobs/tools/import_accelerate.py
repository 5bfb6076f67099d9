"""What `accelerate config` wrote, as overrides of ours; every key of it is either turned into one or spoken of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fsdp_jobs.config.errors import BadInput, Problem, nearest

_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
_WRAP = {"TRANSFORMER_BASED_WRAP": "layer", "SIZE_BASED_WRAP": "size", "NO_WRAP": "none"}
_DTYPES = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}

# key -> why nothing has to be done for it
_NEEDLESS = {
    "compute_environment": "cluster= says where a job runs",
    "machine_rank": "nodes number themselves",
    "main_process_ip": "the job's coordinator has an address of its own",
    "main_process_port": "the job's coordinator chooses a port",
    "rdzv_backend": "the job's coordinator is the rendezvous",
    "same_network": "the job's coordinator is the rendezvous",
    "main_training_function": "a program is run as its main",
    "debug": "TORCH_DISTRIBUTED_DEBUG=DETAIL in the environment checks collectives",
    "enable_cpu_affinity": "bind ranks by the cluster's own means, in SLURM --cpu-bind",
    "fsdp_version": "it is always FSDP2",
    "fsdp_state_dict_type": "checkpoints are sharded, and fsdp-jobs export makes one file of them",
    "fsdp_use_orig_params": "FSDP2 always does",
    "fsdp_sync_module_states": "all ranks always begin with the same weights",
}
_OF_DYNAMO = {
    "dynamo_mode": "torch.compile's default mode is used",
    "dynamo_use_fullgraph": "each block may break into graphs",
    "dynamo_use_dynamic": "torch.compile decides about dynamic shapes itself",
    "dynamo_use_regional_compilation": "fsdp.compile always compiles block by block",
}
_PREFIXES = {"fsdp_config": "fsdp_", "parallelism_config": "parallelism_config_", "dynamo_config": "dynamo_"}
_OTHERS = ("fp8_config", "deepspeed_config", "megatron_lm_config", "mpirun_config")
_TPU = ("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm", "tpu_env")
_SIZES = ("tp_size", "cp_size", "sp_size")  # other parallelism
_OF_OTHERS = (
    *("cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable"),
    "sp_attn_implementation",
)


@dataclass
class Imported:
    """What a file came to: our values by key, and what became of keys that are none of ours."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def overrides(self) -> list[str]:
        return [f"{key}={_word(value)}" for key, value in self.values.items()]

    def experiment(self, source: str) -> str:
        """A file for the group `experiment`."""
        tree: dict[str, Any] = {}
        for key, value in self.values.items():
            *path, last = key.split(".")
            node = tree
            for part in path:
                node = node.setdefault(part, {})
            node[last] = value
        lines = [f"# {key}: {note}" for key, note in self.notes.items()]
        comments = "".join(f"{line}\n" for line in lines)
        body = yaml.safe_dump(tree, sort_keys=False, default_flow_style=None)
        return f"# @package _global_\n# {source}, as accelerate config wrote it.\n{comments}{body}"


def read(path: Path) -> Imported:
    """The configuration in a file of Accelerate's.

    Raises:
        BadInput: it cannot be read, or names what cannot be had here; all such keys at once.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as e:
        raise BadInput([Problem(str(path), str(e).splitlines()[0], "a file that accelerate config wrote")]) from e
    if not isinstance(content, dict):
        raise BadInput([Problem(str(path), "is no configuration of Accelerate's")])
    reader = _Reader()
    reader.read(content)
    if reader.problems:
        raise BadInput(reader.problems)
    return reader.found


class _Reader:
    def __init__(self) -> None:
        self.found = Imported()
        self.problems: list[Problem] = []
        self.rules: dict[str, Callable[[Any], None]] = {
            "distributed_type": self._distributed_type,
            "mixed_precision": self._mixed_precision,
            "use_cpu": lambda v: self._put({"cluster.accelerator": "cpu"} if _is_true(v) else {}),
            "gpu_ids": self._gpu_ids,
            "downcast_bf16": lambda v: self._only_on_tpus("downcast_bf16", _is_true(v)),
            "num_machines": lambda v: self._put({"nodes": int(v)}),
            "num_processes": lambda v: None,  # below, with the machines
            "fsdp_sharding_strategy": lambda v: None,  # below, with the sizes
            "fsdp_reshard_after_forward": lambda v: None,
            "parallelism_config_dp_replicate_size": lambda v: None,
            "parallelism_config_dp_shard_size": lambda v: None,
            "fsdp_offload_params": lambda v: self._put({"fsdp.cpu_offload": _is_true(v)}),
            "fsdp_auto_wrap_policy": self._wrap,
            "fsdp_transformer_layer_cls_to_wrap": lambda v: self._put({"model.wrap_classes": _names(v)} if v else {}),
            "fsdp_min_num_params": lambda v: self._put({"fsdp.min_num_params": int(float(v))} if v else {}),
            "fsdp_backward_prefetch": self._backward_prefetch,
            "fsdp_forward_prefetch": lambda v: self._put({"fsdp.forward_prefetch": int(_is_true(v))}),
            "fsdp_cpu_ram_efficient_loading": lambda v: self._put({"fsdp.meta_init": _is_true(v)}),
            "fsdp_activation_checkpointing": self._activation_checkpointing,
            "fsdp_activation_checkpointing_offload": lambda v: self._put({"fsdp.activation_offload": _is_true(v)}),
            "fsdp_ignored_modules": self._ignored_modules,
            "dynamo_backend": self._dynamo,
        }

    def read(self, content: dict[str, Any]) -> None:
        flat = dict(_flat(content))
        for key, value in flat.items():
            if key in self.rules:
                self.rules[key](value)
            elif not self._is_other(key, value):
                hint = nearest(key, [*self.rules, *_NEEDLESS])
                self._refuse(key, value, "is no key of Accelerate's that is known here", hint or "leave it out")
        self._ranks(flat)
        if str(flat.get("distributed_type", "FSDP")) == "FSDP":
            self._strategy(flat)

    def _is_other(self, key: str, value: Any) -> bool:
        """Keys of which nothing comes. Whatever they ask for is said."""
        short = key.removeprefix("parallelism_config_")
        if key in _NEEDLESS | _OF_DYNAMO:
            if key == "compute_environment" and value != "LOCAL_MACHINE":
                self._refuse(key, value, "is a service of its own", "LOCAL_MACHINE")
            self.found.notes[key] = (_NEEDLESS | _OF_DYNAMO)[key]
        elif key in _OTHERS:
            self._refuse(key, value, "is for another kind of training", "FSDP, without it")
        elif key in _TPU:
            self._only_on_tpus(key, bool(value))
        elif short != key and short in _SIZES:
            if int(value) > 1:
                self._refuse(key, value, "jobs are data parallel here: sharded and replicated", "1")
            self.found.notes[key] = "jobs are data parallel: sharded and replicated"
        elif short != key and short in _OF_OTHERS:
            self.found.notes[key] = "of a parallelism that is not used"
        else:
            return False
        return True

    def _put(self, values: dict[str, Any]) -> None:
        self.found.values |= values

    def _refuse(self, key: str, value: Any, what: str, instead: str) -> None:
        self.problems.append(Problem(f"{key}: {value}", what, instead))

    def _only_on_tpus(self, key: str, wanted: bool) -> None:
        if wanted:
            self._refuse(key, "set", "is for TPUs", "leave it out")
        self.found.notes[key] = "for TPUs alone"

    def _distributed_type(self, value: Any) -> None:
        if value in ("MULTI_GPU", "MULTI_CPU", "NO"):
            self._put({"fsdp.strategy": "no_shard"})
            if value == "MULTI_CPU":
                self._put({"cluster.accelerator": "cpu"})
        elif value != "FSDP":
            self._refuse("distributed_type", value, "is for another kind of training", "FSDP")

    def _mixed_precision(self, value: Any) -> None:
        word = "no" if value is False else str(value)  # YAML reads a bare no as false
        dtype = _DTYPES.get(word)
        if dtype is None:
            self._refuse("mixed_precision", value, "cannot be had here", f"one of {', '.join(_DTYPES)}")
            return
        self._put({"fsdp.param_dtype": dtype})
        if dtype != "fp32":  # Accelerate reduces gradients and returns outputs in the same
            self._put({"fsdp.reduce_dtype": dtype, "fsdp.output_dtype": dtype})

    def _gpu_ids(self, value: Any) -> None:
        if value not in (None, "all"):
            self.found.notes["gpu_ids"] = f"set CUDA_VISIBLE_DEVICES={value} on the node"

    def _wrap(self, value: Any) -> None:
        wrap = _WRAP.get(str(value).upper())
        if wrap is None:
            self._refuse("fsdp_auto_wrap_policy", value, "there is no such policy", f"one of {', '.join(_WRAP)}")
        else:
            self._put({"fsdp.wrap": wrap})

    def _backward_prefetch(self, value: Any) -> None:
        same = value in ("BACKWARD_PRE", 1, "1", None)
        what = "FSDP2 gathers the next block before a block's backward"
        self.found.notes["fsdp_backward_prefetch"] = what if same else f"{what}, and cannot be told {value}"

    def _activation_checkpointing(self, value: Any) -> None:
        self._put({"fsdp.activation_checkpointing": "full" if _is_true(value) else "none"})

    def _ignored_modules(self, value: Any) -> None:
        if value:
            self._refuse("fsdp_ignored_modules", value, "every parameter is sharded here", "leave it out")

    def _dynamo(self, value: Any) -> None:
        backend = "NO" if value is False else str(value).upper()
        if backend == "INDUCTOR":
            self._put({"fsdp.compile": True})
        elif backend != "NO":
            self._refuse("dynamo_backend", value, "cannot be had here", "INDUCTOR or NO")

    def _ranks(self, flat: dict[str, Any]) -> None:
        if "num_processes" not in flat:
            return
        processes, machines = int(flat["num_processes"]), int(flat.get("num_machines", 1))
        if processes < 0:
            self.found.notes["num_processes"] = "ranks a node are as many as it has GPUs"
        elif processes % machines:
            what = f"is no multiple of num_machines: {machines}; nodes have equal numbers of ranks here"
            self._refuse("num_processes", processes, what, str(-(-processes // machines) * machines))
        else:
            self._put({"nproc_per_node": processes // machines})

    def _strategy(self, flat: dict[str, Any]) -> None:
        replicas = int(flat.get("parallelism_config_dp_replicate_size", 1))
        group = int(flat.get("parallelism_config_dp_shard_size", 1))
        version = int(flat.get("fsdp_version", 1))
        reshard = flat.get("fsdp_reshard_after_forward")
        named = reshard if version == 1 and reshard is not None else flat.get("fsdp_sharding_strategy")
        if version == 1 and replicas * group > 1:
            self._refuse("parallelism_config", f"{replicas} x {group}", "is for fsdp_version: 2", "fsdp_version: 2")
        elif version == 1:
            strategy = _strategy_of(named)
            if strategy is None:
                self._refuse("fsdp_sharding_strategy", named, "there is no such strategy", f"one of {_STRATEGIES}")
                return
            self._put({"fsdp.strategy": strategy})
            if strategy.startswith("hybrid") and "nproc_per_node" in self.found.values:
                self._put({"fsdp.shard_group": self.found.values["nproc_per_node"]})  # FSDP1's groups are nodes
        else:
            again = reshard is None or _is_true(reshard)
            if replicas > 1 and group > 1:
                strategy = "hybrid_shard" if again else "hybrid_shard_zero2"
                self._put({"fsdp.strategy": strategy, "fsdp.shard_group": group})
                ranks = int(flat.get("num_processes", -1))
                if ranks > 0 and ranks != replicas * group:
                    self._refuse("num_processes", ranks, f"is not {replicas} replicas x {group}", str(replicas * group))
            elif replicas > 1:
                self._put({"fsdp.strategy": "no_shard"})
            else:
                self._put({"fsdp.strategy": "full_shard" if again else "shard_grad_op"})
            if "fsdp_sharding_strategy" in flat:
                self.found.notes["fsdp_sharding_strategy"] = "for fsdp_version: 1; fsdp_reshard_after_forward counts"


def _flat(content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys of the file and of its groups; Accelerate takes those of fsdp_config without their prefix, too."""
    for key, value in content.items():
        prefix = {"fsdp_config": "fsdp_", "parallelism_config": "parallelism_config_", "dynamo_config": "dynamo_"}.get(
            key
        )
        if prefix is not None:
            for name, inner in (value or {}).items():
                yield (name if name.startswith(prefix) else f"{prefix}{name}"), inner
        elif key not in _OTHERS or value:
            yield key, value


def _strategy_of(value: Any) -> str | None:
    """A strategy by its name or its number; the first when none is given."""
    if value is None:
        return _STRATEGIES[0]
    text = str(value).lower()
    if text.isdigit() and 0 < int(text) <= len(_STRATEGIES):
        return _STRATEGIES[int(text) - 1]
    return text if text in _STRATEGIES else None


def _names(value: Any) -> list[str]:
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else list(value)


def _is_true(value: Any) -> bool:
    return str(value).lower() in ("true", "yes", "1")


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"'[{','.join(value)}]'" if isinstance(value, list) else str(value)
