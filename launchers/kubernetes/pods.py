"""The pods of a job: their commands, resources and placement. Pure; no client."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce

from torchx.specs import Role

from fsdp_jobs.config.clusters import KubernetesClusterConfig
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.app import RUN_DIR_KEY, arguments
from fsdp_jobs.launchers.base import Job
from fsdp_jobs.launchers.kubernetes.labels import APP, COORDINATOR_PORT, ROLE, Names, app_of
from fsdp_jobs.launchers.kubernetes.skeletons import Object, fill, merge, without_nulls
from fsdp_jobs.run.goodput import slowest_save_s

_LEAVE_S = 15.0  # after the save, for the verdict and for processes to end
_PROGRAM = "fsdp_jobs.launchers.kubernetes.pod"


def cluster_of(config: JobConfig) -> KubernetesClusterConfig:
    """Narrow the type of `config.cluster`."""
    assert isinstance(config.cluster, KubernetesClusterConfig)
    return config.cluster


def names_of(job: Job) -> Names:
    """Return the names of a job's objects."""
    return Names(app_of(job.run.name, job.submission))


def node_pod(job: Job, coordinator: str, node: str) -> Object:
    """Translate the trainer's role into the template of a node's pod.

    Args:
        job: what is submitted.
        coordinator: host under which pods reach the coordinator.
        node: number of the node, or the placeholder that the kubelet replaces: `$(JOB_COMPLETION_INDEX)`.
    """
    cluster, role = cluster_of(job.config), job.role("trainer")
    siblings = {"matchLabels": {APP: names_of(job).app, ROLE: "trainer"}}
    own = fill(
        "pod_trainer",
        kueue_topology=None if cluster.queue is None or cluster.workload == "volcano" else cluster.leaf_label,
        amounts=_amounts(cluster, role),
        shm=cluster.shm,
        node_selector=cluster.node_selector or None,
        siblings=siblings,
    )
    if cluster.leaf_label is not None:
        own = merge(own, fill("pod_near", siblings=siblings, leaf_label=cluster.leaf_label))
    pod = _pod(job, role, ["node", f"{coordinator}:{COORDINATOR_PORT}"], node, _user_env(cluster), own)
    if excluded := sorted(job.run.excluded_hosts()):
        elsewhere = [{"key": "metadata.name", "operator": "NotIn", "values": [host]} for host in excluded]
        pod = merge(fill("pod_elsewhere"), without_nulls(pod))  # a patch may have removed an affinity
        required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        for term in required["nodeSelectorTerms"]:  # one of them has to hold
            term["matchFields"] = [*term.get("matchFields", []), *elsewhere]
    return pod


def coordinator_pod(job: Job) -> Object:
    """Translate the coordinator's role into the template of its pod."""
    cluster, role = cluster_of(job.config), job.role("coordinator")
    memory = f"{2 * role.resource.memMB}Mi"  # the process, and the one that restarts it
    webhook = (job.config.notify.webhook or "").removeprefix("env:")  # the coordinator sends notifications
    env = {name: value for name, value in _user_env(cluster).items() if name == webhook or name in cluster.env}
    own = fill("pod_coordinator", memory=memory, files=names_of(job).files)
    return _pod(job, role, ["coordinator", str(COORDINATOR_PORT)], "0", env, own)


def _pod(job: Job, role: Role, part: list[str], node: str, env: Mapping[str, Object], own: Object) -> Object:
    """Fill the skeleton `pod` and merge what its role adds to it; `cluster.pod_patch` comes last.

    `part` has pod.py's role and address; the role's own command follows, with the run directory's path in the pod.
    """
    cluster, names = cluster_of(job.config), names_of(job)
    here, there = job.app.metadata[RUN_DIR_KEY], f"{cluster.mount_path.rstrip('/')}/{job.run.name}"
    command = (there if a == here else a for a in arguments(role, node))
    save_s = max(job.config.elastic.stop_grace_s, 2 * slowest_save_s(job.run))
    specific = {
        "role": role.name,
        "labels": {**cluster.labels, **names.labels, ROLE: role.name},
        "grace_s": math.ceil(save_s + _LEAVE_S),  # from SIGTERM to SIGKILL
        "fs_group_policy": None if cluster.fs_group is None else "OnRootMismatch",
        "command": ["python", "-m", _PROGRAM, part[0], names.app, there, part[1], "--", "python", *command],
        "env": [{"name": k, **v} for k, v in {**_values({**role.env, "HOME": "/tmp"}), **env}.items()],
        "pull_secrets": [{"name": name} for name in cluster.image_pull_secrets] or None,
    }
    base = fill("pod", **{**vars(cluster), **specific})
    patch = dict(cluster.pod_patch)
    if "containers" in patch:  # a patch of the other role's container is not for this pod
        others = {"coordinator", "trainer"} - {role.name}
        patch["containers"] = [c for c in patch["containers"] if c["name"] not in others]
    patch["tolerations"] = _tolerations(base, [*cluster.tolerations, *patch.get("tolerations", [])])
    more = {"metadata": {"annotations": cluster.annotations}, "spec": patch}
    template: Object = reduce(merge, [base, own, more])
    return template


def _tolerations(base: Object, more: list[Object]) -> list[Object]:
    """Join the skeleton's tolerations with the user's, which replace those of the same taint."""
    taints = [(toleration.get("key"), toleration.get("effect")) for toleration in more]
    own = [t for t in base["spec"]["tolerations"] if (t["key"], t["effect"]) not in taints]
    return [*own, *more]


def _amounts(cluster: KubernetesClusterConfig, role: Role) -> dict[str, str]:
    """Return what a node requests, which is also its limit."""
    ranks, on_gpu = int(role.resource.cpu), role.resource.gpu > 0
    return {
        "cpu": cluster.cpus or str(8 * ranks if on_gpu else ranks),
        "memory": cluster.memory or f"{(32 if on_gpu else 2) * ranks}Gi",
        **({cluster.gpu_resource: str(ranks)} if on_gpu else {}),
        **cluster.resources,
    }


def _values(env: Mapping[str, str]) -> dict[str, Object]:
    return {name: {"value": value} for name, value in env.items()}


def _user_env(cluster: KubernetesClusterConfig) -> dict[str, Object]:
    env = _values(cluster.env)
    for name, reference in cluster.secret_env.items():
        secret, _, key = reference.partition("/")
        env[name] = {"valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
    return env
