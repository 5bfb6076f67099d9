"""AppDef -> the objects of a job, the one that owns the others first. Pure; no client."""

from __future__ import annotations

from fsdp_jobs.config.resolve import node_range
from fsdp_jobs.launchers.base import Job
from fsdp_jobs.launchers.kubernetes.labels import QUEUE, RUN, Names, job_files
from fsdp_jobs.launchers.kubernetes.pods import cluster_of, coordinator_pod, node_pod
from fsdp_jobs.launchers.kubernetes.skeletons import Object, fill

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
    pods = {"spec": {"template": coordinator_pod(job, names), "ttlSecondsAfterFinished": keep_s(job)}}
    root = fill("job_coordinator", metadata(job, names, names.app), pods, in_service, queue)
    service = fill("service", metadata(job, names, names.app), {"spec": {"selector": names.labels}})
    queued: list[Object] = [queue, {"spec": {"suspend": True}}] if cluster.queue is not None else []
    queued += [elastic] if cluster.queue is not None and low < high else []
    pods = _nodes(job, node_pod(job, names, f"{names.app}-0.{names.app}", _INDEX))
    owned = fill("job_nodes", metadata(job, names, names.nodes), pods, in_service, *queued)
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
    spec = {"replicatedJobs": replicated, "ttlSecondsAfterFinished": keep_s(job)}
    queue = {"metadata": {"labels": {QUEUE: cluster_of(job.config).queue}}}
    return [fill("jobset", metadata(job, names, names.app), {"spec": spec}, queue)]


def files_objects(job: Job, names: Names) -> list[Object]:
    """Translate what submission wrote into the run directory: a ConfigMap, and a Secret with the job's token."""
    named, run = metadata(job, names, names.files), job.run
    files = {f.name: f.read_text() for f in job_files(run) if f.exists()}
    return [
        fill("config_map", named, {"data": files}),
        fill("secret", named, {"stringData": {run.token.name: run.token.read_text()}}),
    ]


def owned_by(root: Object, body: Object) -> Object:
    """`body`, deleted with `root`, which the server has created."""
    owner = {k: root[k] for k in ("apiVersion", "kind")}
    owner |= {"name": root["metadata"]["name"], "uid": root["metadata"]["uid"], "controller": False}
    return {**body, "metadata": {**body["metadata"], "ownerReferences": [owner]}}


def metadata(job: Job, names: Names, name: str) -> Object:
    """The patch with an object's name, labels and annotations."""
    cluster = cluster_of(job.config)
    labels, annotations = {**cluster.labels, **names.labels}, {**cluster.annotations, RUN: job.run.name}
    return {"metadata": {"name": name, "labels": labels, "annotations": annotations}}


def keep_s(job: Job) -> int:
    """Seconds that finished pods and their logs stay."""
    return round(3600 * cluster_of(job.config).keep_hours)


def _nodes(job: Job, template: Object) -> Object:
    """The patch of the nodes' Job. With fewer than the maximum it succeeds when the minimum has."""
    low, high = node_range(job.config.nodes)
    enough = {"rules": [{"succeededCount": low}]} if low < high else None
    return {"spec": {"completions": high, "parallelism": high, "template": template, "successPolicy": enough}}
