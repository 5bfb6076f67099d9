"""A job as a TorchX AppDef, the one description of what runs; launchers translate it.

Two roles: one coordinator, and one agent per node. The launcher sets environment variables (run/env.py) for what is
known only when an attempt starts: the attempt, the coordinator's address, a node's own address and host.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from fsdp_jobs.config.resolve import accelerator, node_range
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import SUBMISSION_ENV
from fsdp_jobs.run.files import as_written

if TYPE_CHECKING:
    from torchx.specs import AppDef, Role

_DEFAULTS = {  # of the ranks' environment
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
RUN_DIR_KEY = "fsdp_jobs/run_dir"  # in the AppDef's metadata


def to_app(config: JobConfig, run: RunDir, nproc_per_node: int, submission: str) -> AppDef:
    """Describe a job: a coordinator and up to `nodes` agents of `nproc_per_node` ranks each."""
    from torchx.specs import AppDef, Resource, Role, macros

    low, high = node_range(config.nodes)
    run_dir = str(as_written(run.path))
    env = {SUBMISSION_ENV: submission, **_DEFAULTS}
    role = partial(Role, image="", entrypoint=sys.executable, env=env)
    coordinator = ["-m", "fsdp_jobs.control.server", run_dir]
    agent = ["-m", "fsdp_jobs.node.agent", run_dir, "--node", macros.replica_id, "--nproc", str(nproc_per_node)]
    gpus = nproc_per_node if accelerator(config) == "cuda" else 0
    node = Resource(cpu=nproc_per_node, gpu=gpus, memMB=1024 * nproc_per_node)
    roles = [
        role("coordinator", args=coordinator, resource=Resource(cpu=1, gpu=0, memMB=300)),
        role("trainer", args=agent, num_replicas=high, min_replicas=low, resource=node),
    ]
    return AppDef(name=run.name, roles=roles, metadata={RUN_DIR_KEY: run_dir})


def with_environment(own: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment plus a role's variables; the user's values replace defaults."""
    users = {name: os.environ[name] for name in _DEFAULTS if name in os.environ}
    return {**os.environ, **own, **users}


def arguments(role: Role, node: int | str = 0) -> list[str]:
    """Return a role's arguments for a node: its number, or a placeholder that the cluster replaces."""
    from torchx.specs import macros

    return [argument.replace(macros.replica_id, str(node)) for argument in role.args]
