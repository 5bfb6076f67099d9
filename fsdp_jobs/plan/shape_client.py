"""Find the shape of a model; ask `python -m fsdp_jobs.train.shape_probe` what only its code can answer. No torch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

from fsdp_jobs.config.clusters import LocalClusterConfig
from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.resolve import accelerator, param_dtype
from fsdp_jobs.config.schema import (
    DataConfig,
    FsdpConfig,
    HfConfig,
    JobConfig,
    LlamaConfig,
    NoModelConfig,
    dump_config,
)
from fsdp_jobs.config.terminal import complain
from fsdp_jobs.plan.shapes import ModelShape, llama_shape

TIMEOUT_S = 300  # importing torch and building the module tree; no weights are made


def shape_of(config: JobConfig) -> ModelShape | None:
    """Return the shape of the configured model; None for a program's own model, which is unknown.

    Raises:
        BadInput: as `probe` does.
    """
    if isinstance(config.model, NoModelConfig):
        return None
    if not isinstance(config.model, LlamaConfig):
        return probe(config)
    device = accelerator(config)
    known = llama_shape(config.model, device, param_dtype(config.fsdp, device))
    return known if config.fsdp.wrap == "layer" else replace(probe(config), activations=known.activations)


def probe(config: JobConfig) -> ModelShape:
    """Measure the shape of a model: a process runs one sample on fake tensors.

    Raises:
        BadInput: the factory, the wrap classes or the forward pass fail, with the process's last line; or the
            data's token ids exceed the model's vocabulary, or its samples the model's positions.
    """
    key = {"custom": "_target_", "hf": "name_or_path"}.get(config.model.kind, "kind")
    shape = ModelShape.from_json(_ask("shape", config, f"model.{key}={getattr(config.model, key)}"))
    vocabulary, ids = shape.activations.vocab, config.data.vocab_size
    if config.model.kind != "custom" and ids > vocabulary:
        what = f"token ids go up to {ids - 1}, the model has a vocabulary of {vocabulary}"
        raise BadInput.at(f"data.vocab_size={ids}", what, "a model of the tokenizer's size")
    if 0 < shape.positions < (length := config.data.seq_len):
        what = f"the model has places for {shape.positions} tokens (max_position_embeddings)"
        raise BadInput.at(f"data.seq_len={length}", what, f"data.seq_len={shape.positions}, or less")
    return shape


def check_initial_weights(config: JobConfig) -> None:
    """Compare names and shapes of the tensors in `init_from` with the model's, in a process of its own.

    Raises:
        BadInput: tensors are missing, left over or of another shape; names them.
    """
    problems = json.loads(_ask("initial-weights", config, f"init_from={config.init_from}"))
    if problems:
        raise BadInput([Problem(*problem) for problem in problems])


def _ask(question: str, config: JobConfig, where: str) -> str:
    """Return the probe's answer, as JSON; raises BadInput with its last line if it fails."""
    of = config.fsdp
    fsdp = FsdpConfig(
        wrap=of.wrap, min_num_params=of.min_num_params, param_dtype=of.param_dtype, meta_init=of.meta_init
    )
    data = DataConfig(kind=config.data.kind, seq_len=config.data.seq_len)
    cluster = LocalClusterConfig(accelerator=accelerator(config))
    model, hub_model = config.model, ""
    same = JobConfig(  # equal if jobs differ only elsewhere
        model=model,
        fsdp=fsdp,
        data=data,
        cluster=cluster,
        init_from=config.init_from,
        init_key_map=config.init_key_map,
        init_rope=config.init_rope,
    )
    if isinstance(model, HfConfig) and not Path(model.name_or_path).is_dir():
        hub_model = model.name_or_path
    found = "a folder (there is none of this name), or a network that reaches the hub" if hub_model else ""
    try:
        answer = run_probe(question, dump_config(same), hub_model)
    except subprocess.TimeoutExpired:
        what = f"could not be probed: no answer for {TIMEOUT_S} s"
        raise BadInput.at(where, what, found or "a shorter data.seq_len") from None
    if answer.returncode:
        last = (answer.stderr.strip() or "no message").splitlines()[-1]
        raise BadInput.at(where, f"could not be probed: {last}", found)
    return answer.stdout.splitlines()[-1]


@cache  # jobs that are submitted together mostly have the same model
def run_probe(question: str, config: str, hub_model: str) -> subprocess.CompletedProcess[str]:
    if hub_model:  # the hub's library tries again for minutes
        complain(f"reading {hub_model} from the Hugging Face hub or its cache", "dim")
    command = [sys.executable, "-m", "fsdp_jobs.train.shape_probe", question, "/dev/stdin"]
    return subprocess.run(command, input=config, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
