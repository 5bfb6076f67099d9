"""Validate before anything is created: the configuration by itself, then with the cluster."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any

from fsdp_jobs.config.errors import BadInput, Problem, nearest
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.base import Finding, Job, at_once, findings
from fsdp_jobs.launchers.kubernetes.api import ROLE_CURE, Api, ApiError, explain
from fsdp_jobs.launchers.kubernetes.labels import QUEUE
from fsdp_jobs.launchers.kubernetes.login import connect
from fsdp_jobs.launchers.kubernetes.machines import forget, topology_labels
from fsdp_jobs.launchers.kubernetes.manifests import WORKLOADS
from fsdp_jobs.launchers.kubernetes.pods import cluster_of, coordinator_pod, names_of, node_pod
from fsdp_jobs.launchers.kubernetes.skeletons import Object
from fsdp_jobs.plan.memory import GIB
from fsdp_jobs.run.table import size

logger = logging.getLogger(__name__)

_KUEUE = "kueue.x-k8s.io"
_OVER_QUOTA = re.compile(r"exceeded quota: .*?, requested: (?P<requested>.*), used: .*, limited: (?P<limited>\S*)")
_OWN_POLICY = "fsdp-jobs"  # deploy/kubernetes/network-policy.yaml
_QUANTITY = re.compile(r"\d+(\.\d+)?([numkMGTPE]|[KMGTPE]i|[eE]\d+)?")
_FEW_BYTES = re.compile(r"[1-9]\d{0,5}m?")
_NEEDED = {  # verb -> resources, of the core API
    "create": ("services", "configmaps", "secrets"),
    "get": ("persistentvolumeclaims", "pods/log"),
    "list": ("pods",),
    "patch": ("pods",),
    "delete": ("pods",),
}


def validate_with_cluster(api: Api, job: Job, objects: Sequence[Object]) -> None:
    """Ask the cluster, in parallel, all that decides whether it accepts the job; nothing is created.

    Raises:
        BadInput: with all problems: missing permissions first, then operators, then everything else.
    """
    config = job.config
    asked = (api.groups, lambda: [*_not_permitted(api, config)], lambda: _not_admitted(api, job, objects))
    try:
        groups, missing, refused = at_once(lambda ask: ask(), asked)
        problems = missing or [*_not_installed(config, groups)]
        problems = problems or [*_no_room(job), *_claim_and_queue(api, config, groups), *refused]
    except ApiError as e:
        problems = [explain(api, e, "cluster=kubernetes")]
    if problems:
        raise BadInput(problems)


def _no_room(job: Job) -> Iterator[Problem]:
    """Yield a problem if snapshots have no room in the pods' /dev/shm."""
    from kubernetes.utils.quantity import parse_quantity

    need, shm = job.plan.snapshot_bytes, cluster_of(job.config).shm
    if job.config.checkpoint.memory.dir == "/dev/shm" and need > parse_quantity(shm):
        what = f"snapshots (checkpoint.memory) take {size(need)} of it per node"
        yield Problem(f"cluster.shm={shm}", what, f"cluster.shm={-(-need // GIB)}Gi, and as much more memory")


def examine(config: JobConfig) -> Iterator[Finding]:
    """Yield findings on the configuration, API, permissions, operators, claim, queue and switches."""
    keys = list(wrong_keys(config))
    yield from findings("configuration", keys)
    try:
        api = connect(cluster_of(config))
        groups = api.groups()
        yield Finding("API", "ok", f"{api.where}, namespace {api.namespace}")
        missing, operators = list(_not_permitted(api, config)), list(_not_installed(config, groups))
        yield from findings("permissions", missing)
        yield from findings("operators", operators)
        if not (keys or missing or operators):
            yield from findings("claim, queue", list(_claim_and_queue(api, config, groups)))
        yield from _policies(api)
        forget()
        labels = topology_labels(api, config)
    except (BadInput, ApiError) as e:
        yield from findings("API", e.problems if isinstance(e, BadInput) else [explain(api, e, "cluster=kubernetes")])
        return
    fact = f"labels of {len(labels)} machines name them" if labels else "no labels that you may read name them"
    cure = "deploy/kubernetes/nodes.yaml lets you list nodes; cluster.topology=FILE names the switches"
    yield Finding("switches", "ok" if labels else "warning", fact, cure)


def _policies(api: Api) -> Iterator[Finding]:
    """Yield a warning if policies of the namespace may keep a job's pods from each other."""
    policies = api.select_visible("networking.k8s.io/v1", "NetworkPolicy")
    names = [policy["metadata"]["name"] for policy in policies or ()]
    fact = f"NetworkPolicy {', '.join(names)}: pods of a job must reach each other on all ports"
    if names and _OWN_POLICY not in names:
        yield Finding("network", "warning", fact, "deploy/kubernetes/network-policy.yaml lets them")


def needed_permissions(workload: str) -> list[tuple[str, str, str]]:
    """Return (verb, API group, resource) of everything that submitting, following and cancelling needs."""
    root = WORKLOADS[workload]
    core = [(verb, "", resource) for verb, resources in _NEEDED.items() for resource in resources]
    own = [(verb, root.group, f"{root.kind.lower()}s") for verb in ("create", "get", "patch", "delete")]
    return [*core, ("list", "batch", "jobs"), *own]


def _not_permitted(api: Api, config: JobConfig) -> Iterator[Problem]:
    needed = needed_permissions(cluster_of(config).workload)
    for (verb, group, resource), may in zip(needed, at_once(lambda asked: api.may(*asked), needed), strict=True):
        if not may:
            what = f"you may not {verb} {resource}{'.' + group if group else ''}"
            yield Problem(f"namespace {api.namespace}", what, ROLE_CURE)


def wrong_keys(config: JobConfig) -> Iterator[Problem]:
    """Yield the problems of the group `cluster`, without asking the cluster."""
    cluster = cluster_of(config)
    if not cluster.image:
        what = "a job on Kubernetes needs an image with fsdp_jobs in it"
        yield Problem("cluster.image", what, "build deploy/Dockerfile, push it, and name it here")
    if not cluster.claim:
        what = "a job on Kubernetes needs a PersistentVolumeClaim for its run directory (several nodes: ReadWriteMany)"
        yield Problem("cluster.claim", what, "deploy/kubernetes/base/claim.yaml makes one: cluster.claim=runs")
    if not cluster.mount_path.startswith("/"):
        yield Problem(f"cluster.mount_path={cluster.mount_path}", "must be absolute", "/runs")
    for key in ("cpus", "memory", "shm"):
        if not _QUANTITY.fullmatch(value := getattr(cluster, key) or "0"):
            yield Problem(f"cluster.{key}={value}", "is not a quantity of Kubernetes", "500m, 16Gi")
        elif key != "cpus" and _FEW_BYTES.fullmatch(value):
            yield Problem(f"cluster.{key}={value}", "is less than 1 MB: without a unit it is in bytes", "16Gi, 512Mi")
    for variable, reference in cluster.secret_env.items():
        if reference.count("/") != 1:
            what = "not the key of a secret (secret/key)"
            yield Problem(f"cluster.secret_env.{variable}={reference}", what, "my-secret/its-key")
    if QUEUE in cluster.labels:
        what = "only pods would get this label, and Kueue would not admit the job as a whole"
        yield Problem(f"cluster.labels.{QUEUE}={cluster.labels[QUEUE]}", what, f"cluster.queue={cluster.labels[QUEUE]}")
    yield from _odd_items("cluster.tolerations", cluster.tolerations, "{key: nvidia.com/gpu, operator: Exists}")
    patch = cluster.pod_patch
    yield from _odd_items("cluster.pod_patch.tolerations", patch.get("tolerations", []), "{key: k, operator: Exists}")
    yield from _odd_items("cluster.pod_patch.containers", patch.get("containers", []), "{name: trainer, ...}", "name")
    if config.sweep.parallelism and cluster.queue is None:
        what = "on Kubernetes a queue's quota limits how many jobs run at once"
        yield Problem(f"sweep.parallelism={config.sweep.parallelism}", what, "cluster.queue=NAME, a queue of Kueue")


def _odd_items(where: str, items: object, example: str, *needed: str) -> Iterator[Problem]:
    """Yield a problem if the value of a key is no list of mappings that have the needed keys."""
    if not (isinstance(items, list) and all(isinstance(i, dict) and i.keys() >= {*needed} for i in items)):
        yield Problem(f"{where}={items}", "is not a list of such mappings", f"[{example}]")


def _not_installed(config: JobConfig, groups: dict[str, str]) -> Iterator[Problem]:
    cluster = cluster_of(config)
    root = WORKLOADS[cluster.workload]
    if root.group not in groups:
        what = f"the cluster has no {root.kind}.{root.group}"
        yield Problem(f"cluster.workload={cluster.workload}", what, "cluster.workload=job needs nothing installed")
    if cluster.queue is not None and cluster.workload != "volcano" and _KUEUE not in groups:
        what = "Kueue is not installed in this cluster"
        yield Problem(f"cluster.queue={cluster.queue}", what, "leave cluster.queue out")


def _claim_and_queue(api: Api, config: JobConfig, groups: dict[str, str]) -> Iterator[Problem]:
    cluster = cluster_of(config)
    claim = api.read("v1", "PersistentVolumeClaim", str(cluster.claim))
    if claim is None:
        what = f"there is no such claim in namespace {api.namespace}"
        yield Problem(f"cluster.claim={cluster.claim}", what, "deploy/kubernetes/base/claim.yaml makes one")
    elif not {"ReadWriteMany", "ReadWriteOnce"} & set(modes := claim["spec"]["accessModes"]):
        what = f"can be mounted {' or '.join(modes)} only; several pods write to it"
        yield Problem(f"cluster.claim={cluster.claim}", what, "a claim with ReadWriteMany")
    if cluster.queue is not None and cluster.workload != "volcano":
        visible = api.select_visible(f"{_KUEUE}/{groups[_KUEUE]}", "LocalQueue")
        queues = [q["metadata"]["name"] for q in visible or ()]
        if visible is not None and cluster.queue not in queues:
            what = f"namespace {api.namespace} has the queues {', '.join(queues) or '(none)'}"
            yield Problem(f"cluster.queue={cluster.queue}", what, nearest(cluster.queue, queues))


def _not_admitted(api: Api, job: Job, objects: Sequence[Object]) -> list[Problem]:
    """Return the server's refusals in a dry run of each object, and of a pod of each kind; equal messages once."""
    bodies, problems = [*objects, *_pods(job)], dict[str, Problem]()
    for body, refusal in zip(bodies, at_once(api.refusal, bodies), strict=True):
        if refusal is not None and _is_final(body, str(refusal)):
            name = body["metadata"]["name"]
            problem = explain(api, refusal, f"{body['kind']} {name}")
            problems.setdefault(problem.what.replace(name, ""), problem)
    return [*problems.values()]


def _is_final(body: Object, message: str) -> bool:
    """Return whether the cluster would also refuse at submission what it refused in a dry run.

    It would not if a webhook refuses only dry runs, only this user may not create pods, or a quota is used up now: the
    Job's controller creates pods, and tries again; `status` shows its events.
    """
    if "does not support dry run" in message:
        return False
    return body["kind"] != "Pod" or not ("cannot create resource" in message or _waits_for_quota(message))


def _waits_for_quota(message: str) -> bool:
    """Return whether a quota has no room for a pod only because others use it now; a warning then says so."""
    refusal = _OVER_QUOTA.search(message)
    if refusal is None:
        return False
    requested, limited = map(_quantities, refusal.group("requested", "limited"))
    if any(amount > limited[key] for key, amount in requested.items()):
        return False
    logger.warning("pods wait until others of the namespace have ended: %s", refusal[0])
    return True


def _quantities(text: str) -> dict[str, Any]:
    """Parse `requests.cpu=4,pods=1`."""
    from kubernetes.utils.quantity import parse_quantity

    pairs = (pair.partition("=") for pair in text.split(","))
    return {key: parse_quantity(amount) for key, _, amount in pairs}


def _pods(job: Job) -> Iterator[Object]:
    """Yield a pod of each kind: admission checks accounts, quota and security on pods."""
    app = names_of(job).app
    for number, template in enumerate((coordinator_pod(job), node_pod(job, app, "0"))):
        metadata = {**template["metadata"], "name": f"{app}-check-{number}"}
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
