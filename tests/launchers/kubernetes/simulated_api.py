"""A simulated Kubernetes API server, in this process, for the real client library: stores, checks, filters, deletes.

It knows the kinds that the launcher uses and takes manifests that the official schemas take. Admission is what a
test puts into `refuse`. What becomes of Jobs and pods is in simulated_cluster.py.

What a docstring or a comment says to be "seen" was seen on Kubernetes 1.36.2, with version 36 of the client library.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jsonschema
import kubernetes_validate
import yaml

Object = dict[str, Any]

VERSION = "1.36"
TOKEN = "a-token"
NAMESPACE = "team"
KINDS = {
    "nodes": "Node",
    "pods": "Pod",
    "services": "Service",
    "configmaps": "ConfigMap",
    "secrets": "Secret",
    "events": "Event",
    "persistentvolumeclaims": "PersistentVolumeClaim",
    "jobs": "Job",
    "networkpolicies": "NetworkPolicy",
    "jobsets": "JobSet",
    "localqueues": "LocalQueue",
    "workloads": "Workload",
}
SCHEMAS = Path(__file__).parent / "schemas"
ROLE = Path(__file__).parents[3] / "deploy" / "kubernetes" / "base" / "rbac.yaml"
_VERBS = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}
_PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>[^/]+)/namespaces/(?P<ns>[^/]+)/(?P<plural>[^/]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<sub>[^/]+))?"
)


class Refused(Exception):
    """An answer that is not 2xx."""

    def __init__(self, status: int, message: str, reason: str = ""):
        self.status, self.message, self.reason = status, message, reason
        super().__init__(message)


def now(later: float = 0) -> str:
    return (datetime.now(UTC) + timedelta(seconds=later)).strftime("%Y-%m-%dT%H:%M:%SZ")


def check_schema(body: Object) -> None:
    """Raises: Refused when the official schema, strict, or the CRD's does not take the manifest."""
    group = body["apiVersion"].rpartition("/")[0]
    try:
        if group in ("", "batch"):
            kubernetes_validate.validate(body, VERSION, strict=True)
        elif (schema := SCHEMAS / f"{group}_{body['kind'].lower()}.json").exists():
            jsonschema.validate(body, json.loads(schema.read_text()))
    except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as e:
        raise Refused(400, f'{body["kind"]} in version "{body["apiVersion"]}" cannot be handled: {e.message}') from e


def role_of(file: Path) -> set[tuple[str, str, str]]:
    """Return (verb, API group, resource) of what the roles in a file allow."""
    rules = [rule for body in yaml.safe_load_all(file.read_text()) for rule in body.get("rules", [])]
    return {
        (verb, group, resource)
        for rule in rules
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # connections that wait to be accepted
    daemon_threads = True


class SimulatedApi:
    """The server, its store, and what tests set: permissions, API groups, admission."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.objects: dict[tuple[str, str], Object] = {}  # (group/plural, name) -> object
        self.allowed = role_of(ROLE)  # what the user may do: what the role that is shipped allows
        self.denied: set[tuple[str, str]] = set()  # (verb, resource) that this user lacks all the same
        self.groups = {"batch": "v1", "authorization.k8s.io": "v1", "networking.k8s.io": "v1"}
        self.refuse: Callable[[Object], Refused | None] = lambda _body: None
        self.token = TOKEN
        self.instead: tuple[int, str, int] | None = None  # status, body and bytes cut off it: what a proxy may answer
        self.requests: list[str] = []
        self.latency_s = 0.0
        self.ahead_s = 0.0  # the server's clock, of this machine's
        self._served: list[tuple[float, float]] = []  # begin and end of each request
        self.on_delete: Callable[[Object, int | None], bool] = lambda _body, _grace: True
        self.log_of: Callable[[Object, bool], Iterator[tuple[float, bytes]]] = lambda _pod, _follow: iter(())
        self.namespaces = {NAMESPACE}
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()  # seconds until close

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def in_sequence(self) -> int:
        """Return how many requests were made one after the other, of those since the last call: the longest chain."""
        served, self._served = self._served, []
        chain, last = 0, 0.0
        for begin, end in sorted(served, key=lambda times: times[1]):
            if begin >= last:
                chain, last = chain + 1, end
        return chain

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def write_kubeconfig(self, file: Path, token: str = TOKEN, server: str | None = None) -> Path:
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": server or self.url}}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": NAMESPACE}}],
        }
        file.write_text(yaml.safe_dump(content))
        return file

    def put(self, group: str, plural: str, body: Object) -> Object:
        """Create an object as a controller or an administrator would."""
        with self.lock:
            stored = {"kind": KINDS[plural], **copy.deepcopy(body)}
            metadata = stored.setdefault("metadata", {})
            metadata.setdefault("namespace", NAMESPACE)
            metadata.setdefault("uid", str(uuid.uuid4()))
            metadata.setdefault("creationTimestamp", now())
            stored.setdefault("status", {})
            self.objects[f"{group}/{plural}", metadata["name"]] = stored
            return stored

    def all(self, group: str, plural: str) -> list[Object]:
        with self.lock:
            return [o for (kind, _), o in self.objects.items() if kind == f"{group}/{plural}"]

    def delete(self, body: Object, grace: int | None = None) -> None:
        """Delete an object and what it owns. A pod goes when its processes have, and no finalizer holds it.

        Seen: what has finalizers is only marked, however hard the deletion is forced. What a failed Job owns stays.
        """
        with self.lock:
            if self.on_delete(body, grace) and not body["metadata"].get("finalizers"):
                self.remove(body)
            elif body["metadata"].get("finalizers"):
                body["metadata"].setdefault("deletionTimestamp", now())
            uid = body["metadata"]["uid"]
            owned = [
                o
                for o in self.objects.values()
                if any(r["uid"] == uid for r in o["metadata"].get("ownerReferences", []))
            ]
            for one in owned:
                self.delete(one, None)

    def remove(self, body: Object) -> None:
        """Forget an object."""
        with self.lock:
            self.objects = {k: o for k, o in self.objects.items() if o is not body}

    def warn(self, kind: str, name: str, reason: str, message: str, event_type: str = "Warning") -> None:
        """Record an event about an object, once."""
        event = {
            "kind": "Event",
            "type": event_type,
            "reason": reason,
            "message": message,
            "involvedObject": {"kind": kind, "name": name},
            "lastTimestamp": now(),
            "metadata": {"name": f"{name}.{reason}.{abs(hash(message)) % 10**6}"},
        }
        if ("/events", event["metadata"]["name"]) not in self.objects:  # type: ignore[index]
            self.put("", "events", event)

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if path.rstrip("/") == "/apis":
            return 200, {
                "kind": "APIGroupList",
                "groups": [{"name": g, "preferredVersion": {"version": v}} for g, v in self.groups.items()],
            }
        if path.endswith("/selfsubjectaccessreviews"):
            asked = body["spec"]["resourceAttributes"]
            resource = "/".join(filter(None, [asked["resource"], asked["subresource"]]))
            allowed = self._may(asked["verb"], asked.get("group", ""), resource)
            return 201, {"kind": "SelfSubjectAccessReview", "status": {"allowed": allowed}}
        if path == "/api/v1/nodes":
            if ("list", "nodes") in self.denied:
                raise Refused(403, 'nodes is forbidden: User "me" cannot list resource "nodes" at the cluster scope')
            return 200, {"kind": "NodeList", "items": self._select("", "nodes", query)}
        found = _PATH.fullmatch(path)
        if found is None:
            raise Refused(404, f"the simulated server has no {path}")
        group, plural, name = found["group"] or "", found["plural"], found["name"]
        if group and group not in self.groups:
            raise Refused(404, "the server could not find the requested resource")
        if found["ns"] not in self.namespaces:
            raise Refused(404, f'namespaces "{found["ns"]}" not found')
        self._check(_VERBS.get(method, "get" if name else "list"), group, plural)
        with self.lock:
            if method == "POST":
                return self._create(group, plural, query, body)
            if name is None:
                return 200, {"kind": f"{KINDS[plural]}List", "items": self._select(group, plural, query)}
            stored = self.objects.get((f"{group}/{plural}", name))
            if stored is None:
                raise Refused(404, f'{plural} "{name}" not found')
            if method == "PATCH":
                if not isinstance(body, dict):
                    raise Refused(400, "a merge patch is an object; a list is a JSON patch")
                _merge(stored, body)
            elif method == "DELETE":
                grace = (body or {}).get("gracePeriodSeconds", query.get("gracePeriodSeconds"))
                self.delete(stored, None if grace is None else int(grace))
            return 200, stored

    def _may(self, verb: str, group: str, resource: str) -> bool:
        return (verb, group, resource) in self.allowed and (verb, resource) not in self.denied

    def _check(self, verb: str, group: str, plural: str) -> None:
        if not self._may(verb, group, plural):
            who = f'User "me" cannot {verb} resource "{plural}" in API group "{group}"'
            raise Refused(403, f"{plural} is forbidden: {who}")

    def _create(self, group: str, plural: str, query: dict[str, str], body: Object) -> tuple[int, Object]:
        assert query.get("fieldValidation") == "Strict"
        check_schema(body)
        if (refusal := self.refuse(body)) is not None:
            raise refusal
        if (f"{group}/{plural}", body["metadata"]["name"]) in self.objects:
            raise Refused(409, f'{plural} "{body["metadata"]["name"]}" already exists')
        return 201, body if query.get("dryRun") == "All" else self.put(group, plural, body)

    def _select(self, group: str, plural: str, query: dict[str, str]) -> list[Object]:
        labels = dict(term.split("=") for term in query.get("labelSelector", "").split(",") if term)
        fields = [term.split("=") for term in query.get("fieldSelector", "").split(",") if term]
        found = []
        for body in self.all(group, plural):
            has = body["metadata"].get("labels", {})
            if all(has.get(k) == v for k, v in labels.items()) and all(_field(body, k) == v for k, v in fields):
                found.append(body)
        return found


def _field(body: Object, path: str) -> Any:
    for part in path.split("."):
        body = body[part]
    return body


def _merge(body: Object, patch: Object) -> None:
    """A JSON merge patch."""
    for key, value in patch.items():
        if value is None:
            body.pop(key, None)
        elif isinstance(value, dict):
            _merge(body.setdefault(key, {}), value)
        else:
            body[key] = value


def _handler(api: SimulatedApi) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def date_time_string(self, timestamp: float | None = None) -> str:
            return super().date_time_string((timestamp or time.time()) + api.ahead_s)

        disable_nagle_algorithm = True  # as the real server: else each answer waits 40 ms for the client's kernel

        def _serve(self) -> None:
            url = urlsplit(self.path)
            query = {k: v[0] for k, v in parse_qs(url.query).items()}
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            api.requests.append(f"{self.command} {url.path}" + (" (dry run)" if "dryRun" in query else ""))
            begin = time.monotonic()
            time.sleep(api.latency_s)
            api._served.append((begin, time.monotonic()))
            try:
                if "authorization" not in self.headers:
                    raise Refused(403, 'forbidden: User "system:anonymous" cannot do this')
                if self.headers["authorization"] != f"Bearer {api.token}":
                    raise Refused(401, "Unauthorized")
                patched_as = self.headers.get("content-type")
                # Seen: a list, a JSON patch, is refused as a merge patch; the library sends either as it likes.
                if self.command == "PATCH" and patched_as != "application/merge-patch+json":
                    raise Refused(415, f"the simulated server takes no patch as {patched_as}")
                if url.path.endswith("/log"):
                    self._log(url.path.split("/")[-2], query)
                    return
                with api.lock:
                    status, answer = api.answer(self.command, url.path, query, body)
                    content = json.dumps(answer).encode()
            except Refused as e:
                status = e.status
                content = json.dumps({"kind": "Status", "code": e.status, "message": e.message}).encode()
            cut_off = 0
            if api.instead is not None:
                status, content, cut_off = api.instead[0], api.instead[1].encode(), api.instead[2]
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) - cut_off])
            self.close_connection |= cut_off > 0

        do_GET = do_POST = do_PATCH = do_DELETE = _serve

        def _log(self, name: str, query: dict[str, str]) -> None:
            pod = api.objects.get(("/pods", name))
            if pod is None:
                raise Refused(404, f'pods "{name}" not found')
            api._check("get", "", "pods/log")
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            oldest = time.time() + api.ahead_s - float(query.get("sinceSeconds", 1e9))
            lines = (line for at, line in api.log_of(pod, query.get("follow") == "true") if at >= oldest)
            for chunk in itertools.chain(lines, [b""]):
                self.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
                self.wfile.flush()

        def log_message(self, *_: object) -> None:
            pass

    return Handler
