"""The launcher `kubernetes_fsdp`: submit, describe, logs and cancel, only through the cluster's API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

from torchx.specs import AppState, ReplicaStatus, RoleStatus

from fsdp_jobs.config.clusters import KubernetesClusterConfig
from fsdp_jobs.config.errors import BadInput, JobFailed
from fsdp_jobs.config.resolve import most_nodes, ranks_per_node
from fsdp_jobs.config.schema import JobConfig, load_config, plain_values
from fsdp_jobs.launchers.base import Description, Job, Launcher, at_once, grouped, prepare_each, to_yaml
from fsdp_jobs.launchers.kubernetes import conditions, machines, mirror, validate
from fsdp_jobs.launchers.kubernetes.api import Api, ApiError, explain
from fsdp_jobs.launchers.kubernetes.labels import (
    ALL_APPS,
    APP,
    QUEUE,
    ROLE,
    Names,
    app_of,
    node_of,
    pods_write_here,
    role_of,
)
from fsdp_jobs.launchers.kubernetes.login import NoKubeconfig, connect
from fsdp_jobs.launchers.kubernetes.machines import carried_labels, topology_labels
from fsdp_jobs.launchers.kubernetes.manifests import WORKLOADS, files_objects, owned_by
from fsdp_jobs.launchers.kubernetes.pods import cluster_of, names_of
from fsdp_jobs.launchers.kubernetes.skeletons import Object, merge
from fsdp_jobs.plan.sources import from_kubernetes
from fsdp_jobs.plan.topology import Topology
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.state import State
from fsdp_jobs.run.status import RunStatus
from fsdp_jobs.run.verdict import KILLED, WITHDRAWN, Verdict, judge

_RETRIED_FOR_S = 20.0  # to retry a cluster that does not answer


@dataclass
class KubernetesRequest:
    """The objects to submit, the one that owns the others first."""

    objects: list[Object]
    job: Job
    node_labels: dict[str, dict[str, str]] = field(default_factory=dict)  # of machines; pods may not read them

    def __str__(self) -> str:
        return to_yaml(*self.objects)


@dataclass(frozen=True)
class _App:
    """A submission: its id is `namespace:name`, its objects all carry the name as their instance."""

    app_id: str
    run: RunDir | None  # None when it was submitted elsewhere
    cluster: KubernetesClusterConfig

    @property
    def names(self) -> Names:
        return Names(self.app_id.rpartition(":")[2])

    @contextmanager
    def connected(self) -> Iterator[Api]:
        """Connect to the app's cluster.

        Raises:
            JobFailed: it does not answer for long, or refuses something.
        """
        api = connect(self.cluster, _RETRIED_FOR_S)
        try:
            yield api
        except ApiError as e:
            raise JobFailed(str(explain(api, e, self.app_id))) from e

    def root(self, api: Api, jobs: Sequence[Object]) -> Object | None:
        """Return the object that owns the others; for a job submitted elsewhere, of any kind."""
        own = (job for job in jobs if job["metadata"]["name"] == self.names.app)
        workloads = ("jobset", "volcano") if self.run is None else {self.cluster.workload} - {"job"}
        kinds = (WORKLOADS[workload] for workload in workloads)
        others = (api.read(kind.api_version, kind.kind, self.names.app) for kind in kinds)
        return next((root for root in chain(own, others) if root is not None), None)


class KubernetesLauncher(Launcher):
    """Runs jobs as pods."""

    name = "kubernetes_fsdp"
    output = "yaml"
    forget = staticmethod(machines.forget)
    examine = staticmethod(validate.examine)

    def topology(self, config: JobConfig) -> Topology | None:
        """Read the switches from the machines' labels; None without labels, enough machines, or an API."""
        try:
            labels = topology_labels(connect(cluster_of(config)), config)
        except (ApiError, BadInput):  # `prepare` reports why
            return None
        if len(labels) < most_nodes(config):
            return None
        return from_kubernetes(labels, ranks_per_node(config))

    def offline_notes(self, config: JobConfig) -> list[str]:
        try:
            connect(cluster_of(config)).groups()
            return []
        except NoKubeconfig as e:
            why = e.problems[0].what
        except ApiError as e:
            if e.status:
                return []
            why = f"the cluster's API does not answer: {e}"
        unchecked = "not checked: permissions, operators, claim, queue, quotas, admission"
        return [why, unchecked, "assumed: all machines under one switch"]

    def artefact(self, request: KubernetesRequest, files: Mapping[Path, str | None]) -> str:
        """Return all objects as `submit` leaves them in the cluster, without owners: only the cluster has their ids."""
        job, (root, *owned) = request.job, request.objects
        if request.node_labels:
            files = {**files, job.run.node_labels: json.dumps(request.node_labels)}
        if root["spec"].get("suspend"):
            root = merge(root, {"spec": {"suspend": cluster_of(job.config).queue is not None}})
        return to_yaml(*files_objects(job, files), root, *owned)

    def prepare(self, jobs: Sequence[Job]) -> list[KubernetesRequest]:
        return prepare_each(jobs, lambda job: validate.wrong_keys(job.config), _prepare)

    def submit(self, requests: Sequence[KubernetesRequest], parallelism: int, folder: Path | None) -> list[str]:
        """Create everything of each job, then start it.

        Raises:
            BadInput: the cluster refuses, although it accepted the dry run a moment ago.
        """
        self.check_links(requests[0].job.run)
        return [self._create(request) for request in requests]

    def _create(self, request: KubernetesRequest) -> str:
        """Create a job's objects and return its app id."""
        job, (root, *owned) = request.job, request.objects
        api = connect(cluster_of(job.config))
        app_id = f"{api.namespace}:{names_of(job).app}"
        job.run.node_labels.unlink(missing_ok=True)  # of an earlier submission
        job.run.left.touch()
        if request.node_labels:
            write_atomic(job.run.node_labels, json.dumps(request.node_labels))
        try:
            owner = {**root, "metadata": api.create(root)["metadata"]}
            bodies = (owned_by(owner, body) for body in (*files_objects(job), *owned))
            are_jobs = grouped(bodies, lambda body: body["kind"] == "Job")
            at_once(api.create, are_jobs[False])
            if not _is_queued(owner) and root["spec"].get("suspend"):
                api.patch(root, {"spec": {"suspend": False}})  # before nodes that may take all machines
            at_once(api.create, are_jobs[True])
        except ApiError as e:
            raise BadInput([explain(api, e, app_id)]) from e
        self.remember(app_id, job.run)
        return app_id

    def find_one(self, run: RunDir) -> str | None:
        """Return the app id; delete the objects of an app if not all were created."""
        cluster = cluster_of(load_config(run.config))
        app = _App(f"{connect(cluster).namespace}:{app_of(run.name, run.submission)}", run, cluster)
        with app.connected() as api:
            if (root := app.root(api, api.jobs(app.names.selector))) is None:
                return None
            if root["apiVersion"] == "batch/v1":
                is_whole = api.read("batch/v1", "Job", app.names.nodes) is not None
            else:
                is_whole = all(_is_there(api, kind, app.names.files) for kind in ("ConfigMap", "Secret"))
            if is_whole and (_is_queued(root) or not root["spec"].get("suspend")):
                self.remember(app.app_id, run)
                return app.app_id
            api.delete(root)
            return None

    def _app(self, app_id: str) -> _App:
        run = self.run_of(app_id)
        values = plain_values(run.config)["cluster"] if run is not None and run.config.exists() else {}
        cluster = KubernetesClusterConfig(**(values if values.get("launcher") == self.name else {}))
        cluster.namespace = app_id.rpartition(":")[0]
        return _App(app_id, run, cluster)

    def cluster_of(self, app_id: str) -> str:
        """Name the API's server, e.g. api.example.org:6443; one server may serve clusters by path."""
        server = urlsplit(connect(self._app(app_id).cluster).where)
        return f"{server.netloc}{server.path}"

    def describe(self, app_ids: Sequence[str]) -> list[Description | None]:
        """Describe apps and copy what their pods have published; None for one that no longer exists.

        Takes one list of pods and one of Jobs for each namespace; other objects are read one by one.

        Raises:
            JobFailed: the cluster's API does not answer, or refuses.
        """
        namespaces = grouped(map(self._app, app_ids), lambda app: (app.cluster.context, app.cluster.namespace))
        described: dict[str, Description | None] = {}
        for apps in namespaces.values():
            with apps[0].connected() as api:
                selector = apps[0].names.selector if len(apps) == 1 else ALL_APPS
                found = at_once(lambda ask, what=selector: ask(what), (api.pods, api.jobs))
                # Anyone may call a pod fsdp-jobs: it has no app.
                pods, jobs = (grouped(some, lambda body: body["metadata"]["labels"].get(APP)) for some in found)
                for app in apps:
                    name = app.names.app
                    described[app.app_id] = _describe(app, api, jobs[name], pods[name])
        return [described[app_id] for app_id in app_ids]

    def end(self, app_id: str) -> Verdict | None:
        """Delete the job and all its pods; if it has ended, only what still runs or waits."""
        app = self._app(app_id)
        with app.connected() as api:
            pods, jobs = api.pods(app.names.selector), api.jobs(app.names.selector)
            if (root := app.root(api, jobs)) is None:
                return None
            state = conditions.state_of(root, pods)
            if not state.is_active:
                _end_rest(api, root, jobs)
                return None
            api.delete(root)
            at_once(lambda pod: api.delete(pod, gracePeriodSeconds="0"), pods)
            return WITHDRAWN if state is State.QUEUED else KILLED

    def replace_lost(self, app_id: str) -> str:
        """Delete pods on machines that do not answer; the cluster would wait for ever for their end."""
        app = self._app(app_id)
        with app.connected() as api:
            stuck = [pod for pod in api.pods(app.names.selector) if conditions.is_stuck(api, pod)]
            for pod in stuck:
                api.patch(pod, {"metadata": {"finalizers": None}})  # the Job's, which it removes at the pod's end
                api.delete(pod, gracePeriodSeconds="0")
            machines = sorted({pod["spec"].get("nodeName", "?") for pod in stuck})
            return f"machine {', '.join(machines)} is given up: new pods take over" if stuck else ""

    def logs(self, app_id: str, role: str, node: int, follow: bool) -> Iterator[str]:
        """Yield lines of the newest pod of a node, or of the coordinator, as `kubectl logs` shows them."""
        app = self._app(app_id)
        with app.connected() as api:
            pods = api.pods(f"{app.names.selector},{ROLE}={role}")
            for pod in [pod for pod in pods if node_of(pod) == node][-1:]:
                yield from api.log(pod["metadata"]["name"], role, follow=follow)


create_scheduler = KubernetesLauncher.scheduler


def _prepare(job: Job) -> KubernetesRequest:
    cluster = cluster_of(job.config)
    request = KubernetesRequest(WORKLOADS[cluster.workload].objects(job), job)
    if not job.offline_notes:
        api = connect(cluster)
        validate.validate_with_cluster(api, job, request.objects)
        if job.config.cluster.topology is None:
            request.node_labels = carried_labels(api, job.config)
    return request


def _is_there(api: Api, kind: str, name: str) -> bool:
    """Return whether an object exists that the user may create, but not read: then a dry run does not create it."""
    refusal = api.refusal({"apiVersion": "v1", "kind": kind, "metadata": {"name": name}})
    if refusal is not None and refusal.is_passing:
        raise refusal
    return refusal is not None


def _is_queued(root: Object) -> bool:
    """Return whether Kueue decides when a job starts, in `cluster.queue` or the namespace's default queue."""
    return QUEUE in root["metadata"]["labels"]


def _describe(app: _App, api: Api, jobs: list[Object], pods: list[Object]) -> Description | None:
    """Describe an app, copy what its pods published, and delete remains of an ended one; None if it does not exist."""
    root, run = app.root(api, jobs), app.run
    mirrored = None if run is None or pods_write_here(run, app.names.app) else run
    if root is None:
        _has_left_nothing(run)
        if mirrored is None or Verdict.final(mirrored) is not None:
            return None
        what = "its objects were deleted, after cluster.keep_hours or by hand, before this machine saw its end"
        return Description(State.UNKNOWN, f"{what}: its run directory on the claim has it; resume continues from there")
    state, verdict, unread = conditions.state_of(root, pods), conditions.verdict_of(pods), ""
    if mirrored is not None:
        mirror.pass_on_stop(mirrored, api, pods)
        unread = mirror.pull(mirrored, api, pods)
    if state.is_active:
        why = conditions.why_waiting(api, root, jobs, pods)
        if run is not None and Verdict.final(run) is None:  # else it has ended, and the pods do not show it yet
            why = _note_why(run, api, pods, why)
        why = why or unread
    else:
        why = verdict.reason if verdict is not None else conditions.why_failed(pods) or conditions.why_ended(root, pods)
        if run is not None and state is State.FAILED:  # else the pods have recorded how it ended
            judge(run, verdict or Verdict("infrastructure", "stop", why))
        if not conditions.is_leaving(api, pods):
            _end_rest(api, root, jobs)
            _has_left_nothing(run)
    roles = ("coordinator", "trainer")
    replicas = [RoleStatus(role, [_replica(pod) for pod in pods if role_of(pod) == role]) for role in roles]
    return Description(state, why, replicas)


def _has_left_nothing(run: RunDir | None) -> None:
    if run is not None:
        with suppress(OSError):  # it is another user's
            run.left.unlink()


def _end_rest(api: Api, root: Object, jobs: list[Object]) -> None:
    """Delete the Jobs that an ended job left: a failed owner deletes nothing, and waiting pods request machines."""
    for job in jobs if root["apiVersion"] == "batch/v1" else ():  # operators do it for the other kinds
        if job["metadata"]["uid"] != root["metadata"]["uid"] and conditions.end_of(job) is None:
            api.delete(job)


def _note_why(run: RunDir, api: Api, pods: list[Object], why: str) -> str:
    """Record why a job waits, or that it no longer does, unless that is recorded already; return why."""
    status = RunStatus(run)
    status.glance()
    if not why and status.waits_for_nodes:
        why = conditions.why_cut_off(api, pods)
    if why != status.reason and (why or status.reason == status.waited_for):
        events.record(run, run.last_attempt(), events.Waiting(why))
    return why


def _replica(pod: Object) -> ReplicaStatus:
    state = AppState[conditions.phase_of(pod).upper()]  # TorchX uses the words of Kubernetes
    host = pod["spec"].get("nodeName", "")
    return ReplicaStatus(id=node_of(pod), state=state, role=role_of(pod), hostname=host)
