"""Questions about a model that only its code answers, asked of `python -m fsdp_jobs.train.shape_probe`. No torch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.schema import CustomModelConfig, DataConfig, FsdpConfig, JobConfig, OptimConfig, dump_config
from fsdp_jobs.plan.shapes import ModelShape

TIMEOUT_S = 300  # importing torch and building the module tree; no weights are made


def probe(config: JobConfig) -> ModelShape:
    """Measure the shape of a custom model or of one of transformers: a process runs one sample on fake tensors.

    Raises:
        BadInput: the factory, the wrap classes or the forward pass fail, with the process's last line; or the
            data's token ids exceed the model's vocabulary, or its samples the places that the model has.
    """
    is_custom = isinstance(config.model, CustomModelConfig)
    key = "model._target_" if is_custom else "model.name_or_path"
    shape = ModelShape.from_json(_ask("shape", config, f"{key}={getattr(config.model, key.removeprefix('model.'))}"))
    vocabulary, ids = shape.activations.vocab, config.data.vocab_size
    if not is_custom and ids > vocabulary:
        what = f"token ids go up to {ids - 1}, the model has a vocabulary of {vocabulary}"
        raise BadInput([Problem(f"data.vocab_size={ids}", what, "a model of the tokenizer's size")])
    if 0 < shape.positions < (length := config.data.seq_len):
        what = f"the model has places for {shape.positions} tokens (max_position_embeddings)"
        raise BadInput([Problem(f"data.seq_len={length}", what, f"data.seq_len={shape.positions}, or less")])
    return shape


def check_initial_weights(config: JobConfig) -> None:
    """Compare names and shapes of the tensors in `init_from` with the model's, in a process of its own.

    Raises:
        BadInput: tensors that are missing, left over or of another shape, by name.
    """
    problems = json.loads(_ask("initial-weights", config, f"init_from={config.init_from}"))
    if problems:
        raise BadInput([Problem(*problem) for problem in problems])


def _ask(question: str, config: JobConfig, where: str) -> str:
    """Get the probe's answer, as JSON; BadInput with the last line of what it wrote when it fails."""
    # jobs that differ in anything else have the same answer
    fsdp = FsdpConfig(wrap=config.fsdp.wrap, min_num_params=config.fsdp.min_num_params)
    data = DataConfig(kind=config.data.kind, seq_len=config.data.seq_len)
    same = replace(config, name=None, seed=0, steps=1, fsdp=fsdp, data=data, optim=OptimConfig())
    answer = run_probe(question, dump_config(same))
    if answer.returncode:
        last = (answer.stderr.strip() or "no message").splitlines()[-1]
        raise BadInput([Problem(where, f"could not be probed: {last}")])
    return answer.stdout.splitlines()[-1]


@cache  # jobs that are submitted together mostly have the same model
def run_probe(question: str, config: str) -> subprocess.CompletedProcess[str]:
    with TemporaryDirectory() as folder:
        path = Path(folder, "config.yaml")
        path.write_text(config)
        command = [sys.executable, "-m", "fsdp_jobs.train.shape_probe", question, str(path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
