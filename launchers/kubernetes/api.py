"""The cluster's API: create, read and delete plain objects, and explain errors."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from fsdp_jobs.config.errors import Problem, one_line
from fsdp_jobs.launchers.kubernetes.skeletons import Object, fill

if TYPE_CHECKING:
    from fsdp_jobs.launchers.kubernetes.login import Login

_OF_NO_NAMESPACE = ("Node", "SelfSubjectAccessReview")  # kinds
_CONNECT_S, _ANSWER_S = 5.0, 30.0
_RETRY_S = 2.0  # a busy server asks for a second
_THROTTLED_FOR_S = 20.0  # to retry a request that the server turned away
ROLE_CURE = "ask for the role in deploy/kubernetes/base/rbac.yaml"
_LIMIT_CURE = "a LimitRange: cluster.cpus, cluster.memory; for the coordinator's pod cluster.pod_patch"
_FORBIDDEN = {  # words of a message -> the cure; anything else is for an administrator to explain
    "exceeded quota": "ask for fewer nodes, or less cluster.cpus or cluster.memory",
    "must specify": "cluster.pod_patch sets it for both containers, coordinator and trainer",
    "usage per ": _LIMIT_CURE,
    "ratio per ": _LIMIT_CURE,
    "violates PodSecurity": "cluster.pod_patch can set or remove the fields that it names",
    "security context constraint": "cluster.run_as_user=null cluster.fs_group=null leave users to OpenShift",
    '" cannot ': ROLE_CURE,  # of RBAC: User "me" cannot create resource "jobs" ...
}


class ApiError(Exception):
    """The cluster's API refused a request with an HTTP status, or did not answer: status 0."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status

    @property
    def is_passing(self) -> bool:
        """Whether the same request may succeed later: no answer, an error of the server's own, or too many requests."""
        return self.status == 429 or not 400 <= self.status < 500


@contextmanager
def _connection_errors() -> Iterator[None]:
    """Raise ApiError in place of urllib3's exceptions."""
    import urllib3

    try:
        yield
    except urllib3.exceptions.HTTPError as e:
        raise ApiError(0, _words(e)) from e


def _words(error: BaseException) -> str:
    """Return the message of a connection's error, without the exceptions and connections that wrap it."""
    inner = getattr(error, "reason", None) or next((a for a in error.args if isinstance(a, Exception)), None)
    return _words(inner) if isinstance(inner, Exception) else re.sub(r"^<.*?>: |^\w+\(.*?\): ", "", str(error)).strip()


class Api:
    """One namespace of one cluster, in plain objects.

    Every method raises ApiError, which `explain` translates for the user.

    The client library is used only for login and connections. Its methods differ by kind, it patches custom kinds with
    another content type than built-in ones, and raises TypeError for a certificate that cannot be verified.
    """

    def __init__(self, login: Login, namespace: str, retried_for_s: float):
        """`retried_for_s`: how long to retry a request that fails, 0 to create objects; logs are not read again."""
        self._login, self.namespace, self._retried_for_s = login, namespace, retried_for_s
        self.where = str(login.client.configuration.host)
        self._ahead_s = 0.0  # of the server's clock over this machine's

    def time(self) -> float:
        """Return seconds since 1970 by the server's clock, as of its last answer."""
        return time.time() + self._ahead_s

    def seconds_since(self, moment: str) -> float:
        """Return how long ago a time in an object was."""
        return self.time() - datetime.fromisoformat(moment).timestamp()

    def create(self, body: Object, **query: str) -> Object:
        """Create an object."""
        return self._json("POST", self._path(body["apiVersion"], body["kind"]), body, fieldValidation="Strict", **query)

    def refusal(self, body: Object) -> ApiError | None:
        """Return why the server would not create an object, admission included; None if it would."""
        try:
            taken = self.create(body, dryRun="All")
        except ApiError as e:
            return e
        lacks = "successPolicy" in body.get("spec", {}) and "successPolicy" not in taken["spec"]  # Kubernetes 1.30
        return ApiError(422, "the cluster drops its successPolicy, which nodes=MIN:MAX needs") if lacks else None

    def read(self, api_version: str, kind: str, name: str) -> Object | None:
        """Return an object; None when there is none of this name, or the cluster does not know the kind."""
        return self._json_or_none("GET", self._path(api_version, kind, name))

    def select(self, api_version: str, kind: str, **query: str) -> list[Object]:
        """Return objects by the API's own selectors; none if the cluster does not know the kind."""
        answer = self._json_or_none("GET", self._path(api_version, kind), **query)
        items = answer["items"] if answer is not None else []
        return [{"apiVersion": api_version, "kind": kind, **item} for item in items]  # lists leave both out

    def select_visible(self, api_version: str, kind: str, **query: str) -> list[Object] | None:
        """Return what `select` does; None if the user may not list these objects."""
        try:
            return self.select(api_version, kind, **query)
        except ApiError as e:
            if e.status != 403:
                raise
            return None

    def groups(self) -> dict[str, str]:
        """Return the API groups that the cluster knows, with the version it prefers."""
        return {g["name"]: g["preferredVersion"]["version"] for g in self._json("GET", "/apis")["groups"]}

    def patch(self, body: Object, change: Object) -> None:
        """Merge a change into an object that exists."""
        self._json("PATCH", self._path_of(body), change)

    def delete(self, body: Object, **query: str) -> None:
        """Delete an object and what it owns; does nothing when it no longer exists."""
        self._json_or_none("DELETE", self._path_of(body), propagationPolicy="Background", **query)

    def pods(self, selector: str) -> list[Object]:
        """Return pods by labels, oldest first."""
        pods = self.select("v1", "Pod", labelSelector=selector)
        return sorted(pods, key=lambda pod: pod["metadata"]["creationTimestamp"])

    def jobs(self, selector: str) -> list[Object]:
        """Return Jobs by labels."""
        return self.select("batch/v1", "Job", labelSelector=selector)

    def events(self, kind: str, which: str = "type=Warning") -> dict[str, list[str]]:
        """Return messages of selected events about objects of a kind, by the object's name, oldest first.

        Empty if the user may not list events.
        """
        events = self.select_visible("v1", "Event", fieldSelector=f"involvedObject.kind={kind},{which}") or []
        events.sort(key=lambda e: e.get("lastTimestamp") or e.get("eventTime") or e["metadata"]["creationTimestamp"])
        messages = defaultdict(list)
        for e in events:
            messages[e["involvedObject"]["name"]].append(f"{e['reason']}: {e.get('message', '')}")
        return messages

    def log(self, pod: str, container: str, since_s: int | None = None, follow: bool = False) -> Iterator[str]:
        """Yield lines of a container's log with their newlines: all, or those of the last `since_s` seconds.

        The last line has no newline if it is unfinished, or if the answer was cut off.
        """
        query = {"container": container, "follow": str(follow).lower()}
        if since_s is not None:
            query["sinceSeconds"] = str(since_s)
        answer = self._send("GET", f"{self._path('v1', 'Pod', pod)}/log", query, answer_s=None if follow else _ANSWER_S)
        with _connection_errors():
            for line in answer:
                yield line.decode(errors="replace")

    def may(self, verb: str, group: str, resource: str) -> bool:
        """Return whether the user has a permission in this namespace. `resource` may be `pods/log`."""
        name, _, sub = resource.partition("/")
        review = fill("review", namespace=self.namespace, verb=verb, group=group, resource=name, subresource=sub)
        return bool(self.create(review)["status"]["allowed"])

    def _path(self, api_version: str, kind: str, name: str = "") -> str:
        root = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
        plural = f"{kind.lower().removesuffix('y')}{'ies' if kind.endswith('y') else 's'}"
        place = "" if kind in _OF_NO_NAMESPACE else f"/namespaces/{self.namespace}"
        return f"{root}{place}/{plural}" + (f"/{name}" if name else "")

    def _path_of(self, body: Object) -> str:
        return self._path(body["apiVersion"], body["kind"], body["metadata"]["name"])

    def _json(self, method: str, path: str, body: Object | None = None, **query: str) -> Object:
        began = time.monotonic()
        while True:
            try:
                return _content_of(self._send(method, path, query, body))
            except ApiError as e:
                for_s = _THROTTLED_FOR_S if e.status == 429 else self._retried_for_s  # 429: nothing was done
                if not e.is_passing or time.monotonic() - began >= for_s:
                    raise
            time.sleep(_RETRY_S)

    def _json_or_none(self, method: str, path: str, **query: str) -> Object | None:
        try:
            return self._json(method, path, None, **query)
        except ApiError as e:
            if e.status == 404:
                return None
            raise

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Object | None = None,
        answer_s: float | None = _ANSWER_S,
    ) -> Any:
        import urllib3

        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        url, text = f"{self.where}{path}?{urlencode(query)}", None if body is None else json.dumps(body)
        how = {"timeout": urllib3.Timeout(connect=_CONNECT_S, read=answer_s), "preload_content": False}

        def request(client: Any) -> Any:
            headers = {**client.default_headers, "Accept": "application/json", "Content-Type": kind}
            client.update_params_for_auth(headers, [], ["BearerToken"])
            pools = client.rest_client.pool_manager
            return pools.request(method, url, headers=headers, body=text, redirect=False, **how)

        with _connection_errors():
            answer = self._login.request(request)
            if "Date" in answer.headers:
                self._ahead_s = parsedate_to_datetime(answer.headers["Date"]).timestamp() - time.time()
            if answer.status < 300:
                return answer
            refusal = answer.data
        try:
            message = str(json.loads(refusal)["message"])
        except (LookupError, TypeError, ValueError):  # the answer is not the API's
            message = f"{answer.status} {answer.reason}"
        is_conflict_of_counts = "be fulfilled on resourcequotas" in message
        raise ApiError(429 if is_conflict_of_counts else answer.status, message)


def _content_of(answer: Any) -> Object:
    """Read an answer to its end.

    Raises:
        ApiError: it was cut off, or does not come from Kubernetes: a proxy, a login page.
    """
    with _connection_errors():
        text = answer.data.decode(errors="replace")
    with suppress(ValueError):
        content = json.loads(text)
        if isinstance(content, dict) and "kind" in content:
            return content
    raise ApiError(0, f"what answers is not Kubernetes: {one_line(text[:80])}")


def explain(api: Api, error: ApiError, doing: str) -> Problem:
    """Translate an error for the user; `doing` names the object or the job that it is about."""
    status, message, namespace = error.status, str(error), f"cluster.namespace={api.namespace}"
    forbidden = message.partition("is forbidden: ")[2] or message
    patched = "Kubernetes (1.31 or newer) gets cluster.pod_patch, labels, annotations and tolerations as given"
    is_unknown = status == 401 or "system:anonymous" in message  # the latter if a login plugin has failed
    known = [  # whether it applies, and the problem
        (status == 0, api.where, f"the cluster's API does not answer: {message}", "kubectl get pods must work first"),
        (is_unknown, api.where, "not authenticated: the token is wrong or has expired", "log in again"),
        *((status == 403 and words in message, namespace, forbidden, cure) for words, cure in _FORBIDDEN.items()),
        (status == 404 and "namespaces" in message, namespace, "there is no such namespace", "kubectl get namespaces"),
        (status in (400, 422), doing, message, patched),
    ]
    return next((Problem(*problem) for applies, *problem in known if applies), Problem(doing, message))
