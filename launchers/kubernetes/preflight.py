"""What can be known to be wrong before anything is created: the configuration, and what the cluster says of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kubernetes.client.exceptions import ApiException

from fsdp_jobs.config.clusters import KubernetesClusterConfig
from fsdp_jobs.config.errors import BadInput, Problem, nearest
from fsdp_jobs.config.resolve import node_range
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.kubernetes.api import REFUSALS, Api, explain, missing_permissions
from fsdp_jobs.launchers.kubernetes.skeletons import Object

WORKLOADS = {  # cluster.workload -> the group, kind and plural of the object that owns the job
    "job": ("batch", "Job", "jobs"),
    "jobset": ("jobset.x-k8s.io", "JobSet", "jobsets"),
    "volcano": ("batch.volcano.sh", "Job", "jobs"),
}
_KUEUE = "kueue.x-k8s.io"
_INSTEAD = "cluster.workload=job needs nothing installed"
_NEEDED = [
    ("create", "", "services"),
    ("create", "", "configmaps"),
    ("create", "", "secrets"),
    ("get", "", "persistentvolumeclaims"),
    ("list", "", "pods"),
    ("patch", "", "pods"),
    ("delete", "", "pods"),
    ("get", "", "pods/log"),
    ("list", "", "events"),
    ("list", "batch", "jobs"),
]


def check_configuration(config: JobConfig) -> None:
    """Raises: BadInput for what needs no cluster to be seen."""
    cluster = config.cluster
    assert isinstance(cluster, KubernetesClusterConfig)
    problems = []
    if cluster.workload not in WORKLOADS:
        what = f"allowed: {', '.join(WORKLOADS)}"
        problems.append(Problem(f"cluster.workload={cluster.workload}", what, nearest(cluster.workload, WORKLOADS)))
    if not cluster.image:
        what = "a job on Kubernetes needs an image with fsdp_jobs in it"
        problems.append(Problem("cluster.image", what, "build deploy/Dockerfile, push it, and name it here"))
    if not cluster.claim:
        what = (
            "a job on Kubernetes needs a PersistentVolumeClaim for its run directory, ReadWriteMany for several nodes"
        )
        problems.append(
            Problem("cluster.claim", what, "deploy/kubernetes/base/claim.yaml makes one: cluster.claim=runs")
        )
    if not cluster.mount_path.startswith("/"):
        problems.append(Problem(f"cluster.mount_path={cluster.mount_path}", "must be absolute", "/runs"))
    for variable, reference in cluster.secret_env.items():
        if reference.count("/") != 1:
            what = "names no key of a secret"
            problems.append(Problem(f"cluster.secret_env.{variable}={reference}", what, "my-secret/its-key"))
    if config.sweep.parallelism and cluster.queue is None:
        what = "on Kubernetes a queue's quota limits how many jobs run at once"
        cure = "cluster.queue=NAME, a queue of Kueue"
        problems.append(Problem(f"sweep.parallelism={config.sweep.parallelism}", what, cure))
    if problems:
        raise BadInput(problems)


def check_with_cluster(api: Api, config: JobConfig, objects: Sequence[Object]) -> None:
    """Ask the cluster whether it would take the job; it creates nothing.

    Raises:
        BadInput: with all that it says.
    """
    assert isinstance(config.cluster, KubernetesClusterConfig)
    try:
        lacking = missing_permissions(api, needed_permissions(config.cluster.workload))
        groups = api.groups()
        problems = lacking or [*_not_installed(config, groups)]
        problems = problems or [*_not_there(api, config, groups), *_refused(api, objects)]
    except REFUSALS as e:
        problems = [explain(api, e, "cluster=kubernetes")]
    if problems:
        raise BadInput(list(dict.fromkeys(problems)))


def needed_permissions(workload: str) -> list[tuple[str, str, str]]:
    """(verb, API group, resource) of everything that submitting, following and cancelling takes."""
    group, _, resource = WORKLOADS[workload]
    return list(dict.fromkeys([*_NEEDED, *((verb, group, resource) for verb in ("create", "get", "patch", "delete"))]))


def _not_installed(config: JobConfig, groups: dict[str, str]) -> Iterator[Problem]:
    cluster = config.cluster
    assert isinstance(cluster, KubernetesClusterConfig)
    group, kind, _ = WORKLOADS[cluster.workload]
    if group not in groups:
        yield Problem(f"cluster.workload={cluster.workload}", f"the cluster has no {kind}.{group}", _INSTEAD)
    if cluster.queue is not None and cluster.workload != "volcano" and _KUEUE not in groups:
        what = "Kueue is not installed in this cluster"
        yield Problem(f"cluster.queue={cluster.queue}", what, "leave cluster.queue out")


def _not_there(api: Api, config: JobConfig, groups: dict[str, str]) -> Iterator[Problem]:
    cluster = config.cluster
    assert isinstance(cluster, KubernetesClusterConfig) and cluster.claim is not None
    claim = api.read("v1", "PersistentVolumeClaim", cluster.claim)
    modes = claim["spec"]["accessModes"] if claim is not None else []
    if claim is None:
        what = f"there is no such claim in namespace {api.namespace}"
        yield Problem(f"cluster.claim={cluster.claim}", what, "deploy/kubernetes/base/claim.yaml makes one")
    elif node_range(config.nodes)[1] > 1 and not {"ReadWriteMany", "ReadWriteOnce"} & set(modes):
        what = f"can be mounted {' or '.join(modes)} only: several pods have to write to it"
        yield Problem(f"cluster.claim={cluster.claim}", what, "a claim with ReadWriteMany")
    if cluster.queue is not None and cluster.workload != "volcano":
        queues = [q["metadata"]["name"] for q in api.list_custom(f"{_KUEUE}/{groups[_KUEUE]}", "LocalQueue")]
        if cluster.queue not in queues:
            what = f"namespace {api.namespace} has the queues {', '.join(queues) or '(none)'}"
            yield Problem(f"cluster.queue={cluster.queue}", what, nearest(cluster.queue, queues))


def _refused(api: Api, objects: Sequence[Object]) -> Iterator[Problem]:
    """What the server says when it is asked to create each object, and a pod of each kind, without doing so."""
    for body in [*objects, *(p for o in objects for p in _pods_of(o))]:
        try:
            api.create(body, dry_run=True)
        except ApiException as e:
            if body["kind"] == "Pod" and "cannot create resource" in str(e.body):
                continue  # this user creates Jobs only: what admission says of pods will come as events
            yield explain(api, e, f"{body['kind']} {body['metadata']['name']}")


def _pods_of(body: Object) -> Iterator[Object]:
    """The pods that an object would lead to: service account, priority class, quota, security are checked on pods."""
    spec = body.get("spec", {})
    templates = [spec["template"]] if "template" in spec else []
    templates += [r["template"]["spec"]["template"] for r in spec.get("replicatedJobs", [])]
    for number, template in enumerate(templates):
        name = f"{body['metadata']['name']}-check-{number}"
        yield {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**template["metadata"], "name": name},
            "spec": template["spec"],
        }
