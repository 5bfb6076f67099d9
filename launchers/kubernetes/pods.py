"""The pods of a job: what runs in them, what they may use, how they are kept apart or together. Pure; no client."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torchx.specs import AppDef, Role, macros

from fsdp_jobs.config.clusters import KubernetesClusterConfig
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.app import RUN_DIR_KEY
from fsdp_jobs.launchers.kubernetes.labels import (
    APP,
    COORDINATOR_PORT,
    JOB_FILES,
    POD_INFO,
    ROLE,
    TERMINATION_LOG,
    TOKEN_FILES,
    Names,
)
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import ADDRESS_ENV, HOST_ENV
from fsdp_jobs.run.events import read_events

Object = dict[str, Any]

_PROGRAM = ["python", "-m", "fsdp_jobs.launchers.kubernetes.pod"]
_LEAVE_S = 15.0  # after the save: the verdict, and the processes' ends


def node_pod(app: AppDef, config: JobConfig, run: RunDir, names: Names, coordinator: str, node: str) -> Object:
    """The template of a node's pod.

    Args:
        coordinator: host under which pods reach the coordinator.
        node: number of the node, or what the kubelet makes it of: `$(JOB_COMPLETION_INDEX)`.
    """
    cluster = _cluster(config)
    role = _role(app, "trainer")
    on_gpu = role.resource.gpu > 0
    ranks = int(role.resource.cpu)
    amounts = {
        "cpu": cluster.cpus or str(8 * ranks if on_gpu else ranks),
        "memory": cluster.memory or f"{(32 if on_gpu else 2) * ranks}Gi",
        **({cluster.gpu_resource: str(ranks)} if on_gpu else {}),
        **cluster.resources,
    }
    arguments = ["node", names.app, pods_run_dir(config, run), f"{coordinator}:{COORDINATOR_PORT}"]
    container = _container(
        "trainer", app, role, config, run, [*arguments, "--", *_command(app, role, config, run, node)]
    )
    container["env"] += [
        {"name": ADDRESS_ENV, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": HOST_ENV, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        *({"name": name, "value": value} for name, value in cluster.env.items()),
        *(_secret_env(name, reference) for name, reference in cluster.secret_env.items()),
    ]
    container["resources"] = {"requests": amounts, "limits": dict(amounts)}
    container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
    spec = _spec(config, run, container)
    spec["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": cluster.shm}})
    spec |= {"nodeSelector": dict(cluster.node_selector)} if cluster.node_selector else {}
    spec["tolerations"] += cluster.tolerations
    mine = {"matchLabels": {APP: names.app, ROLE: "trainer"}}
    spec["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": mine,
        }
    ]
    affinity: Object = {}
    if cluster.leaf_label is not None:
        term = {"labelSelector": mine, "topologyKey": cluster.leaf_label}
        affinity["podAffinity"] = {
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]
        }
    if excluded := sorted(run.excluded_hosts()):
        apart = {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": [host]} for host in excluded]}
        affinity["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [apart]}}
    spec |= {"affinity": affinity} if affinity else {}
    return _template(config, names, "trainer", spec)


def coordinator_pod(app: AppDef, config: JobConfig, run: RunDir, names: Names) -> Object:
    """The template of the coordinator's pod: it also brings configuration and token to the run directory."""
    role = _role(app, "coordinator")
    arguments = ["coordinator", names.app, pods_run_dir(config, run), str(COORDINATOR_PORT)]
    container = _container("coordinator", app, role, config, run, [*arguments, "--", *_command(app, role, config, run)])
    memory = f"{2 * role.resource.memMB}Mi"  # the process, and the one that keeps it
    container["resources"] = {"requests": {"cpu": "100m", "memory": memory}, "limits": {"cpu": "1", "memory": memory}}
    container["env"] += _webhook_env(config)
    container["ports"] = [{"name": "coordinator", "containerPort": COORDINATOR_PORT}]
    container["volumeMounts"] += [
        {"name": "job", "mountPath": JOB_FILES, "readOnly": True},
        {"name": "token", "mountPath": TOKEN_FILES, "readOnly": True},
        {"name": "pod", "mountPath": POD_INFO, "readOnly": True},
    ]
    spec = _spec(config, run, container)
    annotations = {"path": "annotations", "fieldRef": {"fieldPath": "metadata.annotations"}}
    spec["volumes"] += [
        {"name": "job", "configMap": {"name": names.files}},
        {"name": "token", "secret": {"secretName": names.files}},
        {"name": "pod", "downwardAPI": {"items": [annotations]}},
    ]
    return _template(config, names, "coordinator", spec)


def pods_run_dir(config: JobConfig, run: RunDir) -> str:
    """The run directory as pods see it."""
    return f"{_cluster(config).mount_path.rstrip('/')}/{run.name}"


def grace_s(config: JobConfig, run: RunDir) -> int:
    """Seconds from SIGTERM to SIGKILL: the configured time to save, or twice the slowest save of this run so far."""
    saves = [float(e["seconds"]) for e in read_events(run) if e["event"] == "checkpoint"]
    return math.ceil(max([config.elastic.stop_grace_s, *(2 * s for s in saves)]) + _LEAVE_S)


def merge(base: Any, patch: Any) -> Any:
    """`base` with `patch` on top: mappings key by key, lists of named things by name, anything else replaced."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {**base, **{k: merge(base[k], v) if k in base else v for k, v in patch.items()}}
    if isinstance(base, list) and isinstance(patch, list) and _named(base) and _named(patch):
        patches = {p["name"]: p for p in patch}
        known = [merge(b, patches.pop(b["name"])) if b["name"] in patches else b for b in base]
        return [*known, *patches.values()]
    return patch


def _named(items: Sequence[Any]) -> bool:
    return all(isinstance(i, dict) and "name" in i for i in items)


def _cluster(config: JobConfig) -> KubernetesClusterConfig:
    assert isinstance(config.cluster, KubernetesClusterConfig)
    return config.cluster


def _role(app: AppDef, name: str) -> Role:
    return next(r for r in app.roles if r.name == name)


def _command(app: AppDef, role: Role, config: JobConfig, run: RunDir, replica_id: str = "0") -> list[str]:
    """The role's own command, as it is called in a pod."""
    values = macros.Values(img_root="", app_id=app.name, replica_id=replica_id, rank0_env="")
    here, there = app.metadata[RUN_DIR_KEY], pods_run_dir(config, run)
    return ["python", *(there if a == here else a for a in values.apply(role).args)]


def _container(name: str, app: AppDef, role: Role, config: JobConfig, run: RunDir, arguments: list[str]) -> Object:
    cluster = _cluster(config)
    return {
        "name": name,
        "image": cluster.image,
        "command": [*_PROGRAM, *arguments],
        "env": [{"name": k, "value": v} for k, v in {**role.env, "HOME": "/tmp"}.items()],
        "volumeMounts": [{"name": "runs", "mountPath": cluster.mount_path}, {"name": "tmp", "mountPath": "/tmp"}],
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def _spec(config: JobConfig, run: RunDir, container: Object) -> Object:
    cluster = _cluster(config)
    security: Object = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    if cluster.run_as_user is not None:
        security |= {"runAsUser": cluster.run_as_user, "runAsGroup": cluster.run_as_user}
    if cluster.fs_group is not None:
        security |= {"fsGroup": cluster.fs_group, "fsGroupChangePolicy": "OnRootMismatch"}
    lost = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": cluster.lost_after_s}
    spec: Object = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_s(config, run),
        "securityContext": security,
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": cluster.claim}},
            {"name": "tmp", "emptyDir": {}},
        ],
        "tolerations": [{"key": f"node.kubernetes.io/{taint}", **lost} for taint in ("not-ready", "unreachable")],
    }
    if cluster.service_account is not None:
        spec["serviceAccountName"] = cluster.service_account
    if cluster.priority_class is not None:
        spec["priorityClassName"] = cluster.priority_class
    if cluster.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in cluster.image_pull_secrets]
    return spec


def _template(config: JobConfig, names: Names, role: str, spec: Object) -> Object:
    cluster = _cluster(config)
    known = {c["name"] for c in spec["containers"]}
    others = {"coordinator", "trainer"} - known
    patch = dict(cluster.pod_patch)
    if "containers" in patch:  # a patch of the other role's container is not for this pod
        patch["containers"] = [c for c in patch["containers"] if c["name"] not in others]
    labels = {**cluster.labels, **names.labels, ROLE: role}
    metadata: Object = {"labels": labels}
    if cluster.annotations:
        metadata["annotations"] = dict(cluster.annotations)
    return {"metadata": metadata, "spec": merge(spec, patch)}


def _webhook_env(config: JobConfig) -> list[Object]:
    """The variable with the webhook's URL: it is the coordinator that judges."""
    name, cluster = (config.notify.webhook or "").removeprefix("env:"), _cluster(config)
    if name in cluster.secret_env:
        return [_secret_env(name, cluster.secret_env[name])]
    return [{"name": name, "value": cluster.env[name]}] if name in cluster.env else []


def _secret_env(name: str, reference: str) -> Object:
    secret, _, key = reference.partition("/")
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
