"""What cannot be submitted to this machine's Docker, and why; found before anything is started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
from docker.errors import DockerException, ImageNotFound
from docker.utils import parse_bytes

from fsdp_jobs.config.clusters import DockerClusterConfig
from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.resolve import node_range
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.docker.containers import RUN_LABEL, memory_need, parse_mount, prefix_of, shm_need
from fsdp_jobs.plan.memory import GIB
from fsdp_jobs.plan.plan import Plan
from fsdp_jobs.run.directory import RunDir


def check(
    api: docker.APIClient, config: JobConfig, plan: Plan, run: RunDir, daemon: dict[str, Any], gpus: list[str]
) -> None:
    """Raises: BadInput with all that is wrong."""
    cluster = config.cluster
    assert isinstance(cluster, DockerClusterConfig)
    problems = [
        *_words(cluster),
        *_image(api, cluster),
        *_sizes(config, plan, daemon),
        *_gpus(config, plan, daemon, gpus),
        *_names(api, run, node_range(config.nodes)[1]),
    ]
    if problems:
        raise BadInput(problems)


def _words(cluster: DockerClusterConfig) -> Iterator[Problem]:
    for name in cluster.pass_env:
        if name not in os.environ:
            yield Problem(f"cluster.pass_env=[{name}]", "is not in your environment", f"export {name}=...")
    for text in cluster.mounts:
        try:
            source = parse_mount(text)[0]
        except ValueError:
            yield Problem(f"cluster.mounts=[{text}]", "is not from:to or from:to:ro", "[/data:/data:ro], say")
            continue
        if not Path(source).exists():
            yield Problem(f"cluster.mounts=[{text}]", f"there is no {source} on this machine")


def _image(api: docker.APIClient, cluster: DockerClusterConfig) -> Iterator[Problem]:
    try:
        api.inspect_image(cluster.image)
    except ImageNotFound:
        instead = f"docker build -t {cluster.image} -f deploy/Dockerfile .   (in fsdp_jobs' checkout), or docker pull"
        yield Problem(f"cluster.image={cluster.image}", "this Docker has no such image", instead)


def _sizes(config: JobConfig, plan: Plan, daemon: dict[str, Any]) -> Iterator[Problem]:
    cluster = config.cluster
    assert isinstance(cluster, DockerClusterConfig)
    nodes = node_range(config.nodes)[1]
    needs = {"memory": memory_need(config, plan), "shm": shm_need(config, plan)}
    for key, need in needs.items():
        given = getattr(cluster, key)
        try:
            if given is not None and parse_bytes(given) < need:
                what = f"the plan's {plan.ranks_per_node} ranks need {need / GIB:.2f} GiB a node"
                yield Problem(f"cluster.{key}={given}", what, f"cluster.{key}={-(-need // 2**20)}m or more")
        except DockerException:
            yield Problem(f"cluster.{key}={given}", "is no size", "2g or 512m, say")
    if nodes * needs["memory"] > daemon["MemTotal"]:
        what = (
            f"by the plan they need {nodes * needs['memory'] / GIB:.1f} GiB, Docker has {daemon['MemTotal'] / GIB:.1f}"
        )
        instead = "fewer nodes, a smaller model or micro_batch, or more memory for Docker (Docker Desktop: Resources)"
        yield Problem(f"nodes={config.nodes}", what, instead)
    if cluster.cpus is not None and not 0 < cluster.cpus <= daemon["NCPU"]:
        yield Problem(f"cluster.cpus={cluster.cpus:g}", f"Docker has {daemon['NCPU']}", "null: one a rank, at most all")


def _gpus(config: JobConfig, plan: Plan, daemon: dict[str, Any], gpus: list[str]) -> Iterator[Problem]:
    if plan.backend == "gloo":
        return
    wanted = node_range(config.nodes)[1] * plan.ranks_per_node
    if len(gpus) < wanted:
        what = f"the job wants {wanted} GPUs, one a rank; this machine has {len(gpus)}"
        yield Problem(
            f"nodes={config.nodes}", what, "fewer nodes, a smaller nproc_per_node, or hardware=cpu to rehearse without"
        )
    elif "nvidia" not in daemon.get("Runtimes", {}):
        what = "containers get GPUs by NVIDIA's runtime, and this Docker does not have it"
        yield Problem("Docker", what, "install nvidia-container-toolkit, then: nvidia-ctk runtime configure")


def _names(api: docker.APIClient, run: RunDir, nodes: int) -> Iterator[Problem]:
    """Names that something else has taken; what is left of this very run is removed at submission."""
    prefix = prefix_of(run)
    wanted = {prefix + suffix for suffix in ("-coordinator", *(f"-node-{i}" for i in range(nodes)))}
    rename = "another name=..., or docker rm -f {} if nobody needs it"
    for container in api.containers(all=True):
        taken = wanted & {name.lstrip("/") for name in container["Names"]}
        if taken and container["Labels"].get(RUN_LABEL) != str(run.path):
            name = taken.pop()
            whose = container["Labels"].get(RUN_LABEL, "something that is no job of fsdp_jobs")
            yield Problem(f"container {name}", f"exists already, of {whose}", rename.format(name))
    for network in api.networks(names=[prefix]):
        if network["Name"] == prefix and (network["Labels"] or {}).get(RUN_LABEL) != str(run.path):
            instead = f"docker network rm {prefix} if nobody needs it, or another name=..."
            yield Problem(f"network {prefix}", "exists already, and is not this run's", instead)
