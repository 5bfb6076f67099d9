"""What only code can tell: a model's shape, and whether weights from elsewhere are its own.

Both are asked of a process of its own, which may import torch and builds the model without memory:
python -m fsdp_jobs.plan.shape_client reads a question as JSON on its standard input and prints the answer as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, astuple, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.schema import (
    CustomModelConfig,
    FsdpConfig,
    HfConfig,
    JobConfig,
    OptimConfig,
    dump_config,
    load_config,
)
from fsdp_jobs.plan.shapes import Activations, ModelShape, Unit

TIMEOUT_S = 300  # importing torch and building the module tree; no weights are made


def probe(config: JobConfig) -> ModelShape:
    """The shape of a model of yours or of transformers, from a child process that builds it on fake tensors and
    runs one sample through.

    Raises:
        BadInput: the factory, the wrap classes or the forward pass fail, with the child's last line; or the data's
            token ids go beyond the model's vocabulary.
    """
    model = config.model
    assert isinstance(model, CustomModelConfig | HfConfig)
    where = f"model._target_={model._target_}" if isinstance(model, CustomModelConfig) else "model.name_or_path"
    question = {
        "model": asdict(config.model),
        "wrap": config.fsdp.wrap,
        "min_num_params": config.fsdp.min_num_params,
        "seq_len": config.data.seq_len,
    }
    shape = shape_from_json(_ask(question, where))
    if isinstance(model, HfConfig) and config.data.vocab_size > shape.activations.vocab:
        what = (
            f"token ids go up to {config.data.vocab_size - 1}, the model has a vocabulary of {shape.activations.vocab}"
        )
        raise BadInput([Problem(f"data.vocab_size={config.data.vocab_size}", what, "a model of the tokenizer's size")])
    return shape


def check_initial_weights(config: JobConfig) -> None:
    """Compare names and shapes of what `init_from` holds with the model's, in a child process.

    Raises:
        BadInput: tensors that are missing, left over or of another shape, by name.
    """
    same = replace(config, name=None, seed=0, steps=1, optim=OptimConfig())  # for jobs that differ in these only
    question = {"config": dump_config(same)}
    found = json.loads(_ask(question, f"init_from={config.init_from}"))
    if found:
        raise BadInput([Problem(*problem) for problem in found])


def _ask(question: dict[str, Any], where: str) -> str:
    """The child's answer; BadInput with its last line when it fails."""
    child = _child(json.dumps(question))
    if child.returncode:
        last = (child.stderr.strip() or "no message").splitlines()[-1]
        raise BadInput([Problem(where, f"could not be probed: {last}")])
    return child.stdout.splitlines()[-1]


@cache
def _child(question: str) -> subprocess.CompletedProcess[str]:
    """Asked once in this process: jobs that are submitted together mostly have the same model."""
    command = [sys.executable, "-m", "fsdp_jobs.plan.shape_client"]
    return subprocess.run(command, input=question, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def shape_from_json(text: str) -> ModelShape:
    """The shape that the child printed."""
    d = json.loads(text)

    def unit(u: dict[str, Any]) -> Unit:
        return Unit(u["name"], tuple((n, tuple(s)) for n, s in u["params"]), u["count"])

    blocks = tuple(unit(b) for b in d["blocks"])
    activations = Activations(**d["activations"])
    return ModelShape(unit(d["root"]), blocks, activations, unit(d["head"]), d["waiting"])


def _shape(question: dict[str, Any]) -> ModelShape:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from fsdp_jobs.models.build import build_model, head_modules_of
    from fsdp_jobs.train.shape_probe import activations_of, units_of
    from fsdp_jobs.train.sharding import find_blocks

    kind = HfConfig if question["model"]["kind"] == "hf" else CustomModelConfig
    model_config = kind(**question["model"])
    fsdp = FsdpConfig(wrap=question["wrap"], min_num_params=question["min_num_params"])
    with FakeTensorMode():
        model = build_model(model_config)
        blocks = find_blocks(model, model_config, fsdp)
        activations = activations_of(model, blocks, question["seq_len"])
    head = head_modules_of(model) if fsdp.wrap == "layer" else []
    return units_of(model, blocks, head, activations)


def _initial_problems(question: dict[str, Any]) -> list[Problem]:
    import torch

    from fsdp_jobs.checkpoints.pretrained import problems_of
    from fsdp_jobs.models.build import build_model

    with TemporaryDirectory() as folder:
        Path(folder, "config.yaml").write_text(question["config"])
        config = load_config(Path(folder, "config.yaml"))
    with torch.device("meta"):
        model = build_model(config.model)
    try:
        return problems_of(model, config)
    except BadInput as e:
        return e.problems


def main() -> None:
    """Answer the question on standard input; what went wrong is the last line of standard error."""
    question = json.load(sys.stdin)
    try:
        if "config" in question:
            answer = json.dumps([astuple(p) for p in _initial_problems(question)])
        else:
            answer = json.dumps(asdict(_shape(question)))
    except Exception as e:
        sys.exit(f"{type(e).__name__}: {(str(e).strip() or 'no message').splitlines()[0]}")
    print(answer)


if __name__ == "__main__":
    main()
