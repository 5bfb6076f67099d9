"""AppDef -> the objects of a job: a Job or JobSet, its Service, and what carries its files. Pure; no client."""

from __future__ import annotations

from typing import Any

from torchx.specs import AppDef

from fsdp_jobs.config.clusters import KubernetesClusterConfig
from fsdp_jobs.config.resolve import node_range
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.kubernetes.labels import COORDINATOR_PORT, QUEUE, RUN, Names, job_files
from fsdp_jobs.launchers.kubernetes.pods import Object, coordinator_pod, merge, node_pod
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.verdict import EXIT_FAILED, EXIT_REQUEUE

_COORDINATOR_CRASHES = 20
_NODE_CRASHES = 100  # of one node's pods; the coordinator gives up on a job that gets nowhere long before
_JOBSET_RESTARTS = 3
_INDEX = "$(JOB_COMPLETION_INDEX)"  # the kubelet puts the pod's number here

_TOPOLOGY = "kueue.x-k8s.io/podset-preferred-topology"
_MIN_PARALLELISM = "kueue.x-k8s.io/job-min-parallelism"
_COMPLETIONS_FOLLOW = "kueue.x-k8s.io/job-completions-equal-parallelism"


def job_objects(app: AppDef, config: JobConfig, run: RunDir, names: Names) -> list[Object]:
    """What `workload=job` creates, the object that owns the others first: two Jobs and a headless Service."""
    cluster = _cluster(config)
    coordinator = coordinator_pod(app, config, run, names)
    nodes = node_pod(app, config, run, names, f"{names.app}-0.{names.app}", _INDEX)
    for template in (coordinator, nodes):
        template["spec"]["subdomain"] = names.app
    root: Object = {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(config, run, names, names.app)}
    root["spec"] = {**coordinator_job(coordinator), "suspend": True, "ttlSecondsAfterFinished": _ttl(cluster)}
    owned: Object = {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(config, run, names, names.nodes)}
    owned["spec"] = nodes_job(config, nodes)
    if cluster.queue is not None:
        low, high = node_range(config.nodes)
        for job in (root, owned):
            job["metadata"]["labels"][QUEUE] = cluster.queue
        owned["spec"]["suspend"] = True
        if low < high:
            owned["metadata"]["annotations"].update({_MIN_PARALLELISM: str(low), _COMPLETIONS_FOLLOW: "true"})
        _prefer_topology(cluster, nodes)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(config, run, names, names.app),
        "spec": {
            "clusterIP": "None",
            "selector": names.labels,
            "publishNotReadyAddresses": True,  # pods look for each other before they are ready
            "ports": [{"name": "coordinator", "port": COORDINATOR_PORT}],
        },
    }
    return [root, service, owned]


def jobset_objects(app: AppDef, config: JobConfig, run: RunDir, names: Names) -> list[Object]:
    """What `workload=jobset` creates: one JobSet, which brings its own Service."""
    cluster = _cluster(config)
    nodes = node_pod(app, config, run, names, f"{names.app}-coordinator-0-0.{names.app}", _INDEX)
    root = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
    metadata = _metadata(config, run, names, names.app)
    if cluster.queue is not None:
        metadata["labels"][QUEUE] = cluster.queue
        _prefer_topology(cluster, nodes)

    def replicated(name: str, job: Object) -> Object:
        return {"name": name, "replicas": 1, "template": {"metadata": {"labels": names.labels}, "spec": job}}

    spec = {
        "suspend": True,
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": _JOBSET_RESTARTS,
            "restartStrategy": "BlockingRecreate",
            "rules": [
                {
                    "name": "verdict",
                    "action": "FailJobSet",
                    "targetReplicatedJobs": ["coordinator"],
                    "onJobFailureReasons": ["PodFailurePolicy"],
                }
            ],
        },
        "ttlSecondsAfterFinished": _ttl(cluster),
        "replicatedJobs": [
            replicated("coordinator", coordinator_job(coordinator_pod(app, config, run, names))),
            replicated("node", nodes_job(config, nodes)),
        ],
    }
    return [{**root, "metadata": metadata, "spec": spec}]


def coordinator_job(template: Object) -> Object:
    """One pod, until the verdict. Its end is the job's: a verdict to stop fails it, a disruption costs nothing."""
    return {
        "completions": 1,
        "parallelism": 1,
        "completionMode": "Indexed",
        "backoffLimit": _COORDINATOR_CRASHES,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": _exits("coordinator", EXIT_FAILED)},
                {"action": "Ignore", "onExitCodes": _exits("coordinator", EXIT_REQUEUE)},
            ]
        },
        "template": template,
    }


def nodes_job(config: JobConfig, template: Object) -> Object:
    """The nodes: a pod each, replaced as soon as its machine is lost, until the verdict lets them go.

    No podFailurePolicy: with one, a pod is replaced only when it is known to have ended, and on a machine that
    has gone silent that is never. Who failed and whether to go on is the coordinator's verdict; a node that the
    verdict lets go exits with 0, whatever the verdict was.
    """
    low, high = node_range(config.nodes)
    spec: Object = {
        "completions": high,
        "parallelism": high,
        "completionMode": "Indexed",
        "backoffLimitPerIndex": _NODE_CRASHES,
        "podReplacementPolicy": "TerminatingOrFailed",
        "template": template,
    }
    if low < high:  # nodes that never found a place are not waited for
        spec["successPolicy"] = {"rules": [{"succeededCount": low}]}
    return spec


def files_objects(config: JobConfig, run: RunDir, names: Names) -> list[Object]:
    """A ConfigMap with what submission wrote into the run directory, and a Secret with the job's token."""
    metadata = _metadata(config, run, names, names.files)
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            "data": {f.name: f.read_text() for f in job_files(run) if f.exists()},
        },
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": metadata,
            "type": "Opaque",
            "stringData": {run.token.name: run.token.read_text()},
        },
    ]


def owned_by(root: Object, one: Object) -> Object:
    """`one`, deleted with `root`, which the server has created."""
    owner = {k: root[k] for k in ("apiVersion", "kind")}
    owner |= {"name": root["metadata"]["name"], "uid": root["metadata"]["uid"], "controller": False}
    return {**one, "metadata": {**one["metadata"], "ownerReferences": [owner]}}


def _cluster(config: JobConfig) -> KubernetesClusterConfig:
    assert isinstance(config.cluster, KubernetesClusterConfig)
    return config.cluster


def _metadata(config: JobConfig, run: RunDir, names: Names, name: str) -> dict[str, Any]:
    cluster = _cluster(config)
    return {
        "name": name,
        "labels": {**cluster.labels, **names.labels},
        "annotations": {**cluster.annotations, RUN: run.name},
    }


def _ttl(cluster: KubernetesClusterConfig) -> int:
    return round(3600 * cluster.keep_hours)


def _exits(container: str, code: int) -> Object:
    return {"containerName": container, "operator": "In", "values": [code]}


def _prefer_topology(cluster: KubernetesClusterConfig, template: Object) -> None:
    if cluster.leaf_label is not None:
        annotations = {"annotations": {_TOPOLOGY: cluster.leaf_label}}
        template["metadata"] = merge(template["metadata"], annotations)
