"""Translate what users of torchrun and sbatch type by habit into our keys. No torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.schema import JobConfig


def _by_word(table: dict[str, str]) -> dict[str, str]:
    """Invert a table of our term -> words of other tools: return word -> our term."""
    return {word: ours for ours, words in table.items() for word in words.split()}


_KEYS = _by_word(  # flags and keys, with underscores for dashes
    {
        "nodes={}": "nnodes N num_machines num_nodes",
        "nproc_per_node={}": "nproc gpus num_gpus gpus_per_node ntasks_per_node",
        "module={}": "m",
        "elastic.max_failures_without_progress={}": "max_restarts",
        "name={}": "job_name J hydra.job.name run_name experiment_name",
        "runs_dir={}": "hydra.run.dir",
        "sweep.dir={}": "hydra.sweep.dir",
        "--multirun": "hydra.mode",
        "cluster.time={}": "time t",
        "cluster.partition={}": "partition p",
        "cluster.account={}": "account A",
        "cluster.qos={}": "qos q",
        "cluster.image={}": "image",
        "checkpoint.dir={}": "checkpoint_dir",
        "data.global_batch={}": "batch_size global_batch_size train_batch_size",
        "data.micro_batch={}": "micro_batch_size per_device_train_batch_size",
        "data.seq_len={}": "max_seq_len seq_length sequence_length block_size",
        "steps={}": "max_steps num_steps train_steps",
        "optim.lr={}": "learning_rate",
        "fsdp.param_dtype=bf16": "bf16",
        "fsdp.param_dtype=fp16": "fp16",
        "steps=...: optimizer steps in all": "epochs num_epochs num_train_epochs",
        "leave it out: data.global_batch, of all ranks, by data.micro_batch gives it": "gradient_accumulation_steps",
        "leave it out: the launcher starts the program": "python python3 torchrun accelerate composer deepspeed launch"
        " bash srun mpirun uv",
        "-m trl.scripts.sft, or another of trl.scripts, and its arguments": "trl",
        "-m axolotl.cli.train X.yaml": "axolotl",
        "-m llamafactory.launcher X.yaml": "llamafactory_cli",
        "-m swift.cli.sft and its arguments": "swift",
        "-m litgpt and its arguments": "litgpt",
        "fsdp-jobs import-accelerate FILE, which converts it": "config_file",
        "leave it out: the launcher sets it": "rdzv_backend rdzv_endpoint rdzv_id rdzv_conf master_addr master_port"
        " node_rank standalone machine_rank main_process_ip main_process_port",
    }
)
_PRECISION = ("precision", "mixed_precision", "dtype", "torch_dtype")
_DTYPES = _by_word(  # precisions
    {
        "fp32": "fp32 float32 float 32 32-true no",
        "bf16": "bf16 bfloat16 bf16-mixed bf16-true",
        "fp16": "fp16 float16 half 16 16-mixed 16-true",
    }
)
_OPTIONS = {  # a group's option by another tool's name -> ours
    "fsdp=ddp": "fsdp=no_shard",
    "fsdp=zero2": "fsdp=shard_grad_op",
    "fsdp=zero3": "fsdp=full_shard",
    "fsdp=hsdp": "fsdp=hybrid_shard",
    "cluster=k8s": "cluster=kubernetes",
}
OTHERS = {  # of a group, besides its options
    "data": "token ids: data=tokens data.path=FILE; Hugging Face: data=hf_dataset data.path=NAME",
    "experiment": "one of your own: --config-dir FOLDER, in which it is experiment/NAME.yaml",
    "model": "a model of transformers: model=hf model.name_or_path=NAME",
    "hardware": "another GPU: the nearest of these, with its own hardware.memory_gib=, hardware.bf16_tflops= and so on",
}
_OUR_KEYS = {f.name for f in fields(JobConfig)}
_TAKE_VALUES = ("--output", "-o", "--config-dir", "-cd", "--svg")  # flags of verbs that compose a job
VERBS = _by_word(
    {
        "submit": "run launch",
        "status": "ps show history",
        "list": "ls",
        "cancel": "stop",
        "cancel --now": "kill",
        "prune --older-than 30d": "rm delete",
        "--version": "version",
        "--multirun": "multirun",
    }
)


def meant_by(word: str) -> str:
    """Return the key that corresponds to a flag or an override of another tool; empty if none is known."""
    name, _, value = word.lstrip("-").partition("=")
    name = name.replace("-", "_")
    if name in _OUR_KEYS:
        return f"{name}={value or '...'}"
    last = name.rpartition(".")[2]
    if last in _PRECISION:
        return f"fsdp.param_dtype={_DTYPES.get(value.casefold(), 'auto, fp32, bf16 or fp16')}"
    return (_KEYS.get(name) or _KEYS.get(last if len(last) > 1 else name, "")).format(value or "...")


def option_meant_by(group: str, option: str) -> str:
    """Return the option of a group that corresponds to another tool's; empty if none is known."""
    if group == "model" and "/" in option:
        return f"model=hf model.name_or_path={option}"
    return _OPTIONS.get(f"{group}={option.casefold()}", "")


def program_at(args: Sequence[str]) -> int:
    """Return where arguments name a program, as torchrun's `train.py` or `-m module`; without one, their count."""
    for i, (before, arg) in enumerate(pairwise(["", *args])):
        if re.fullmatch(r"[^-=][^=]*\.py", arg):
            return len(args) if before in _TAKE_VALUES else i
        if before == "-m" and re.fullmatch(r"\w+(\.\w+)*", arg):  # else it is Hydra's --multirun
            return i - 1
    return len(args)


def program_as_overrides(args: Sequence[str]) -> list[str]:
    """Convert torchrun's form, `[overrides] train.py [its arguments]`, to overrides; leave others as they are.

    Raises:
        BadInput: keys of the job follow the program.
    """
    at = program_at(args)
    if at == len(args):
        return list(args)
    key, program, *own = ("module", *args[at + 1 :]) if args[at] == "-m" else ("script", *args[at:])
    own = own[1:] if own[:1] == ["--"] else own  # torchrun removes it, too
    if misplaced := [a for a in own if "=" in a and re.split("[.=]", a)[0] in _OUR_KEYS]:
        rest = [a for a in own if a not in misplaced]
        before = shlex.join([*args[:at], *misplaced, *args[at : len(args) - len(own)], *rest])
        as_arguments = shlex.join([*args[:at], f"{key}={program}", f"script_args={shlex.join(own)}"])
        cure = f"put it in front: {before}; if the program reads it: {as_arguments}"
        what = f"follows {program}, so it would be an argument of the program"
        raise BadInput.at(shlex.join(misplaced), what, cure)
    overrides = [*args[:at], f"{key}={program}"]
    if own:
        words = re.sub(r"(\\*)\$\{", lambda m: rf"{2 * m[1]}\${{", shlex.join(own))  # `${...}` is for the program
        overrides.append(f"script_args={one_text(words)}")
    return overrides


def one_list(values: Sequence[str]) -> str:
    """Quote values so that Hydra reads them as a list of strings."""
    quoted = ",".join(one_text(value.strip(" '\"")) for value in values)
    return f"[{quoted}]"


def one_text(value: str) -> str:
    """Quote a value so that Hydra reads it as one string; quotes in it are escaped."""
    escaped = re.sub(r"(\\*)('|\Z)", lambda m: 2 * m[1] + ("\\'" if m[2] else ""), value)
    return f"'{escaped}'"
