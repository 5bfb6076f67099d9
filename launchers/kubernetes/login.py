"""Connect to the cluster of a kubeconfig, or of the pod that this runs in; log in again when credentials expire."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from fsdp_jobs.config.clusters import KubernetesClusterConfig
from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.launchers.kubernetes.api import Api

_CONNECTIONS = 32
_LOG_IN_EVERY_S = 300.0  # while logins fail: each may open a browser
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class NoKubeconfig(BadInput):
    """The kubeconfig, which names the cluster, is missing or cannot be read."""


class Login:
    """The client library's client and namespace of one context. One per command, so that a login plugin runs once."""

    def __init__(self, log_in: Callable[[], tuple[Any, str]]):
        self._log_in, self._lock, self._has_worked = log_in, threading.Lock(), False
        self.client, self.namespace = log_in()
        self._logged_in_at = time.monotonic()

    def request(self, request: Callable[[Any], Any]) -> Any:
        """Send a request with the client; if the server rejects credentials that have worked, log in and send it again.

        Tokens and certificates of plugins and files expire, and few of them say when. A user who is logged out may log
        in again in another terminal, so that is tried, too, but not often.
        """
        client = self.client
        answer = request(client)
        is_anonymous = answer.status == 403 and b"system:anonymous" in answer.data  # the plugin has failed
        if answer.status != 401 and not is_anonymous:
            self._has_worked = True
            return answer
        with self._lock:  # once for all threads
            waited = time.monotonic() - self._logged_in_at > _LOG_IN_EVERY_S
            if self.client is client and (self._has_worked or waited):
                self._has_worked = False
                self.client, _ = self._log_in()
                self._logged_in_at = time.monotonic()
        return answer if self.client is client else request(self.client)


def connect(cluster: KubernetesClusterConfig, retried_for_s: float = 0) -> Api:
    """Connect to the namespace of the configuration, else of the kubeconfig or the pod's service account.

    Raises:
        NoKubeconfig: there is no usable one.
        BadInput: the client library is not installed, or there is no such context.
    """
    named = os.environ.get("KUBECONFIG") or "~/.kube/config"
    files = [Path(name).expanduser() for name in named.split(os.pathsep) if name]
    changed = tuple(f.stat().st_mtime_ns if f.exists() else 0 for f in files)
    login = _login(cluster.context, named, changed)
    return Api(login, cluster.namespace or login.namespace, retried_for_s)


@lru_cache(8)  # contexts; no more, because those of changed kubeconfigs keep their connections open
def _login(context: str | None, files: str, changed: tuple[int, ...]) -> Login:
    in_pod = not os.environ.get("KUBECONFIG") and not any(changed) and "KUBERNETES_SERVICE_HOST" in os.environ
    return Login(lambda: _log_in(context, None if in_pod else files))


def _log_in(context: str | None, files: str | None) -> tuple[Any, str]:
    """Return the library's client and the namespace; without `files`, those of this pod's service account."""
    try:
        from kubernetes import client, config  # takes a second
        from kubernetes.config.kube_config import KubeConfigMerger
    except ModuleNotFoundError as e:
        what = "the package `kubernetes` is not installed"
        raise BadInput.at("cluster=kubernetes", what, "pip install 'fsdp_jobs[kubernetes]'") from e
    configuration = client.Configuration()
    try:
        if files is None:
            config.load_incluster_config(client_configuration=configuration)
            namespace = _NAMESPACE.read_text().strip()
        else:
            kubeconfig = KubeConfigMerger(files).config
            if kubeconfig is None:
                raise config.ConfigException("there is no such file")
            name = context or kubeconfig["current-context"]
            if (chosen := kubeconfig["contexts"].get_with_name(name, safe=True)) is None:
                names = ", ".join(c["name"] for c in kubeconfig["contexts"].value)
                raise BadInput.at(f"cluster.context={name}", f"the kubeconfig has only {names}")
            config.load_kube_config(files, name, configuration)
            namespace = chosen["context"].safe_get("namespace") or "default"
            server = kubeconfig["clusters"].get_with_name(chosen["context"]["cluster"])["cluster"]
            if proxy := server.safe_get("proxy-url"):
                configuration.proxy, configuration.no_proxy = proxy, None  # NO_PROXY is for proxies of the environment
        configuration.retries, configuration.connection_pool_maxsize = False, _CONNECTIONS
        return client.ApiClient(configuration), namespace
    except (config.ConfigException, yaml.YAMLError, OSError, TypeError, AttributeError, ValueError) as e:
        where = f"KUBECONFIG={files or 'in this pod'}"
        cure = "set KUBECONFIG to the file that the cluster's administrator gave you; kubectl get pods must work first"
        why = "not a mapping" if isinstance(e, TypeError | AttributeError) else e
        raise NoKubeconfig([Problem(where, f"no usable kubeconfig: {why}", cure)]) from e
