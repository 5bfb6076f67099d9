"""AppDef -> the objects of a job, the one that owns the others first. Pure; no client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchx.schedulers.kubernetes_scheduler import app_to_resource

from fsdp_jobs.config.resolve import node_range
from fsdp_jobs.launchers.base import Job
from fsdp_jobs.launchers.kubernetes.labels import NODE, QUEUE, RUN, Names, job_files
from fsdp_jobs.launchers.kubernetes.pods import cluster_of, coordinator_pod, node_pod
from fsdp_jobs.launchers.kubernetes.skeletons import Object, fill, merge, skeleton, without_nulls

_INDEX = "$(JOB_COMPLETION_INDEX)"  # the kubelet puts the pod's number here
_MIN_PARALLELISM = "kueue.x-k8s.io/job-min-parallelism"
_COMPLETIONS_FOLLOW = "kueue.x-k8s.io/job-completions-equal-parallelism"


def job_objects(job: Job, names: Names) -> list[Object]:
    """Translate for `workload=job`: two Jobs and a headless Service."""
    cluster = cluster_of(job.config)
    low, high = node_range(job.config.nodes)
    queue = {"metadata": {"labels": {QUEUE: cluster.queue}}}
    elastic = {"metadata": {"annotations": {_MIN_PARALLELISM: str(low), _COMPLETIONS_FOLLOW: "true"}}}
    in_service = {"spec": {"template": {"spec": {"subdomain": names.app}}}}
    pods = {"spec": {"template": coordinator_pod(job, names), "ttlSecondsAfterFinished": _keep_s(job)}}
    root = fill("job_coordinator", _metadata(job, names, names.app), pods, in_service, queue)
    service = fill("service", _metadata(job, names, names.app), {"spec": {"selector": names.labels}})
    queued: list[Object] = [queue, {"spec": {"suspend": True}}] if cluster.queue is not None else []
    queued += [elastic] if cluster.queue is not None and low < high else []
    pods = _nodes(job, node_pod(job, names, f"{names.app}-0.{names.app}", _INDEX))
    owned = fill("job_nodes", _metadata(job, names, names.nodes), pods, in_service, *queued)
    return [root, service, owned]


def jobset_objects(job: Job, names: Names) -> list[Object]:
    """Translate for `workload=jobset`: one JobSet, which brings its own Service."""
    nodes = node_pod(job, names, f"{names.app}-coordinator-0-0.{names.app}", _INDEX)
    coordinator = {"spec": {"template": coordinator_pod(job, names), "suspend": None}}  # the JobSet is suspended
    jobs = {"coordinator": fill("job_coordinator", coordinator), "node": fill("job_nodes", _nodes(job, nodes))}
    replicated = [
        {"name": name, "template": {"metadata": {"labels": names.labels}, "spec": body["spec"]}}
        for name, body in jobs.items()
    ]
    spec = {"replicatedJobs": replicated, "ttlSecondsAfterFinished": _keep_s(job)}
    queue = {"metadata": {"labels": {QUEUE: cluster_of(job.config).queue}}}
    return [fill("jobset", _metadata(job, names, names.app), {"spec": spec}, queue)]


def volcano_objects(job: Job, names: Names) -> list[Object]:
    """Translate for `workload=volcano`: TorchX's job with these pods, a gang of the minimum of nodes."""
    cluster = cluster_of(job.config)
    made = app_to_resource(job.app, cluster.queue or "default", cluster.service_account, cluster.priority_class)
    coordinator = f"{names.app}-coordinator-0-0.{names.app}"  # Volcano's plug-in `svc` makes the Service
    tasks: list[Object] = []
    for task in made["spec"]["tasks"]:
        role, _, replica = task["name"].rpartition("-")
        if role == "coordinator":
            template = coordinator_pod(job, names)
        else:
            number = {"metadata": {"labels": {NODE: replica}}}
            template = merge(node_pod(job, names, coordinator, replica), number)
        tasks.append({**task, "template": template, **skeleton("volcano_tasks")[role]})
    low = sum(task.get("minAvailable", 1) for task in tasks)
    spec = {"tasks": tasks, "minAvailable": low, "ttlSecondsAfterFinished": _keep_s(job)}
    root: Object = {**made, **_metadata(job, names, names.app), "spec": {**made["spec"], **spec}}
    return [without_nulls(root)]


@dataclass(frozen=True)
class Workload:
    """A value of `cluster.workload`: the object that owns a job's others, and the translation."""

    api_version: str
    kind: str
    objects: Callable[[Job, Names], list[Object]]

    @property
    def group(self) -> str:
        return self.api_version.partition("/")[0]

    @property
    def resource(self) -> str:
        return f"{self.kind.lower()}s"


WORKLOADS = {
    "job": Workload("batch/v1", "Job", job_objects),
    "jobset": Workload("jobset.x-k8s.io/v1alpha2", "JobSet", jobset_objects),
    "volcano": Workload("batch.volcano.sh/v1alpha1", "Job", volcano_objects),
}


def files_objects(job: Job, names: Names) -> list[Object]:
    """Translate files of the run directory: a ConfigMap, and a Secret with the job's token."""
    named, run = _metadata(job, names, names.files), job.run
    files = {f.name: f.read_text() for f in job_files(run) if f.exists()}
    return [
        fill("config_map", named, {"data": files}),
        fill("secret", named, {"stringData": {run.token.name: run.token.read_text()}}),
    ]


def owned_by(root: Object, body: Object) -> Object:
    """Return `body` with `root` as its owner, which the server has created: it is deleted with it."""
    owner = {k: root[k] for k in ("apiVersion", "kind")}
    owner |= {"name": root["metadata"]["name"], "uid": root["metadata"]["uid"], "controller": False}
    return {**body, "metadata": {**body["metadata"], "ownerReferences": [owner]}}


def _metadata(job: Job, names: Names, name: str) -> Object:
    """Return the patch with an object's name, labels and annotations."""
    cluster = cluster_of(job.config)
    labels, annotations = {**cluster.labels, **names.labels}, {**cluster.annotations, RUN: job.run.name}
    return {"metadata": {"name": name, "labels": labels, "annotations": annotations}}


def _keep_s(job: Job) -> int:
    """Return how long finished pods and their logs stay, in seconds."""
    return round(3600 * cluster_of(job.config).keep_hours)


def _nodes(job: Job, template: Object) -> Object:
    """Return the patch of the nodes' Job; an elastic one succeeds when its minimum of nodes has."""
    low, high = node_range(job.config.nodes)
    enough = {"rules": [{"succeededCount": low}]} if low < high else None
    return {"spec": {"completions": high, "parallelism": high, "template": template, "successPolicy": enough}}
