"""What a composed configuration must satisfy before anything is started: all problems at once. No torch."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_jobs.checkpoints.catalog import find_checkpoints, home_of, step_of
from fsdp_jobs.config.documents import documents_problems
from fsdp_jobs.config.errors import BadInput, Problem, nearest
from fsdp_jobs.config.resolve import node_range, ranks_per_node
from fsdp_jobs.config.schema import (
    AUTO,
    DTYPES,
    STRATEGIES,
    CustomModelConfig,
    HfConfig,
    JobConfig,
    LlamaConfig,
    NoModelConfig,
    load_config,
    training_values,
)
from fsdp_jobs.elastic.program import check_program
from fsdp_jobs.plan.plan import check_sharding
from fsdp_jobs.plan.topology import Topology
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.verdict import NOTIFY_ON

# key -> the words it may have
_CHOICES: dict[str, tuple[str | bool, ...]] = {
    "cluster.accelerator": (AUTO, "cpu", "cuda"),
    "fsdp.strategy": (AUTO, *STRATEGIES),
    "fsdp.wrap": ("layer", "size", "none"),
    "fsdp.param_dtype": (AUTO, *DTYPES),
    "fsdp.reduce_dtype": DTYPES,
    "fsdp.output_dtype": (AUTO, *DTYPES),
    "fsdp.accumulate_unsharded": (AUTO, True, False),
    "fsdp.activation_checkpointing": ("none", "full", "every_n", "selective"),
    "data.kind": ("python_stdlib", "tokens", "synthetic", "text", "hf_dataset"),
    "data.token_dtype": ("uint16", "uint32"),
    "init_rope": ("halves", "interleaved"),
    "optim.schedule": ("cosine", "constant"),
    "checkpoint.async_mode": (AUTO, "off", "thread", "process"),
    "sweep.direction": ("minimize", "maximize"),
    "tracking.kind": ("none", "mlflow", "wandb"),
}

# key -> the smallest value it may have
_AT_LEAST: dict[str, float] = {
    "steps": 1,
    "log_every_steps": 1,
    "seed": 0,
    "data.seq_len": 1,
    "data.global_batch": 1,
    "data.micro_batch": 1,
    "data.workers": 0,
    "data.prefetch": 1,
    "data.vocab_size": 1,
    "data.tokens": 1,
    "fsdp.activation_checkpointing_every": 1,
    "fsdp.min_num_params": 1,
    "fsdp.forward_prefetch": 0,
    "fsdp.backward_prefetch": 0,
    "optim.lr": 0,
    "optim.weight_decay": 0,
    "optim.grad_clip_norm": 0,
    "optim.warmup_steps": 0,
    "checkpoint.every_steps": 0,
    "checkpoint.every_minutes": 0,
    "checkpoint.keep": 0,
    "elastic.max_failures_without_progress": 0,
    "elastic.heartbeat_interval_s": 0.1,
    "elastic.heartbeat_timeout_s": 1,
    "elastic.join_window_s": 0,
    "elastic.wait_for_nodes_s": 1,
    "elastic.init_timeout_s": 1,
    "elastic.step_timeout_s": 1,
    "elastic.stall_timeout_s": 0,
    "elastic.exclude_after": 0,
    "elastic.exclude_for_s": 1,
    "elastic.stop_grace_s": 1,
    "sweep.parallelism": 0,
}


def value_of(config: JobConfig, key: str) -> Any:
    """The value at a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def check(config: JobConfig, files: bool = True) -> None:
    """Look at everything but what only the run directory knows; without `files`, as for a plan, at no data either.

    Raises:
        BadInput: with all that is wrong.
    """
    problems = [*_words_and_numbers(config), *_shape(config), *check_program(config, files), *_told(config)]
    if not isinstance(config.model, NoModelConfig):
        problems += _data(config, files and not config.is_program)
    if files and config.checkpoint.dir is not None:
        problems += _checkpoint_url(config.checkpoint.dir)
    if isinstance(config.model, LlamaConfig):
        problems += _llama(config.model)
    if isinstance(config.model, HfConfig):
        problems += _hf(config.model)
    problems += _initial_weights(config)
    if problems:
        raise BadInput(problems)


def _words_and_numbers(config: JobConfig) -> Iterator[Problem]:
    for key in (*_CHOICES, *_AT_LEAST):
        if not _is_idle(config, key):
            yield from value_problem(key, value_of(config, key))


def _is_idle(config: JobConfig, key: str) -> bool:
    """Whether nobody reads a key: the trainer's own, where a program of the user's runs in its place."""
    trainers = ("steps", "data.", "optim.")
    return isinstance(config.model, NoModelConfig) and key.startswith(trainers)


def value_problem(key: str, value: Any) -> Iterator[Problem]:
    """What is wrong with one value, whatever the others are."""
    allowed, least = _CHOICES.get(key), _AT_LEAST.get(key)
    if allowed is not None and value not in allowed:
        hint = nearest(str(value), map(str, allowed))
        yield Problem(f"{key}={value}", f"allowed: {', '.join(map(str, allowed))}", hint)
    if least is not None and value < least:
        yield Problem(f"{key}={value}", f"must be at least {least:g}")


def _shape(config: JobConfig) -> Iterator[Problem]:
    try:
        low, high = node_range(config.nodes)
    except ValueError as e:
        where, _, what = str(e).partition(" ")
        yield Problem(where.rstrip(":"), what, 'write nodes=4, or nodes=2:4 for "at least 2, at most 4"')
        return
    if config.nproc_per_node != AUTO and not (isinstance(config.nproc_per_node, int) and config.nproc_per_node > 0):
        yield Problem(f"nproc_per_node={config.nproc_per_node}", "is neither auto nor a number of at least 1")
        return
    nproc = ranks_per_node(config)
    seen = set()
    for nodes in {low, high}:
        try:
            check_sharding(config, Topology.flat(nodes, nproc))
        except BadInput as e:
            for problem in e.problems:
                if problem.where not in seen:
                    seen.add(problem.where)
                    yield problem
    says_its_blocks = isinstance(config.model, HfConfig | NoModelConfig)
    if config.fsdp.wrap == "layer" and not config.model.wrap_classes and not says_its_blocks:
        yield Problem(
            "model.wrap_classes=[]",
            "is empty, so no layer would be sharded by itself",
            "name the class of your layers: model.wrap_classes='[Block]', or fsdp.wrap=size",
        )
    if config.fsdp.activation_offload and config.fsdp.activation_checkpointing == "none":
        yield Problem(
            "fsdp.activation_offload=true",
            "offloads what activation checkpointing keeps, and that is none",
            "fsdp.activation_checkpointing=full",
        )
    if config.elastic.heartbeat_timeout_s <= 2 * config.elastic.heartbeat_interval_s:
        yield Problem(
            f"elastic.heartbeat_timeout_s={config.elastic.heartbeat_timeout_s:g}",
            "is not more than two heartbeat intervals: one late beat would lose a node",
            f"at least {3 * config.elastic.heartbeat_interval_s:g}",
        )


def _data(config: JobConfig, files: bool) -> Iterator[Problem]:
    data = config.data
    if data.kind == "tokens" and files:
        if data.path is None:
            yield Problem("data.path", "data=tokens reads a file of token ids", "data.path=FILE")
        elif config.cluster.shares_files and not Path(data.path).is_file():
            yield Problem(f"data.path={data.path}", "there is no such file", "data.path=FILE of token ids")
        elif config.cluster.shares_files:
            size = np.dtype(data.token_dtype).itemsize if data.token_dtype in ("uint16", "uint32") else 2
            tokens = Path(data.path).stat().st_size // size
            if tokens <= data.seq_len:
                what = f"holds {tokens} tokens of {data.token_dtype}; one sample needs {data.seq_len + 1}"
                yield Problem(f"data.path={data.path}", what, "a longer file, or a smaller data.seq_len")
            elif Path(data.path).stat().st_size % size:
                what = f"its size is no whole number of {data.token_dtype} tokens"
                yield Problem(f"data.path={data.path}", what, "data.token_dtype=uint16 or uint32, as it was written")
            elif (highest := _highest_token(data.path, data.token_dtype)) is None:
                yield Problem(f"data.path={data.path}", "you may not read it", "chmod u+r, or another file")
            elif highest >= data.vocab_size:
                what = f"{data.path} holds token id {highest}"
                yield Problem(
                    f"data.vocab_size={data.vocab_size}", what, "the tokenizer's size, or another token_dtype"
                )
    elif data.kind == "synthetic" and data.tokens <= data.seq_len:
        yield Problem(f"data.tokens={data.tokens}", f"one sample needs {data.seq_len + 1}")
    elif data.kind in ("text", "hf_dataset"):
        yield from documents_problems(config, files)
    vocab = getattr(config.model, "vocab_size", 0)
    if isinstance(config.model, LlamaConfig | CustomModelConfig | HfConfig) and vocab and data.vocab_size > vocab:
        what = f"token ids go up to {data.vocab_size - 1}, the model has a vocabulary of {vocab}"
        yield Problem(f"data.vocab_size={data.vocab_size}", what, "a model, or a tokenizer, of the other's size")


def _checkpoint_url(place: str) -> Iterator[Problem]:
    """What keeps this machine from using a URL; that the bucket may be written is seen at the first save."""
    if "://" not in place:
        return
    extra = {"gs": "gcs", "gcs": "gcs"}.get(place.partition("://")[0], "s3")
    try:
        import fsspec
        import upath  # noqa: F401 - only whether it is there

        fsspec.get_filesystem_class(place.partition("://")[0])
    except ImportError as e:
        yield Problem(f"checkpoint.dir={place}", str(e), f"pip install 'fsdp_jobs[{extra}]', here and on the nodes")
    except ValueError as e:
        yield Problem(f"checkpoint.dir={place}", str(e), "s3://bucket/folder, gs://bucket/folder, or a folder")


def _told(config: JobConfig) -> Iterator[Problem]:
    """What is wrong with trackers and notifications, as far as this machine can tell."""
    tracking, notify = config.tracking, config.notify
    here = config.cluster.launcher == "local_fsdp"  # elsewhere the nodes have an environment of their own
    if "@" in (tracking.uri or ""):
        instead = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or WANDB_API_KEY"
        yield Problem("tracking.uri", "holds a password, and would be written into the run directory", instead)
    if here and tracking.kind in ("mlflow", "wandb") and importlib.util.find_spec(tracking.kind) is None:
        install = f"pip install 'fsdp_jobs[{tracking.kind}]'"
        yield Problem(f"tracking={tracking.kind}", "is not installed", install)
    words = NOTIFY_ON
    for word in notify.on:
        if word not in words:
            yield Problem(f"notify.on=[{word}]", f"allowed: {', '.join(words)}", nearest(word, words))
    if notify.webhook is not None and not re.fullmatch(r"env:\w+", notify.webhook):
        what = "names no variable; whoever has the URL may post to it, so it stands in no file"
        yield Problem("notify.webhook", what, "export CHAT_URL=https://..., notify.webhook=env:CHAT_URL")
    elif here and notify.webhook is not None and not os.environ.get(notify.webhook.removeprefix("env:")):
        yield Problem(f"notify.webhook={notify.webhook}", "is not in your environment", "export it")


def _highest_token(path: str, dtype: str) -> int | None:
    """The highest id in 64 stretches spread over a token file; None when it may not be read."""
    try:
        tokens = np.memmap(path, dtype=np.dtype(dtype), mode="r")
    except OSError:
        return None
    starts = np.linspace(0, max(0, len(tokens) - 4096), 64, dtype=np.int64)
    return max(int(tokens[s : s + 4096].max()) for s in starts)


def _llama(model: LlamaConfig) -> Iterator[Problem]:
    for key in ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim"):
        if getattr(model, key) < 1:
            yield Problem(f"model.{key}={getattr(model, key)}", "must be at least 1")
            return
    if model.dim % (2 * model.n_heads):
        what = f"must be a multiple of twice model.n_heads={model.n_heads}: a head's width is even"
        yield Problem(f"model.dim={model.dim}", what)
    if model.n_heads % model.n_kv_heads:
        yield Problem(f"model.n_kv_heads={model.n_kv_heads}", f"must divide model.n_heads={model.n_heads}")


def _hf(model: HfConfig) -> Iterator[Problem]:
    where = f"model.name_or_path={model.name_or_path}"
    if importlib.util.find_spec("transformers") is None:
        yield Problem("model=hf", "transformers is not installed", "pip install 'fsdp_jobs[hf]', here and on the nodes")
    folder = Path(model.name_or_path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        yield Problem(where, "the folder has no config.json", "a folder that save_pretrained wrote")
    elif not folder.is_dir() and not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", model.name_or_path):
        yield Problem(where, "is neither a folder nor a name on the hub", "FOLDER, or OWNER/NAME")


def _initial_weights(config: JobConfig) -> Iterator[Problem]:
    for entry in config.init_key_map:
        pattern, arrow, _ = entry.partition("=>")
        try:
            re.compile(pattern)
        except re.error as e:
            yield Problem(f"init_key_map: {entry}", f"is no regular expression: {e}", "REGEX=>REPLACEMENT")
        if not arrow:
            yield Problem(f"init_key_map: {entry}", "has no =>", "REGEX=>REPLACEMENT; with nothing after it, left out")
    if config.init_from is None and config.init_key_map:
        yield Problem("init_key_map", "is for names in init_from, and there is none", "init_from=FILE_OR_FOLDER")


def check_existing_run(config: JobConfig, run: RunDir) -> None:
    """Raises: BadInput when the run was begun with another training configuration, naming the keys."""
    newest = next(iter(find_checkpoints(home_of(config.checkpoint, run))), None)
    if newest is not None and not config.is_program and config.steps < (done := step_of(newest)):
        raise BadInput(
            [Problem(f"steps={config.steps}", f"run {run.name} is at step {done} already", f"steps above {done}")]
        )
    if not run.config.exists() or config.allow_config_change:
        return
    before, now = training_values(load_config(run.config)), training_values(config)
    problems = [
        Problem(f"{key}={now.get(key)}", f"run {run.name} was trained with {before.get(key)}")
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if problems:
        problems.append(
            Problem(
                f"name={run.name}",
                "goes on with the configuration it began with",
                "another name=..., or allow_config_change=true if you mean it",
            )
        )
        raise BadInput(problems)
