"""A small model with its checkpointer, in the process group of a test's ranks."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_jobs.checkpoints.checkpointer import Checkpointer
from fsdp_jobs.config.schema import CheckpointConfig, IntegrityConfig, JobConfig, NoModelConfig
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.run.directory import RunDir
from tests import world


def trained(
    folder: Path | str,
    restart: str = "0-0",
    optimizer: Any = torch.optim.AdamW,
    model: nn.Module | None = None,
    integrity_action: str = "report",
    shard_group: int = 0,
    others: Mapping[str, Any] = MappingProxyType({}),
    **keys: Any,
) -> Checkpointer:
    """Make a checkpointer of a model that is sharded over all ranks, or groups of them; without asynchrony.

    Ranks are nodes of their own.
    """
    os.environ["GROUP_RANK"] = os.environ["RANK"]
    os.environ["LOCAL_RANK"] = "0"
    world = dist.get_world_size()
    torch.manual_seed(0)
    model = model or nn.Linear(8, 8)
    group = shard_group or world
    layout = Layout("hybrid_shard" if group < world else "full_shard", world, group)
    shape = layout.mesh_shape
    fully_shard(model, mesh=init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape)))
    config = JobConfig(
        script="program.py",
        model=NoModelConfig(),
        checkpoint=CheckpointConfig(**{"async_mode": "off", "every_steps": 1, "keep": 3, **keys}),
        integrity=IntegrityConfig(action=integrity_action),
    )
    run, made = RunDir(Path(folder)), optimizer(model.parameters(), lr=0.1)
    return Checkpointer(run, config, layout, model, made, others, torch.device("cpu"), 0, restart)


def fill(checkpoints: Checkpointer, value: complex) -> None:
    """Set every weight, so that what is read back can be told."""
    with torch.no_grad():
        for parameter in checkpoints.state.model.parameters():
            parameter.fill_(value)


def value_of(checkpoints: Checkpointer) -> float:
    """Return what `fill` has set, the same in all of this rank's weights."""
    values = {x for p in checkpoints.state.model.parameters() for x in p.to_local().flatten().tolist()}  # type: ignore[operator]
    assert len(values) == 1, values
    return values.pop()


def save_steps(checkpoints: Checkpointer, *steps: int) -> None:
    for step in steps:
        fill(checkpoints, float(step))
        checkpoints.save(step, block=True)


def _with_environment(variables: dict[str, str], function: Callable[..., Any], *args: Any) -> Any:
    """Call a function with the environment of the test: the fork server has the one that it was begun with."""
    os.environ |= variables
    return function(*args)


def run_to_the_end(ranks: int, function: Callable[..., Any], *args: Any, seconds: float = 120) -> list[int | None]:
    """Call `function(*args)` in ranks that may die. Returns their exit codes."""
    function = partial(_with_environment, dict(os.environ), function)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*world.PRELOADED, "tests.checkpoints.saving", "s3fs"])
    queue = context.Queue()
    with world.meeting_place() as meeting:
        processes = [
            context.Process(target=world._rank, args=(r, ranks, meeting, queue, function, args)) for r in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(seconds)
            process.kill()
            process.join()
    queue.cancel_join_thread()
    return [process.exitcode for process in processes]
