"""Validate a composed configuration and report all problems at once, before anything is started. No torch."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

from fsdp_jobs.config.data import HUB_NAME, data_problems
from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.keys import value_problems
from fsdp_jobs.config.program import program_problems
from fsdp_jobs.config.resolve import node_range, probe_every_steps, ranks_per_node
from fsdp_jobs.config.schema import HfConfig, JobConfig, LlamaConfig, NoModelConfig

_MODEL = "model.name_or_path"


def config_problems(config: JobConfig, files: bool, is_offline: bool = False) -> Iterator[Problem]:
    """Yield the problems of a configuration; without `files`, as for a plan, data is not checked.

    `is_offline`: paths name files of the cluster that this machine does not see.
    """
    has_model = not isinstance(config.model, NoModelConfig)
    shares_files = config.cluster.shares_files and not is_offline
    yield from value_problems(config, unread=() if has_model else ("steps", "data.", "optim."))
    yield from _numbers_of_ranks(config)
    yield from _relations(config)
    yield from program_problems(config, files, shares_files)
    yield from _tracking(config)
    yield from _notify(config)
    if has_model:
        yield from data_problems(config, files and not config.is_program, shares_files)
    if files and config.checkpoint.dir is not None and "://" in config.checkpoint.dir:
        yield from _checkpoint_url(config.checkpoint.dir)
    if isinstance(config.model, LlamaConfig):
        yield from _llama(config.model)
    if isinstance(config.model, HfConfig):
        yield from _hf(config.model)
    yield from _initial_weights(config)


def _numbers_of_ranks(config: JobConfig) -> Iterator[Problem]:
    for resolve in (lambda: node_range(config.nodes), lambda: ranks_per_node(config)):
        try:
            resolve()
        except BadInput as e:
            yield from e.problems


def _relations(config: JobConfig) -> Iterator[Problem]:
    """Check folders, and keys of the groups `fsdp`, `elastic` and `integrity` against others."""
    saves = config.checkpoint
    folders = {"runs_dir": config.runs_dir, "checkpoint.dir": saves.dir, "checkpoint.local_dir": saves.local_dir}
    for key, folder in folders.items():
        if folder == "":
            yield Problem(f"{key}=", "names no folder", "is a variable of your shell not set?")
    data, model = None if config.is_program else config.data.path, getattr(config.model, "name_or_path", None)
    paths = folders | {"script": config.script, "data.path": data, "init_from": config.init_from, _MODEL: model}
    for key, path in paths.items():
        if path is not None and path.startswith("~/"):
            yield Problem(f"{key}={path}", "a shell does not replace ~ behind a key", f"{key}=$HOME{path[1:]}")
    if config.fsdp.activation_offload and config.fsdp.activation_checkpointing == "none":
        what = "offloads what activation checkpointing keeps, and fsdp.activation_checkpointing=none"
        yield Problem("fsdp.activation_offload=true", what, "fsdp.activation_checkpointing=full")
    timeout, interval = config.elastic.heartbeat_timeout_s, config.elastic.heartbeat_interval_s
    if timeout <= 2 * interval:
        what = "is not more than two heartbeat intervals: one late heartbeat would lose a node"
        yield Problem(f"elastic.heartbeat_timeout_s={timeout:g}", what, f"at least {3 * interval:g}")
    every_steps, action, strategy = config.integrity.every_steps, config.integrity.action, config.fsdp.strategy
    if every_steps and strategy in ("full_shard", "shard_grad_op"):
        what = f"fsdp.strategy={strategy} has one replica, and nothing to compare it with"
        yield Problem(f"integrity.every_steps={every_steps}", what, "fsdp=hybrid_shard, or integrity.every_steps=0")
    if action != "report" and not (every_steps or probe_every_steps(config) or config.checkpoint.memory.every_steps):
        cure = "integrity.every_steps=100, or checkpoint.memory.every_steps=auto"
        yield Problem(f"integrity.action={action}", "nothing is compared", cure)


def _checkpoint_url(url: str) -> Iterator[Problem]:
    """Check that this machine can use a URL; permission to write the bucket shows only at the first save."""
    protocol = url.partition("://")[0]
    extra = "gcs" if protocol in ("gs", "gcs") else "s3"
    try:
        import fsspec
        import upath  # noqa: F401 - only whether it is installed

        fsspec.get_filesystem_class(protocol)
    except ImportError as e:
        yield Problem(f"checkpoint.dir={url}", str(e), f"pip install 'fsdp_jobs[{extra}]', here and on the nodes")
    except ValueError as e:
        yield Problem(f"checkpoint.dir={url}", str(e), "s3://bucket/folder, gs://bucket/folder, or a folder")


def _tracking(config: JobConfig) -> Iterator[Problem]:
    tracking = config.tracking
    if "@" in (tracking.uri or ""):
        instead = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or WANDB_API_KEY"
        yield Problem("tracking.uri", "holds a password, and would be written into the run directory", instead)
    if re.match(r"[\w.-]+:\d", tracking.uri or ""):
        yield Problem(f"tracking.uri={tracking.uri}", "has no scheme", f"http://{tracking.uri}, or https")
    is_known = tracking.kind in ("mlflow", "wandb") and config.cluster.shares_environment
    if is_known and importlib.util.find_spec(tracking.kind) is None:
        yield Problem(f"tracking={tracking.kind}", "is not installed", f"pip install 'fsdp_jobs[{tracking.kind}]'")


def _notify(config: JobConfig) -> Iterator[Problem]:
    webhook = config.notify.webhook
    if webhook is None:
        return
    if not re.fullmatch(r"env:\w+", webhook):
        what = "is not env:NAME; whoever has the URL may post to it, so it stands in no file"
        yield Problem("notify.webhook", what, "export CHAT_URL=https://..., notify.webhook=env:CHAT_URL")
    elif config.cluster.shares_environment and not os.environ.get(webhook.removeprefix("env:")):
        yield Problem(f"notify.webhook={webhook}", "is not in your environment", "export it")


def _llama(model: LlamaConfig) -> Iterator[Problem]:
    if model.n_heads > 0 and model.dim % (2 * model.n_heads):
        what = f"must be a multiple of twice model.n_heads={model.n_heads}: a head's width is even"
        yield Problem(f"model.dim={model.dim}", what)
    if model.n_kv_heads > 0 and model.n_heads % model.n_kv_heads:
        yield Problem(f"model.n_kv_heads={model.n_kv_heads}", f"must divide model.n_heads={model.n_heads}")


def _hf(model: HfConfig) -> Iterator[Problem]:
    where, folder = f"{_MODEL}={model.name_or_path}", Path(model.name_or_path)
    if importlib.util.find_spec("transformers") is None:
        yield Problem("model=hf", "transformers is not installed", "pip install 'fsdp_jobs[hf]', here and on the nodes")
    if folder.is_dir() and not (folder / "config.json").is_file():
        yield Problem(where, "the folder has no config.json", "a folder that save_pretrained wrote")
    elif not folder.is_dir() and not HUB_NAME.fullmatch(model.name_or_path):
        yield Problem(where, "is neither a folder nor a name on the hub", "FOLDER, or OWNER/NAME")


def _initial_weights(config: JobConfig) -> Iterator[Problem]:
    for entry in config.init_key_map:
        pattern, arrow, _ = entry.partition("=>")
        try:
            re.compile(pattern)
        except re.error as e:
            yield Problem(f"init_key_map: {entry}", f"is not a regular expression: {e}", "REGEX=>REPLACEMENT")
        if not arrow:
            yield Problem(f"init_key_map: {entry}", "has no =>", "REGEX=>REPLACEMENT; with nothing after it, left out")
    if config.init_from is None and config.init_key_map:
        yield Problem("init_key_map", "renames keys of init_from, which is null", "init_from=FILE_OR_FOLDER")
