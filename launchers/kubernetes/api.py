"""The cluster's API: connecting, creating and reading plain objects, and what its refusals mean."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import urllib3
import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from fsdp_jobs.config.clusters import KubernetesClusterConfig
from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.launchers.kubernetes.skeletons import Object

REFUSALS = (ApiException, urllib3.exceptions.HTTPError)
_TIMEOUT_S = (5, 30)  # to connect, to answer
_RAW: dict[str, Any] = {"_preload_content": False, "_request_timeout": _TIMEOUT_S}  # objects as the server sends them


class Api:
    """One namespace of one cluster. Every method raises one of REFUSALS; `explain` says what it means."""

    def __init__(self, api_client: client.ApiClient, namespace: str, where: str):
        self.namespace, self.where = namespace, where
        self.core = client.CoreV1Api(api_client)
        self.batch = client.BatchV1Api(api_client)
        self.custom = client.CustomObjectsApi(api_client)
        self.authorization = client.AuthorizationV1Api(api_client)
        self._apis = client.ApisApi(api_client)
        self._paths = {  # kind -> API, and what its methods are called after
            "ConfigMap": (self.core, "config_map"),
            "Secret": (self.core, "secret"),
            "Service": (self.core, "service"),
            "Pod": (self.core, "pod"),
            "PersistentVolumeClaim": (self.core, "persistent_volume_claim"),
            "Job": (self.batch, "job"),
        }

    def create(self, body: Object, dry_run: bool = False) -> Object:
        """Create an object, or have the server check it and everything that admission says of it."""
        options: dict[str, Any] = {"field_validation": "Strict", "_request_timeout": _TIMEOUT_S}
        options |= {"dry_run": "All"} if dry_run else {}
        group, _, version = body["apiVersion"].rpartition("/")
        if group in ("", "batch"):
            api, name = self._paths[body["kind"]]
            create = getattr(api, f"create_namespaced_{name}")
            return _plain(create(self.namespace, body, _preload_content=False, **options))
        created: Object = self.custom.create_namespaced_custom_object(
            group, version, self.namespace, plural(body["kind"]), body, **options
        )
        return created

    def read(self, api_version: str, kind: str, name: str) -> Object | None:
        """An object, or None when there is none of this name (or kind)."""
        group, _, version = api_version.rpartition("/")
        try:
            if group in ("", "batch"):
                api, called = self._paths[kind]
                read = getattr(api, f"read_namespaced_{called}")
                return _plain(read(name, self.namespace, **_RAW))
            found: Object = self.custom.get_namespaced_custom_object(
                group, version, self.namespace, plural(kind), name, _request_timeout=_TIMEOUT_S
            )
            return found
        except ApiException as e:
            if e.status == 404:
                return None
            raise

    def list_custom(self, api_version: str, kind: str) -> list[Object]:
        """Objects of a custom kind; empty when the cluster does not know the kind."""
        group, _, version = api_version.rpartition("/")
        try:
            found: Object = self.custom.list_namespaced_custom_object(
                group, version, self.namespace, plural(kind), _request_timeout=_TIMEOUT_S
            )
        except ApiException as e:
            if e.status == 404:
                return []
            raise
        return list(found["items"])

    def groups(self) -> dict[str, str]:
        """API groups that the cluster knows, with the version it prefers."""
        found = _plain(self._apis.get_api_versions(**_RAW))
        return {g["name"]: g["preferredVersion"]["version"] for g in found["groups"]}

    def resume(self, body: Object) -> None:
        """Let a suspended Job or JobSet start."""
        patch = [{"op": "replace", "path": "/spec/suspend", "value": False}]
        group, _, version = body["apiVersion"].rpartition("/")
        name = body["metadata"]["name"]
        if group == "batch":
            self.batch.patch_namespaced_job(name, self.namespace, patch, **_RAW)
        else:
            self.custom.patch_namespaced_custom_object(
                group, version, self.namespace, plural(body["kind"]), name, patch, _request_timeout=_TIMEOUT_S
            )

    def annotate_pod(self, name: str, key: str, value: str) -> None:
        patch = [{"op": "add", "path": f"/metadata/annotations/{key.replace('/', '~1')}", "value": value}]
        self.core.patch_namespaced_pod(name, self.namespace, patch, **_RAW)

    def delete(self, body: Object) -> None:
        """Delete an object, and whatever it owns; nothing happens when it has gone."""
        group, _, version = body["apiVersion"].rpartition("/")
        name = body["metadata"]["name"]
        options: dict[str, Any] = {"propagation_policy": "Background", **_RAW}
        try:
            if group == "batch":
                self.batch.delete_namespaced_job(name, self.namespace, **options)
            else:
                self.custom.delete_namespaced_custom_object(
                    group, version, self.namespace, plural(body["kind"]), name, **options
                )
        except ApiException as e:
            if e.status != 404:
                raise

    def kill_pod(self, name: str) -> None:
        try:
            self.core.delete_namespaced_pod(name, self.namespace, grace_period_seconds=0, **_RAW)
        except ApiException as e:
            if e.status != 404:
                raise

    def pods(self, selector: str) -> list[Object]:
        """Oldest first."""
        found = self.core.list_namespaced_pod(self.namespace, label_selector=selector, **_RAW)
        return sorted(_plain(found)["items"], key=lambda p: p["metadata"]["creationTimestamp"])

    def jobs(self, selector: str) -> list[Object]:
        found = self.batch.list_namespaced_job(self.namespace, label_selector=selector, **_RAW)
        return list(_plain(found)["items"])

    def warnings(self, kind: str, name: str) -> list[str]:
        """Messages of the warning events about an object, oldest first."""
        found = self.core.list_namespaced_event(
            self.namespace,
            field_selector=f"involvedObject.kind={kind},involvedObject.name={name},type=Warning",
            **_RAW,
        )
        events = _plain(found)["items"]
        events.sort(key=lambda e: e.get("lastTimestamp") or e.get("eventTime") or e["metadata"]["creationTimestamp"])
        return [f"{e['reason']}: {e.get('message', '')}" for e in events]

    def log(self, pod: str, container: str, **options: Any) -> Iterator[str]:
        """Lines of a container's log. Options are the client's: follow, timestamps, since_seconds."""
        wait = (_TIMEOUT_S[0], None) if options.get("follow") else _TIMEOUT_S
        answer = self.core.read_namespaced_pod_log(
            pod, self.namespace, container=container, _preload_content=False, _request_timeout=wait, **options
        )
        rest = b""
        for chunk in answer.stream(65536, decode_content=True):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield line.decode(errors="replace")
        if rest:
            yield rest.decode(errors="replace")

    def may(self, verb: str, group: str, resource: str) -> bool:
        """Whether the cluster lets us do something in this namespace. `resource` may be `pods/log`."""
        name, _, sub = resource.partition("/")
        attributes = {"namespace": self.namespace, "verb": verb, "group": group, "resource": name, "subresource": sub}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        answer = self.authorization.create_self_subject_access_review(review, **_RAW)
        return bool(_plain(answer)["status"]["allowed"])


def connect(cluster: KubernetesClusterConfig) -> Api:
    """The namespace that the configuration and the kubeconfig (or, inside a pod, its service account) name.

    Raises:
        BadInput: there is no usable kubeconfig, or no such context.
    """
    configuration = client.Configuration()
    try:
        if "KUBECONFIG" not in os.environ and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=configuration)
            namespace = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace").read_text().strip()
        else:
            contexts, active = config.list_kube_config_contexts(os.environ.get("KUBECONFIG"))
            chosen = next((c for c in contexts if c["name"] == cluster.context), None) if cluster.context else active
            if chosen is None:
                names = ", ".join(c["name"] for c in contexts)
                raise BadInput([Problem(f"cluster.context={cluster.context}", f"the kubeconfig has only {names}")])
            config.load_kube_config(os.environ.get("KUBECONFIG"), chosen["name"], configuration)
            namespace = chosen["context"].get("namespace", "default")
    except (config.ConfigException, yaml.YAMLError) as e:
        what = f"no usable kubeconfig: {e}"
        instead = "set KUBECONFIG to the file that your cluster's administrator gave; kubectl get pods must work first"
        raise BadInput([Problem("cluster=kubernetes", what, instead)]) from e
    configuration.retries = False
    return Api(client.ApiClient(configuration), cluster.namespace or namespace, configuration.host)


def explain(api: Api, refusal: Exception, doing: str) -> Problem:
    """What a refusal means for the user."""
    where = f"namespace {api.namespace}"
    if not isinstance(refusal, ApiException):
        reason = getattr(refusal, "reason", None) or refusal
        return Problem(api.where, f"the cluster's API does not answer: {reason}", "kubectl get pods must work first")
    if refusal.status == 401:
        return Problem(api.where, "the cluster does not know you: the token is wrong or has expired", "log in again")
    try:
        content = json.loads(refusal.body)
        message = str(content.get("message", refusal.reason))
    except (TypeError, ValueError):
        message = f"{refusal.status} {refusal.reason}"
    if refusal.status == 403 and "exceeded quota" in message:
        return Problem(where, message.partition("is forbidden: ")[2], "fewer nodes, cluster.cpus, cluster.memory")
    if refusal.status == 403 and "violates PodSecurity" in message:
        return Problem(where, message.partition("is forbidden: ")[2], "cluster.pod_patch adds or takes what it names")
    if refusal.status == 403:
        return Problem(where, message, "ask for the role in deploy/kubernetes/base/rbac.yaml")
    if refusal.status == 404 and "namespaces" in message:
        return Problem(f"cluster.namespace={api.namespace}", "there is no such namespace", "kubectl get namespaces")
    if refusal.status in (400, 422):
        return Problem(doing, message, "cluster.pod_patch, labels, annotations, tolerations go to the cluster as given")
    return Problem(doing, message)


def plural(kind: str) -> str:
    return {
        "Job": "jobs",
        "LocalQueue": "localqueues",
        "Workload": "workloads",
        "JobSet": "jobsets",
        "Queue": "queues",
    }[kind]


def _plain(response: Any) -> Object:
    content: Object = json.loads(response.data)
    return content


def missing_permissions(api: Api, needed: Sequence[tuple[str, str, str]]) -> list[Problem]:
    """Those of (verb, group, resource) that the cluster does not let us do."""
    lacking = [
        f"{verb} {resource}{'.' + group if group else ''}"
        for verb, group, resource in needed
        if not api.may(verb, group, resource)
    ]
    instead = "ask for the role in deploy/kubernetes/base/rbac.yaml"
    return [Problem(f"namespace {api.namespace}", f"you may not {what}", instead) for what in lacking]
