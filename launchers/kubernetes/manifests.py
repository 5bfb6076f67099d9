"""Translate an AppDef into Kubernetes objects, the one that owns the others first. Pure; no client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdp_jobs.config.resolve import node_range
from fsdp_jobs.launchers.base import Job
from fsdp_jobs.launchers.kubernetes.labels import NODE, QUEUE, RUN, Names, job_files
from fsdp_jobs.launchers.kubernetes.pods import cluster_of, coordinator_pod, names_of, node_pod
from fsdp_jobs.launchers.kubernetes.skeletons import Object, fill, merge

_INDEX = "$(JOB_COMPLETION_INDEX)"  # the kubelet replaces it by the pod's number


def job_objects(job: Job) -> list[Object]:
    """Translate for `workload=job`: two Jobs and a headless Service."""
    low, high = node_range(job.config.nodes)
    queue, names = cluster_of(job.config).queue, names_of(job)
    coordinator, node = coordinator_pod(job), node_pod(job, f"{names.app}-0.{names.app}", _INDEX)
    for template in (coordinator, node):
        template["spec"]["subdomain"] = names.app
    metadata = _metadata(job, names.app, queue)
    root = fill("job_coordinator", metadata=metadata, template=coordinator, suspend=True, keep_s=_keep_s(job))
    service = fill("service", metadata=_metadata(job, names.app), labels=names.labels)
    nodes = _nodes(job, node, metadata=_metadata(job, names.nodes, queue), suspend=queue is not None or None)
    if queue is not None and low < high:
        nodes = merge(nodes, fill("job_elastic", low=str(low)))
    return [root, service, nodes]


def jobset_objects(job: Job) -> list[Object]:
    """Translate for `workload=jobset`: one JobSet, which is suspended as a whole and brings its own Service."""
    cluster, names = cluster_of(job.config), names_of(job)
    return [
        fill(
            "jobset",
            metadata=_metadata(job, names.app, cluster.queue),
            inner={"labels": {**cluster.labels, **names.labels}, "annotations": cluster.annotations or None},
            keep_s=_keep_s(job),
            coordinator=fill("job_coordinator", template=coordinator_pod(job))["spec"],
            nodes=_nodes(job, node_pod(job, _in_gang(names), _INDEX))["spec"],
        )
    ]


def volcano_objects(job: Job) -> list[Object]:
    """Translate for `workload=volcano`: one Volcano job, a gang of the coordinator and the minimum of nodes."""
    low, high = node_range(job.config.nodes)
    cluster, names = cluster_of(job.config), names_of(job)
    tasks = [fill("volcano_coordinator", template=coordinator_pod(job))]
    for node in range(high):
        template = node_pod(job, _in_gang(names), str(node))
        template["metadata"]["labels"][NODE] = str(node)
        tasks.append(fill("volcano_trainer", task=f"trainer-{node}", needed=int(node < low), template=template))
    return [
        fill(
            "volcano",
            metadata=_metadata(job, names.app),
            queue=cluster.queue or "default",
            priority_class=cluster.priority_class,
            gang=1 + low,
            keep_s=_keep_s(job),
            tasks=tasks,
        )
    ]


@dataclass(frozen=True)
class Workload:
    """A value of `cluster.workload`: the object that owns a job's others, and the translation."""

    api_version: str
    kind: str
    objects: Callable[[Job], list[Object]]

    @property
    def group(self) -> str:
        return self.api_version.partition("/")[0]


WORKLOADS = {
    "job": Workload("batch/v1", "Job", job_objects),
    "jobset": Workload("jobset.x-k8s.io/v1alpha2", "JobSet", jobset_objects),
    "volcano": Workload("batch.volcano.sh/v1alpha1", "Job", volcano_objects),
}


def files_objects(job: Job, files: Mapping[Path, str | None] | None = None) -> list[Object]:
    """Translate files (path -> text; default: the run directory's) into a ConfigMap, and a Secret with the token."""
    metadata, run = _metadata(job, names_of(job).files), job.run
    files = files or {f: f.read_text() for f in (*job_files(run), run.token) if f.exists()}
    shown = {f.name: files[f] for f in job_files(run) if files.get(f)}
    secret = {run.token.name: files[run.token]}
    return [fill("config_map", metadata=metadata, files=shown), fill("secret", metadata=metadata, files=secret)]


def owned_by(root: Object, body: Object) -> Object:
    """Return `body` owned by `root`, which the server has created: it is deleted with `root`."""
    owner = {k: root[k] for k in ("apiVersion", "kind")} | {k: root["metadata"][k] for k in ("name", "uid")}
    owned: Object = merge(body, {"metadata": {"ownerReferences": [owner]}})
    return owned


def _metadata(job: Job, name: str, queue: str | None = None) -> Object:
    """Return an object's metadata; `queue` is the Kueue queue that admits it."""
    cluster = cluster_of(job.config)
    return {
        "name": name,
        "namespace": cluster.namespace,
        "labels": {**cluster.labels, **names_of(job).labels, QUEUE: queue},
        "annotations": {**cluster.annotations, RUN: job.run.name},
    }


def _in_gang(names: Names) -> str:
    """Return the coordinator's host in the Service that JobSet and Volcano make."""
    return f"{names.app}-coordinator-0-0.{names.app}"


def _keep_s(job: Job) -> int:
    """Return how long finished pods and their logs stay, in seconds."""
    return round(3600 * cluster_of(job.config).keep_hours)


def _nodes(job: Job, template: Object, **values: object) -> Object:
    """Return the nodes' Job; an elastic one succeeds once its minimum of nodes has."""
    low, high = node_range(job.config.nodes)
    enough = {"rules": [{"succeededCount": low}]} if low < high else None
    return fill("job_nodes", nodes=high, template=template, success_policy=enough, **values)
