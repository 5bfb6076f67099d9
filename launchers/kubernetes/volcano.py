"""`workload=volcano`: TorchX's own translation to a Volcano job, with the pods of our own. Pure; no client."""

from __future__ import annotations

from torchx.schedulers.kubernetes_scheduler import app_to_resource
from torchx.specs import AppDef

from fsdp_jobs.config.clusters import KubernetesClusterConfig
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.kubernetes.labels import NODE, RUN, Names
from fsdp_jobs.launchers.kubernetes.pods import Object, coordinator_pod, node_pod
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.verdict import EXIT_FAILED

_RESTARTS = 100
_VERDICT = [
    {"event": "TaskCompleted", "action": "CompleteJob"},
    {"exitCode": EXIT_FAILED, "action": "TerminateJob"},
]


def volcano_objects(app: AppDef, config: JobConfig, run: RunDir, names: Names) -> list[Object]:
    """One Volcano job: a task a pod, as TorchX makes it, scheduled as a gang of the minimum of nodes."""
    cluster = config.cluster
    assert isinstance(cluster, KubernetesClusterConfig)
    made = app_to_resource(app, cluster.queue or "default", cluster.service_account, cluster.priority_class)
    spec: Object = made["spec"]
    host = f"{names.app}-coordinator-0-0.{names.app}"  # Volcano's plug-in `svc` makes the Service
    for task in spec["tasks"]:
        role, _, replica = task["name"].rpartition("-")
        is_coordinator = role == "coordinator"
        if is_coordinator:
            task["template"] = coordinator_pod(app, config, run, names)
        else:
            task["template"] = node_pod(app, config, run, names, host, replica)
            task["template"]["metadata"]["labels"][NODE] = replica
        task["maxRetry"] = _RESTARTS
        again = [{"events": ["PodEvicted", "PodFailed"], "action": "RestartTask"}]
        task["policies"] = [*_VERDICT, *again] if is_coordinator else again
    low = sum(t.get("minAvailable", 1) for t in spec["tasks"])
    metadata = {
        "name": names.app,
        "labels": {**cluster.labels, **names.labels},
        "annotations": {**cluster.annotations, RUN: run.name},
    }
    spec |= {"minAvailable": low, "ttlSecondsAfterFinished": round(3600 * cluster.keep_hours)}
    return [{**made, "metadata": metadata, "spec": spec}]
