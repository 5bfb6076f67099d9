"""What a job is in Docker: a network, a container for the coordinator and one a node; made, found and removed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker
import yaml
from docker.errors import APIError, DockerException, NotFound
from docker.types import DeviceRequest, Mount
from docker.utils import parse_bytes
from torchx.specs import AppDef, Role, macros

from fsdp_jobs.config.clusters import DockerClusterConfig
from fsdp_jobs.config.data import input_paths
from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.app import RUN_DIR_KEY
from fsdp_jobs.launchers.snapshot import Snapshot, take
from fsdp_jobs.plan.memory import GIB
from fsdp_jobs.plan.plan import Plan
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import ADDRESS_ENV

RUN_LABEL = "fsdp_jobs.run.directory"
_PORT = 29400  # in the job's own network: nothing is published
_AGENT_BYTES = GIB // 2  # an agent and its fork server, which has imported torch


def connect() -> docker.APIClient:
    """Docker's daemon, as DOCKER_HOST or the default socket names it.

    Raises:
        BadInput: none answers, it may not be spoken to, or it is another machine's.
    """
    where = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if not where.startswith(("unix://", "npipe://")):
        what = "is another machine's Docker, and containers mount this machine's run directory"
        raise BadInput([Problem(f"DOCKER_HOST={where}", what, "submit on that machine")])
    try:
        return docker.APIClient(**docker.utils.kwargs_from_env(), version="auto", timeout=60)
    except DockerException as e:
        why = str(e)
    if "PermissionError" in why:
        what = "you may not use its socket"
        instead = "sudo usermod -aG docker $USER and log in again, or rootless Docker: dockerd-rootless-setuptool.sh"
    else:
        what = f"no Docker daemon answers: {why}"
        instead = "start Docker Desktop, or: sudo systemctl start docker. cluster=local needs none"
    raise BadInput([Problem(f"Docker at {where}", what, instead)])


@dataclass
class DockerRequest:
    """What is submitted, in the words of Docker's API. Values of `pass_env` are added when containers are made."""

    run_dir: str
    prefix: str  # of the names of containers; the network's name
    image: str
    containers: list[dict[str, Any]] = field(default_factory=list)
    pass_env: list[str] = field(default_factory=list)
    code: Snapshot | None = None
    app_id: str = ""  # once it is submitted

    def to_json(self) -> str:
        """Without the code, which is copied when a job is submitted."""
        return json.dumps({key: value for key, value in vars(self).items() if key != "code"}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> DockerRequest:
        return cls(**json.loads(text))

    def __str__(self) -> str:
        shown = {
            "network": self.prefix,
            "image": self.image,
            "environment from yours": self.pass_env,
            "containers": self.containers,
        }
        return str(yaml.safe_dump(json.loads(json.dumps(shown)), sort_keys=False, width=1000))


def prefix_of(run: RunDir) -> str:
    """What names of a run's containers begin with: at most 50 characters, so that they are host names, too."""
    name = f"fsdp-{run.name}"
    return name if len(name) <= 50 else f"{name[:41]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def memory_need(config: JobConfig, plan: Plan) -> int:
    """Bytes of host memory that a node takes by the plan, /dev/shm included; 0 when the model is not known."""
    if plan.memory is None:
        return 0
    on_cpu = plan.backend == "gloo"
    rank = plan.memory.total if on_cpu else 2 * GIB + plan.memory.host
    return plan.ranks_per_node * rank + _AGENT_BYTES + shm_need(config, plan)


def shm_need(config: JobConfig, plan: Plan) -> int:
    """Bytes of /dev/shm that a node takes: what data workers hand over, and NCCL's channels between its ranks."""
    data = config.data
    batches = 0 if config.is_program else data.workers * data.prefetch * data.micro_batch * (data.seq_len + 1) * 8
    channels = 0 if plan.backend == "gloo" else 64 * 2**20
    return int(plan.ranks_per_node * (batches + channels + 2**20))


def translate(app: AppDef, config: JobConfig, plan: Plan, daemon: dict[str, Any], gpus: list[str]) -> DockerRequest:
    """An AppDef as containers.

    Args:
        daemon: what Docker says of itself (`docker info`).
        gpus: ids of the GPUs to divide among the nodes; none for a job on CPU.
    """
    cluster = config.cluster
    assert isinstance(cluster, DockerClusterConfig)
    run = RunDir(app.metadata[RUN_DIR_KEY])
    code = take(Path.cwd(), run.path.parent, cluster.snapshot_mb) if cluster.snapshot_mb else None
    request = DockerRequest(str(run.path), prefix_of(run), cluster.image, [], list(cluster.pass_env), code)
    rootless = any("rootless" in option for option in daemon.get("SecurityOptions") or [])
    common = {
        "user": "0:0" if rootless else f"{os.getuid()}:{os.getgid()}",  # root of a rootless daemon is its user
        "working_dir": str(Path.cwd()),
        "entrypoint": ["python"],
        "stop_timeout": int(config.elastic.stop_grace_s),
    }
    host = {
        "init": True,
        "read_only": True,
        "tmpfs": {"/tmp": ""},
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "mounts": [_mount(*m) for m in _mounts(config, run)],
    }
    for role in app.roles:
        for replica in range(role.num_replicas):
            concrete: Role = macros.Values("", app.name, str(replica), "").apply(role)
            is_node = role.name == "trainer"
            name = f"node-{replica}" if is_node else "coordinator"
            wrapped = ["-m", "fsdp_jobs.launchers.attempts"]
            place = f"{request.prefix}-coordinator:{_PORT}" if is_node else str(_PORT)
            wrapped += ["node" if is_node else "coordinator", str(run.path), place, "--"]
            python_path = {"PYTHONPATH": str(run.code)} if code is not None else {}
            environment = {**concrete.env, ADDRESS_ENV: f"{request.prefix}-{name}", **python_path, **cluster.env}
            mine = gpus[replica * plan.ranks_per_node : (replica + 1) * plan.ranks_per_node]
            limits = _limits(config, plan, daemon["NCPU"], mine) if is_node else {}
            request.containers.append(
                {
                    **common,
                    "name": f"{request.prefix}-{name}",
                    "hostname": name,
                    "command": [*wrapped, "python", *concrete.args],
                    "environment": environment,
                    "host_config": {**host, **limits},
                }
            )
    return request


def _limits(config: JobConfig, plan: Plan, cores: int, gpus: list[str]) -> dict[str, Any]:
    """What a node may use, as keywords of the API's host configuration."""
    cluster = config.cluster
    assert isinstance(cluster, DockerClusterConfig)
    limits: dict[str, Any] = {
        "mem_limit": parse_bytes(cluster.memory) if cluster.memory else 2 * memory_need(config, plan) or None,
        "nano_cpus": int((cluster.cpus or min(plan.ranks_per_node, cores)) * 1e9),
        "shm_size": parse_bytes(cluster.shm),
    }
    if gpus:
        limits["device_requests"] = [DeviceRequest(device_ids=gpus, capabilities=[["gpu"]])]
    return limits


def _mounts(config: JobConfig, run: RunDir) -> Iterator[tuple[str, str, bool]]:
    """(from, to, read only) of what a job reads and writes outside its image."""
    assert isinstance(config.cluster, DockerClusterConfig)
    yield str(run.path), str(run.path), False
    if config.checkpoint.dir is not None and "://" not in config.checkpoint.dir:
        folder = str(Path(config.checkpoint.dir).resolve())
        yield folder, folder, False  # Docker wants it to exist: `create` makes it
    for path in input_paths(config):
        yield str(path.resolve()), str(path.absolute()), True
    for text in config.cluster.mounts:
        yield parse_mount(text)


def parse_mount(text: str) -> tuple[str, str, bool]:
    """`from:to` or `from:to:ro`.

    Raises:
        ValueError: of another form, or a path in the container that is not absolute.
    """
    source, *rest = text.split(":")
    if len(rest) not in (1, 2) or not rest[0].startswith("/") or rest[1:] not in ([], ["ro"], ["rw"]):
        raise ValueError(text)
    return str(Path(source).resolve()), rest[0], rest[1:] == ["ro"]


def _mount(source: str, target: str, read_only: bool) -> Mount:
    return Mount(target, source, type="bind", read_only=read_only)


def create(api: docker.APIClient, request: DockerRequest) -> None:
    """Make and start a request's network and containers. What a failure leaves is removed.

    Raises:
        BadInput: Docker refuses something.
    """
    labels = {RUN_LABEL: request.run_dir}
    secrets = {name: os.environ[name] for name in request.pass_env}
    remove(api, request.run_dir)  # what an earlier submission was asked to keep
    for mount in request.containers[0]["host_config"]["mounts"]:
        if not Path(mount["Source"]).exists():
            Path(mount["Source"]).mkdir(parents=True)
    try:
        api.create_network(request.prefix, driver="bridge", labels=labels)
        for container in request.containers:
            given = {**container, "environment": {**container["environment"], **secrets}}
            host_config = api.create_host_config(network_mode=request.prefix, **given.pop("host_config"))
            made = api.create_container(request.image, labels=labels, host_config=host_config, **given)
            api.start(made["Id"])
    except APIError as e:
        remove(api, request.run_dir)
        instead = ""
        if "address pool" in str(e.explanation):
            instead = "networks that nothing uses take up the addresses: docker network prune"
        raise BadInput([Problem("Docker", str(e.explanation), instead)]) from e


def containers_of(api: docker.APIClient, run_dir: str) -> list[dict[str, Any]]:
    """A run's containers, running or not, as the API describes them."""
    listed = api.containers(all=True, filters={"label": f"{RUN_LABEL}={run_dir}"})
    found = []
    for c in listed:
        try:
            found.append(api.inspect_container(c["Id"]))
        except NotFound:
            continue  # removed since
    return found


def remove(api: docker.APIClient, run_dir: str) -> None:
    """Take a run's containers and network away, running or not."""
    ours = {"label": f"{RUN_LABEL}={run_dir}"}
    for container in api.containers(all=True, filters=ours):
        try:
            api.remove_container(container["Id"], force=True, v=True)
        except NotFound:
            continue
    for network in api.networks(filters=ours):
        api.remove_network(network["Id"])
