"""The labels of the cluster's machines, which name the switch that each is under."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from fsdp_jobs.config.resolve import accelerator, ranks_per_node
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.kubernetes.api import Api, ApiError
from fsdp_jobs.launchers.kubernetes.pods import cluster_of
from fsdp_jobs.plan.sources import labels_in_use
from fsdp_jobs.run.table import size

logger = logging.getLogger(__name__)

_CARRIED = 700_000  # bytes of labels: a ConfigMap has at most 1 MiB, with configuration and plan
_answers: dict[str, dict[str, dict[str, str]]] = {}  # question -> labels by machine


def topology_labels(api: Api, config: JobConfig) -> dict[str, dict[str, str]]:
    """Return machine -> its labels of switches and NVLink domains, for the machines that a node may get.

    Until `forget`, one answer serves jobs that are planned and submitted together. Empty if no machine has such a
    label, or if the API does not list the cluster's machines. Then a warning gives the reason, and jobs are submitted
    all the same.
    """
    cluster = cluster_of(config)
    gpus = ranks_per_node(config) if accelerator(config) == "cuda" else 0
    question = json.dumps([api.where, cluster.node_selector, cluster.gpu_resource, gpus])
    if question not in _answers:
        _answers[question] = _read(api, cluster.node_selector, cluster.gpu_resource, gpus)
    return _answers[question]


def forget() -> None:
    """Drop all answers that `topology_labels` would reuse."""
    _answers.clear()


def _read(api: Api, selector: Mapping[str, str], gpu_resource: str, gpus: int) -> dict[str, dict[str, str]]:
    try:
        machines = api.select("v1", "Node", labelSelector=",".join(f"{k}={v}" for k, v in selector.items()))
    except ApiError as e:
        why = "you may not list the cluster's nodes" if e.status == 403 else str(e)
        logger.warning(
            "%s: %s, so the plan assumes that all are under one switch "
            "(deploy/kubernetes/nodes.yaml allows it; cluster.topology=FILE names the switches)",
            *(api.where, why),
        )
        return {}
    labels = {
        machine["metadata"]["name"]: machine["metadata"].get("labels", {})
        for machine in machines
        if int(machine["status"].get("allocatable", {}).get(gpu_resource, 0)) >= gpus
    }
    family = labels_in_use(labels)
    labels = {name: {k: v for k, v in own.items() if k in family} for name, own in labels.items()}
    return labels if any(labels.values()) else {}


def carried_labels(api: Api, config: JobConfig) -> dict[str, dict[str, str]]:
    """Return `topology_labels` if they fit into the job's ConfigMap; else warn and return an empty dict."""
    labels = topology_labels(api, config)
    if (length := len(json.dumps(labels))) <= _CARRIED:
        return labels
    what = "the labels of %s machines (%s) do not fit into a ConfigMap: ranks are numbered as if under one switch (%s)"
    logger.warning(what, len(labels), size(length), "cluster.node_selector names fewer machines")
    return {}
