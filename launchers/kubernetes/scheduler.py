"""The TorchX scheduler `kubernetes_fsdp`: submit, describe, logs, cancel, through the cluster's API alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from torchx.specs import AppState, ReplicaStatus, RoleStatus

from fsdp_jobs.config.clusters import KubernetesClusterConfig
from fsdp_jobs.config.errors import BadInput, JobFailed, Problem
from fsdp_jobs.config.schema import plain_values
from fsdp_jobs.launchers.base import (
    Description,
    Job,
    Launcher,
    TorchxScheduler,
    known_runs,
    prepare_each,
    remember,
    run_of,
)
from fsdp_jobs.launchers.kubernetes import pods as templates
from fsdp_jobs.launchers.kubernetes.labels import ALL_APPS, APP, ROLE, Names, first_attempt, new_app, node_of
from fsdp_jobs.launchers.kubernetes.manifests import files_objects, job_objects, jobset_objects, owned_by
from fsdp_jobs.launchers.kubernetes.skeletons import Object
from fsdp_jobs.launchers.kubernetes.volcano import volcano_objects
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.verdict import Verdict

if TYPE_CHECKING:
    from fsdp_jobs.launchers.kubernetes.api import Api

_ROOTS = {"job": ("batch/v1", "Job"), "jobset": ("jobset.x-k8s.io/v1alpha2", "JobSet")}
_ROOTS["volcano"] = ("batch.volcano.sh/v1alpha1", "Job")
TRANSLATIONS = {"job": job_objects, "jobset": jobset_objects, "volcano": volcano_objects}
_PATIENCE_S, _RETRY_S = 20.0, 2.0  # with a cluster that does not answer
_Answer = TypeVar("_Answer")
_CANCELS_AT_ONCE = 16
_POD_STATES = {"Pending": AppState.PENDING, "Running": AppState.RUNNING, "Succeeded": AppState.SUCCEEDED}


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, _data: object) -> bool:
        return True


@dataclass
class KubernetesRequest:
    """What is submitted: the objects, the one that owns the others first."""

    namespace: str
    names: Names
    objects: list[Object]
    job: templates.Job

    def __str__(self) -> str:
        return yaml.dump_all(self.objects, Dumper=_Plain, sort_keys=False, width=120)


class KubernetesLauncher(Launcher):
    """Runs a job as pods. An app's id is `namespace:name`; its objects all carry the name as their instance."""

    name = "kubernetes_fsdp"

    def prepare(self, jobs: Sequence[Job]) -> list[KubernetesRequest]:
        return prepare_each(_request, jobs)

    def submit(self, requests: Sequence[KubernetesRequest], parallelism: int, folder: Path | None) -> list[str]:
        """Create everything, then let the jobs start. What was created is deleted again when a part is refused.

        Raises:
            BadInput: the cluster refused, although it had agreed a moment ago.
        """
        app_ids: list[str] = []
        try:
            for request in requests:
                app_ids.append(_create(request))
        except BaseException:
            self.cancel(app_ids)
            raise
        return app_ids

    def describe(self, app_ids: Sequence[str]) -> list[Description | None]:
        """Describe apps and fetch what their pods have written; None for one that the cluster has forgotten.

        One app takes one list of its own objects; several take one list of pods and one of Jobs for each namespace,
        and JobSets are read one by one.

        Raises:
            JobFailed: the cluster's API does not answer, or refuses.
        """
        if len(app_ids) == 1:
            return [_ask(app_ids[0], partial(_describe_one, app_ids[0]))]
        runs = {app_id: run_of(self.name, app_id) for app_id in app_ids}
        places: dict[tuple[str, str | None], list[str]] = {}
        for app_id, run in runs.items():
            places.setdefault((app_id.rpartition(":")[0], _cluster_of(run).context), []).append(app_id)
        found: dict[str, Description | None] = {}
        for mine in places.values():
            theirs = {app_id: runs[app_id] for app_id in mine}
            found |= _ask(mine[0], partial(_describe_all, theirs))
        return [found[app_id] for app_id in app_ids]

    def cancel(self, app_ids: Sequence[str]) -> None:
        """End jobs at once, without checkpoints. One that has ended keeps its pods and their logs."""
        with ThreadPoolExecutor(_CANCELS_AT_ONCE) as threads:
            list(threads.map(lambda app_id: _ask(app_id, _kill), app_ids))

    def logs(self, app_id: str, role: str, node: int, follow: bool) -> Iterator[str]:
        """Yield lines of the newest pod of a node, or of the coordinator, as `kubectl logs` shows them."""
        api, names = _open(app_id, run_of(self.name, app_id))
        return _pod_lines(api, names, role, node, follow)


def create_scheduler(session_name: str, **_kwargs: object) -> TorchxScheduler:
    return TorchxScheduler(KubernetesLauncher(), session_name)


def _request(job: Job) -> KubernetesRequest:
    config, run = job.config, job.run
    api_module = _client()
    from fsdp_jobs.launchers.kubernetes.preflight import check_configuration, check_with_cluster

    check_configuration(config)
    assert isinstance(config.cluster, KubernetesClusterConfig)
    api: Api = api_module.connect(config.cluster)
    names = Names(new_app(run.name))
    translated = templates.Job(config, run, job.app)
    objects = TRANSLATIONS[config.cluster.workload](translated, names)
    check_with_cluster(api, config, objects)
    return KubernetesRequest(api.namespace, names, objects, translated)


def _create(request: KubernetesRequest) -> str:
    """Create a job's objects and return its app id."""
    api_module = _client()
    assert isinstance(request.job.config.cluster, KubernetesClusterConfig)
    api: Api = api_module.connect(request.job.config.cluster)
    run = request.job.run
    root, *rest = request.objects
    app_id = f"{request.namespace}:{request.names.app}"
    remember("kubernetes", app_id, run)
    doing = root["metadata"]["name"]
    created = None
    try:
        created = api.create(root)
        owner = {**root, "metadata": created["metadata"]}
        for one in files_objects(request.job, request.names):
            doing = f"{one['kind']} {one['metadata']['name']}"
            api.create(owned_by(owner, one))
        if request.job.config.cluster.queue is None and root["spec"].get("suspend"):
            api.resume(root)  # now: the coordinator finds a place before the nodes take them all
        for one in rest:
            doing = f"{one['kind']} {one['metadata']['name']}"
            api.create(owned_by(owner, one))
    except api_module.REFUSALS as e:
        (known_runs("kubernetes") / app_id).unlink()
        if created is not None:
            api.delete(root)
        raise BadInput([api_module.explain(api, e, doing)]) from e
    return app_id


def _describe_one(app_id: str, api: Api, names: Names, run: RunDir | None) -> Description | None:
    root = _root_of(api, names, run)
    parts = (api.jobs(names.selector), api.pods(names.selector)) if root is not None else ([], [])
    return _describe(api, app_id, run, root, *parts)


def _describe(
    api: Api, app_id: str, run: RunDir | None, root: Object | None, jobs: list[Object], pods: list[Object]
) -> Description | None:
    """What an app's objects say of it; None when it has none."""
    from fsdp_jobs.launchers.kubernetes import observe
    from fsdp_jobs.launchers.kubernetes.mirror import Mirror, hand_on_stop

    if root is None:
        return None
    state, verdict = observe.state_of(root, pods), observe.verdict_of(pods)
    why = "" if not state.is_active else observe.why_waiting(api, root, jobs, pods)
    if run is not None:
        if why and why != _last_reason(run):
            events.record(run, run.last_attempt(), events.Waiting(why))
        if first_attempt(run, app_id.rpartition(":")[2]) is None:  # the pods write elsewhere
            Mirror(run).pull(api, pods)
            hand_on_stop(run, api, pods)
    return Description(
        app_id=app_id,
        state=state,
        message=verdict["reason"] if verdict is not None and not state.is_active else why,
        restarts=verdict["attempt"] if verdict is not None else 0,
        roles=[
            RoleStatus("coordinator", [_replica(p) for p in pods if p["metadata"]["labels"][ROLE] == "coordinator"]),
            RoleStatus("trainer", [_replica(p) for p in pods if p["metadata"]["labels"][ROLE] == "trainer"]),
        ],
    )


def _describe_all(runs: dict[str, RunDir | None], api: Api, *_: object) -> dict[str, Description | None]:
    """`_describe` for apps of one namespace."""
    pods, jobs = _by_app(api.pods(ALL_APPS)), _by_app(api.jobs(ALL_APPS))
    found = {}
    for app_id, run in runs.items():
        app = app_id.rpartition(":")[2]
        mine = jobs.get(app, [])
        known = next((job for job in mine if job["metadata"]["name"] == app), None)
        root = known or (_root_of(api, Names(app), run) if _cluster_of(run).workload != "job" else None)
        found[app_id] = _describe(api, app_id, run, root, mine, pods.get(app, []))
    return found


def _by_app(objects: list[Object]) -> dict[str, list[Object]]:
    found: dict[str, list[Object]] = {}
    for one in objects:
        found.setdefault(one["metadata"]["labels"][APP], []).append(one)
    return found


def _client() -> Any:
    """The module that talks to the cluster, and takes a second to import.

    Raises:
        BadInput: the client library is not installed.
    """
    try:
        from fsdp_jobs.launchers.kubernetes import api
    except ModuleNotFoundError as e:
        if e.name != "kubernetes":
            raise
        what = "the package `kubernetes` is not installed"
        raise BadInput([Problem("cluster=kubernetes", what, "pip install 'fsdp_jobs[kubernetes]'")]) from e
    return api


def _cluster_of(run: RunDir | None) -> KubernetesClusterConfig:
    known = plain_values(run.config)["cluster"] if run is not None and run.config.exists() else {}
    return KubernetesClusterConfig(**known) if known.get("launcher") == "kubernetes_fsdp" else KubernetesClusterConfig()


def _kill(api: Api, names: Names, run: RunDir | None) -> None:
    from fsdp_jobs.launchers.kubernetes.observe import state_of

    root = _root_of(api, names, run)
    pods = api.pods(names.selector)
    if root is None or not state_of(root, pods).is_active:
        return
    api.delete(root)
    for pod in pods:
        api.kill_pod(pod["metadata"]["name"])
    if run is not None and run.last_attempt() >= 0 and Verdict.read(run, run.last_attempt()) is None:
        Verdict("preempted", "stop", "killed on request, without a checkpoint").close(run, run.last_attempt())


def _ask(app_id: str, question: Callable[[Api, Names, RunDir | None], _Answer]) -> _Answer:
    """Ask a job's cluster something, again and again while it does not answer or has an error of its own.

    Raises:
        JobFailed: it does not answer for long, or refuses.
    """
    run = run_of("kubernetes", app_id)
    api, names = _open(app_id, run)
    given_up = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return question(api, names, run)
        except _client().REFUSALS as e:
            refused = 400 <= (getattr(e, "status", None) or 500) < 500
            if refused or time.monotonic() > given_up:
                raise JobFailed(str(_client().explain(api, e, app_id))) from e
        time.sleep(_RETRY_S)


def _open(app_id: str, run: RunDir | None) -> tuple[Api, Names]:
    namespace, _, app = app_id.rpartition(":")
    cluster = _cluster_of(run)
    cluster.namespace = namespace
    api: Api = _client().connect(cluster)
    return api, Names(app)


def _root_of(api: Api, names: Names, run: RunDir | None) -> Object | None:
    """The object that owns the job; of a job submitted elsewhere, whichever kind there is."""
    kinds = [_ROOTS[_cluster_of(run).workload]] if run is not None else list(_ROOTS.values())
    return next((root for kind in kinds if (root := api.read(*kind, names.app)) is not None), None)


def _last_reason(run: RunDir) -> str:
    return next((e.why for e in events.newest_events(run) if isinstance(e, events.Waiting)), "")


def _replica(pod: Object) -> ReplicaStatus:
    state = _POD_STATES.get(pod["status"].get("phase", "Pending"), AppState.FAILED)
    return ReplicaStatus(
        id=node_of(pod), state=state, role=pod["metadata"]["labels"][ROLE], hostname=pod["spec"].get("nodeName", "")
    )


def _pod_lines(api: Api, names: Names, role: str, index: int, follow: bool) -> Iterator[str]:
    for pod in reversed(api.pods(f"{names.selector},{ROLE}={role}")):
        if node_of(pod) == index:
            for line in api.log(pod["metadata"]["name"], role, follow=follow):
                yield line + "\n"
            return
