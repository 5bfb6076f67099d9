"""Translate a job for Docker, create and remove it: a network, a container for the coordinator and one per node."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
from docker.context import ContextAPI
from docker.context.config import get_current_context_name
from docker.types import DeviceRequest
from docker.utils import parse_bytes
from requests.exceptions import RequestException

from fsdp_jobs.config.clusters import DockerClusterConfig
from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.app import arguments
from fsdp_jobs.launchers.base import Job, to_yaml
from fsdp_jobs.launchers.mounts import Mount, mounts_of
from fsdp_jobs.launchers.snapshot import Snapshot, take, with_code
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import ADDRESS_ENV
from fsdp_jobs.run.files import as_written

logger = logging.getLogger(__name__)

RUN_LABEL = "fsdp_jobs.run.directory"
_REMOVAL_S = 60.0  # to wait for containers that another command is removing
_PORT = 29400  # in the job's own network: nothing is published


class NoDaemon(BadInput):
    """No Docker daemon answers this user."""


@contextmanager
def connected() -> Iterator[docker.APIClient]:
    """Connect to the Docker daemon of DOCKER_HOST, DOCKER_CONTEXT or the chosen context, as `docker` does.

    Raises:
        NoDaemon: it does not answer, or denies permission.
        BadInput: it is another machine's, there is no such context, or it answers a request in the block with an error.
    """
    where, name = os.environ.get("DOCKER_HOST"), os.environ.get("DOCKER_CONTEXT") or get_current_context_name()
    key = "DOCKER_HOST" if where else f"docker context {name}"
    if not where:
        try:
            context = ContextAPI.get_context(name)
        except Exception as e:  # docker raises plain Exception for a damaged context
            raise BadInput.at(f"Docker context {name}", f"cannot be read: {e}", "docker context ls") from e
        if context is None:
            raise BadInput.at(f"Docker context {name}", "there is no such context", "docker context ls")
        where = str(context.Host).removeprefix("http+")
    if not where.startswith(("unix://", "npipe://")):
        what = "is not a socket of this machine, but containers mount this machine's run directory"
        cure = "submit on Docker's machine, or: unset DOCKER_HOST DOCKER_CONTEXT; docker context use default"
        raise BadInput.at(f"{key}={where}", what, cure)
    try:
        api = docker.APIClient(base_url=where, version="auto", timeout=60)
    except docker.errors.DockerException as e:
        what, cure = f"no Docker daemon answers: {e}", "start Docker Desktop, or: sudo systemctl start docker"
        cure += "; rootless Docker and Podman need DOCKER_HOST=unix://..., their socket"
        if "PermissionError" in str(e):
            what = "you may not use its socket"
            cure = "sudo usermod -aG docker $USER and log in again, or rootless Docker: dockerd-rootless-setuptool.sh"
        raise NoDaemon([Problem(f"Docker at {where}", what, f"{cure}; cluster=local needs no Docker")]) from e
    try:
        yield api
    except (RequestException, docker.errors.DockerException) as e:
        cure = "docker network prune: unused networks take up the addresses" if "address pool" in str(e) else ""
        raise BadInput.at("Docker", str(getattr(e, "explanation", None) or e), cure) from e


@dataclass
class DockerRequest:
    """Containers as arguments of Docker's API, the coordinator's first."""

    run_dir: str
    prefix: str  # of the containers' names, and the network's name
    image: str
    gpus: list[str]  # ids, to be divided among the nodes when they are created
    pass_env: list[str]  # variables whose values are added when containers are created
    containers: list[dict[str, Any]]
    code: Snapshot | None = None  # copied at submission

    def __str__(self) -> str:
        shown = {"network": self.prefix, "image": self.image, "gpus": self.gpus, "pass_env": self.pass_env}
        return to_yaml({**shown, "containers": self.containers})


def prefix_of(run: RunDir) -> str:
    """Return the prefix of the names of a run's containers: at most 50 characters, so that they are host names."""
    name = f"fsdp-{run.name}"
    return name if len(name) <= 50 else f"{name[:41]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def cluster_of(config: JobConfig) -> DockerClusterConfig:
    """Narrow the type of `config.cluster`."""
    assert isinstance(config.cluster, DockerClusterConfig)
    return config.cluster


def translate(job: Job, daemon: dict[str, Any], gpus: list[str]) -> DockerRequest:
    """Translate a job into containers.

    Args:
        daemon: the output of `docker info`.
        gpus: ids of this machine's GPUs; none for a job on CPU.
    """
    config, run, cluster = job.config, RunDir(as_written(job.run.path)), cluster_of(job.config)
    code = take(Path.cwd(), run.path.parent, cluster.snapshot_mb) if cluster.snapshot_mb else None
    mounts, here = [*mounts_of(config, run), *map(parse_mount, cluster.mounts)], as_written(".")
    folder = here
    if config.is_program and not any(here.is_relative_to(mount.target) for mount in mounts):
        folder = run.path
        logger.warning(
            "containers have a copy of your code, not %s: the program starts in %s. cluster.mounts=[%s:%s] mounts it",
            *(here, folder, here, here),
        )
    security = str(daemon.get("SecurityOptions"))
    is_rootless = "rootless" in security or daemon.get("Rootless")  # Podman before 4.6 says only the latter
    user = "0:0" if is_rootless else f"{os.getuid()}:{os.getgid()}"  # a rootless daemon's root is the user who runs it
    host = {
        "init": True,
        "read_only": True,
        "tmpfs": {"/tmp": "exec"},  # torch.compile and Triton load what they have compiled there
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges", "label=disable"],  # else SELinux requires relabelling the mounted files
        "userns_mode": "host" if "userns" in security else None,  # remapped users may not write to the run directory
        "mounts": [docker.types.Mount(m.target, m.source, type="bind", read_only=m.is_read_only) for m in mounts],
    }
    default = min(job.plan.ranks_per_node, daemon["NCPU"]) if daemon.get("CpuCfsQuota", True) else 0  # 0: no limit
    limits = {
        "mem_limit": parse_bytes(cluster.memory) if cluster.memory else 2 * job.memory_need or None,
        "nano_cpus": int((cluster.cpus or default) * 1e9),
        "shm_size": parse_bytes(cluster.shm),
    }
    prefix, python = prefix_of(run), ["python"] if code is None else with_code(run.code, ["python"])

    def container(name: str, address: str, args: list[str], limits: dict[str, Any]) -> dict[str, Any]:
        part = name.partition("-")[0]
        env = {**job.app.roles[0].env, ADDRESS_ENV: f"{prefix}-{name}", **cluster.env}
        return {
            "user": user,
            "working_dir": str(folder),
            "entrypoint": python,
            "stop_timeout": int(config.elastic.stop_grace_s),
            "name": f"{prefix}-{name}",
            "hostname": name,
            "command": ["-m", "fsdp_jobs.launchers.attempts", part, str(run.path), address, "--", "python", *args],
            "environment": env,
            "host_config": {**host, **limits},
        }

    coordinator, agent = job.app.roles
    made = [container("coordinator", str(_PORT), arguments(coordinator), {})]
    for node in range(agent.num_replicas):
        address = f"{prefix}-coordinator:{_PORT}"
        made.append(container(f"node-{node}", address, arguments(agent, node), limits))
    gpus = gpus[: agent.num_replicas * job.plan.ranks_per_node]
    return DockerRequest(str(run.path), prefix, cluster.image, gpus, list(cluster.pass_env), made, code)


def parse_mount(text: str) -> Mount:
    """Parse `from:to` or `from:to:ro`.

    Raises:
        ValueError: it has another form, or `to` is not absolute.
    """
    source, *rest = text.split(":")
    if len(rest) not in (1, 2) or not rest[0].startswith("/") or rest[1:] not in ([], ["ro"], ["rw"]):
        raise ValueError(text)
    return Mount(str(as_written(source)), rest[0], rest[1:] == ["ro"])


def create(api: docker.APIClient, request: DockerRequest) -> None:
    """Create and start a request's network and containers; a failure leaves nothing behind."""
    run, labels = RunDir(request.run_dir), {RUN_LABEL: str(Path(request.run_dir).resolve())}
    secrets = {name: os.environ[name] for name in request.pass_env}
    remove(api, run)  # containers that an earlier submission kept
    for mount in request.containers[0]["host_config"]["mounts"]:
        if not Path(mount["Source"]).exists():
            Path(mount["Source"]).mkdir(parents=True)
    size = len(request.gpus) // (len(request.containers) - 1)
    try:
        api.create_network(request.prefix, driver="bridge", labels=labels)
        for node, container in enumerate(request.containers, -1):
            body = {**container, "environment": {**container["environment"], **secrets}}
            host = {"network_mode": request.prefix, **body.pop("host_config")}
            if own := request.gpus[node * size : (node + 1) * size]:  # nothing for the coordinator: [-size:0]
                host["device_requests"] = [DeviceRequest(device_ids=own, capabilities=[["gpu"]])]
            body["host_config"] = api.create_host_config(**host)
            api.start(api.create_container(request.image, labels=labels, **body)["Id"])
    except docker.errors.APIError:
        remove(api, run)
        raise


def containers_of(api: docker.APIClient, run: RunDir) -> dict[str, dict[str, Any]]:
    """Return a run's containers by their host names, running or not, as the API describes them."""
    inspected = {}
    for container in api.containers(all=True, filters=_labelled(run)):
        with suppress(docker.errors.NotFound):  # removed since
            description = api.inspect_container(container["Id"])
            inspected[description["Config"]["Hostname"]] = description
    return inspected


def is_running(container: dict[str, Any]) -> bool:
    """Whether a container has a process; Podman reports one that it is stopping as not running."""
    return bool(container["State"]["Pid"])


def remove(api: docker.APIClient, run: RunDir) -> None:
    """Remove a run's containers, running or not, and its network; another command may do so at the same time."""
    deadline = time.monotonic() + _REMOVAL_S
    while left := api.containers(all=True, filters=_labelled(run)):
        for container in left:
            with suppress(docker.errors.APIError):  # it has ended
                api.kill(container["Id"])  # else Podman first waits for its stop timeout
            try:
                api.remove_container(container["Id"], force=True, v=True)
            except docker.errors.APIError as e:
                if e.status_code not in (404, 409) or time.monotonic() > deadline:  # else removed already, or now
                    raise
                time.sleep(0.1)
    for network in api.networks(filters=_labelled(run)):
        with suppress(docker.errors.NotFound):
            api.remove_network(network["Id"])


def _labelled(run: RunDir) -> dict[str, str]:
    return {"label": f"{RUN_LABEL}={run.path.resolve()}"}
