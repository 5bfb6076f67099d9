"""Validate a job against this machine's Docker before anything is started."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import docker
from docker.utils import parse_bytes

from fsdp_jobs.config.clusters import DockerClusterConfig
from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.resolve import accelerator, most_nodes, ranks_per_node
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.base import Finding, Job, findings
from fsdp_jobs.launchers.docker.containers import RUN_LABEL, cluster_of, parse_mount, prefix_of
from fsdp_jobs.plan.memory import GIB
from fsdp_jobs.run.processes import visible_gpus

_BUILD = "docker build -t {} -f deploy/Dockerfile .   (in fsdp_jobs' checkout), or docker pull"
_VERSIONS = "import fsdp_jobs, torch; print('fsdp_jobs', fsdp_jobs.__version__, 'torch', torch.__version__)"
_GPU_HOOK = "nvidia-container-runtime-hook"  # with it Docker can assign GPUs even if no runtime is configured
ASSUMED = {"MemTotal": 1 << 60, "NCPU": os.cpu_count() or 1}  # of a daemon that cannot be asked


def problems_of(api: docker.APIClient | None, job: Job, daemon: dict[str, Any]) -> Iterator[Problem]:
    """Yield the problems that keep a job from being submitted.

    Args:
        api: None if the daemon cannot be asked.
        daemon: the output of `docker info`.
    """
    cluster = cluster_of(job.config)
    yield from _inputs(cluster)
    yield from _sizes(job, daemon)
    if api is None:
        return
    yield from _image(api, cluster)
    yield from _gpus(job.config, daemon, visible_gpus())
    yield from _names(api, job)


def examine(api: docker.APIClient, config: JobConfig) -> Iterator[Finding]:
    """Yield findings on the daemon, GPUs, and the image, which is run once."""
    cluster, daemon, gpus = cluster_of(config), api.info(), visible_gpus()
    size = f"{daemon['NCPU']} CPUs, {daemon['MemTotal'] / GIB:.1f} GiB"
    yield Finding("daemon", "ok", f"Docker {daemon['ServerVersion']}, {size}")
    if not daemon.get("MemoryLimit", True):
        what = "this Docker does not limit memory: cluster.memory has no effect"
        yield Finding("limits", "warning", what, "rootless Docker needs cgroup v2; docker info says more")
    yield from findings("GPUs", list(_gpus(config, daemon, gpus)), f"{len(gpus)} on this machine")
    if problems := list(_image(api, cluster)):
        raise BadInput(problems)
    yield Finding("image", "ok", f"{cluster.image} is here; Python is started in it, which can take a minute or more")
    said = _run(api, cluster.image, ["-c", _VERSIONS]) or ["says nothing"]
    works = said[-1].startswith("fsdp_jobs ")
    yield Finding("image", "ok" if works else "bad", f"{cluster.image}: {said[-1]}", _BUILD.format(cluster.image))


def _run(api: docker.APIClient, image: str, args: list[str]) -> list[str]:
    """Run Python in an image and return the lines that it prints; Docker removes the container however this ends."""
    host = api.create_host_config(auto_remove=True)
    options = {"entrypoint": ["python"], "network_disabled": True, "host_config": host}
    made = api.create_container(image, args, **options)["Id"]
    try:
        output = api.attach(made, stream=True)  # before it starts, because auto_remove deletes the output, too
        api.start(made)
        return b"".join(output).decode(errors="replace").splitlines()
    except docker.errors.APIError as e:
        return [str(e.explanation)]
    finally:
        with suppress(docker.errors.APIError):  # already removed, or being removed
            api.remove_container(made, force=True)


def _inputs(cluster: DockerClusterConfig) -> Iterator[Problem]:
    for name in cluster.pass_env:
        if name not in os.environ:
            yield Problem(f"cluster.pass_env=[{name}]", "is not in your environment", f"export {name}=...")
    for text in cluster.mounts:
        try:
            source = parse_mount(text).source
        except ValueError:
            yield Problem(f"cluster.mounts=[{text}]", "is not from:to or from:to:ro", "e.g. [/data:/data:ro]")
            continue
        if not Path(source).exists():
            yield Problem(f"cluster.mounts=[{text}]", f"there is no {source} on this machine")


def _image(api: docker.APIClient, cluster: DockerClusterConfig) -> Iterator[Problem]:
    try:
        api.inspect_image(cluster.image)
    except docker.errors.DockerException as e:
        is_missing = isinstance(e, docker.errors.ImageNotFound | docker.errors.NullResource)
        what = "this Docker has no such image" if is_missing else str(getattr(e, "explanation", e))
        yield Problem(f"cluster.image={cluster.image}", what, _BUILD.format(cluster.image))


def _sizes(job: Job, daemon: dict[str, Any]) -> Iterator[Problem]:
    config, plan, cluster = job.config, job.plan, cluster_of(job.config)
    nodes = most_nodes(config)
    memory = job.memory_need
    for key, size, need in (("memory", cluster.memory, memory), ("shm", cluster.shm, job.shm_need)):
        try:
            if size is not None and parse_bytes(size) < need:
                what = f"the plan's {plan.ranks_per_node} ranks need {need / GIB:.2f} GiB per node"
                yield Problem(f"cluster.{key}={size}", what, f"cluster.{key}={-(-need // 2**20)}m or more")
        except docker.errors.DockerException:
            yield Problem(f"cluster.{key}={size}", "not a valid size", "e.g. 512m, 2g")
    if nodes * memory > (total := daemon["MemTotal"]):
        what = f"the plan expects them to need {nodes * memory / GIB:.1f} GiB, Docker has {total / GIB:.1f}"
        cure = "fewer nodes, a smaller model or micro_batch, or more memory for Docker (Docker Desktop: Resources)"
        yield Problem(f"nodes={config.nodes}", what, cure)
    if cluster.cpus is not None and not 0 < cluster.cpus <= daemon["NCPU"]:
        cure = "null: one per rank, at most all"
        yield Problem(f"cluster.cpus={cluster.cpus:g}", f"Docker has {daemon['NCPU']}", cure)


def _gpus(config: JobConfig, daemon: dict[str, Any], gpus: list[str]) -> Iterator[Problem]:
    wanted = most_nodes(config) * ranks_per_node(config)
    if accelerator(config) != "cuda":
        return
    if len(gpus) < wanted:
        what = f"the job needs {wanted} GPUs, one per rank; this machine has {len(gpus)}"
        cure = "fewer nodes, a smaller nproc_per_node, or hardware=cpu to rehearse without"
        yield Problem(f"nodes={config.nodes}", what, cure)
    elif "nvidia" not in daemon.get("Runtimes", {}) and shutil.which(_GPU_HOOK) is None:
        what = "Docker needs NVIDIA's container toolkit to assign GPUs, and does not have it"
        yield Problem("Docker", what, "install nvidia-container-toolkit, then: nvidia-ctk runtime configure")


def _names(api: docker.APIClient, job: Job) -> Iterator[Problem]:
    """Yield names that something else has taken; remains of this run are removed at submission."""
    prefix, nodes = prefix_of(job.run), most_nodes(job.config)
    own = {("container", f"{prefix}-{name}") for name in ("coordinator", *(f"node-{i}" for i in range(nodes)))}
    taken = [("container", "rm -f", name[1:], c["Labels"]) for c in api.containers(all=True) for name in c["Names"]]
    taken += [("network", "network rm", n["Name"], n["Labels"]) for n in api.networks(names=[prefix])]
    for kind, removal, name, labels in taken:
        owner = (labels or {}).get(RUN_LABEL)
        if (kind, name) in own | {("network", prefix)} and owner != str(job.run.path.resolve()):
            what = f"already exists, and belongs to {owner or 'something other than a job of fsdp_jobs'}"
            cure = f"another name=..., or docker {removal} {name} if nobody needs it"
            yield Problem(f"{kind} {name}", what, cure)
