"""`workload=volcano`: TorchX's own translation to a Volcano job, with the pods of this package. Pure; no client."""

from __future__ import annotations

from torchx.schedulers.kubernetes_scheduler import app_to_resource

from fsdp_jobs.launchers.base import Job
from fsdp_jobs.launchers.kubernetes.labels import NODE, Names
from fsdp_jobs.launchers.kubernetes.manifests import keep_s, metadata
from fsdp_jobs.launchers.kubernetes.pods import cluster_of, coordinator_pod, node_pod
from fsdp_jobs.launchers.kubernetes.skeletons import Object, merge, without_nulls
from fsdp_jobs.run.verdict import EXIT_FAILED

_RESTARTS = 100
_RESTART = {"events": ["PodEvicted", "PodFailed"], "action": "RestartTask"}
_VERDICT = [
    {"event": "TaskCompleted", "action": "CompleteJob"},
    {"exitCode": EXIT_FAILED, "action": "TerminateJob"},
]


def volcano_objects(job: Job, names: Names) -> list[Object]:
    """Translate to one Volcano job: a task per pod, as TorchX makes it, scheduled as a gang of the minimum of nodes."""
    cluster = cluster_of(job.config)
    made = app_to_resource(job.app, cluster.queue or "default", cluster.service_account, cluster.priority_class)
    coordinator = f"{names.app}-coordinator-0-0.{names.app}"  # Volcano's plug-in `svc` makes the Service
    tasks: list[Object] = []
    for task in made["spec"]["tasks"]:
        role, _, replica = task["name"].rpartition("-")
        if role == "coordinator":
            template, policies = coordinator_pod(job, names), [*_VERDICT, _RESTART]
        else:
            labels = {"metadata": {"labels": {NODE: replica}}}
            template, policies = merge(node_pod(job, names, coordinator, replica), labels), [_RESTART]
        tasks.append({**task, "template": template, "maxRetry": _RESTARTS, "policies": policies})
    low = sum(task.get("minAvailable", 1) for task in tasks)
    spec = {"tasks": tasks, "minAvailable": low, "ttlSecondsAfterFinished": keep_s(job)}
    root: Object = {**made, **metadata(job, names, names.app), "spec": {**made["spec"], **spec}}
    return [without_nulls(root)]
