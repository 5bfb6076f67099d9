"""The cluster's machines as their labels describe them: which switch each is under."""

from __future__ import annotations

import logging
from functools import cache

from fsdp_jobs.config.resolve import accelerator, ranks_per_node
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.kubernetes.api import Api, ApiError
from fsdp_jobs.launchers.kubernetes.pods import cluster_of
from fsdp_jobs.plan.sources import KUBERNETES_LABELS, NVLINK_LABELS

logger = logging.getLogger(__name__)

_LABELS = {*NVLINK_LABELS, *(label for family in KUBERNETES_LABELS for label in family)}


def topology_labels(api: Api, config: JobConfig) -> dict[str, dict[str, str]]:
    """Read the labels that name switches and NVLink domains, by machine, of machines that a node may get.

    Empty when no machine has such a label, or the user may not list the cluster's machines.

    Raises:
        ApiError: the API does not answer.
    """
    cluster = cluster_of(config)
    gpus = ranks_per_node(config) if accelerator(config) == "cuda" else 0
    try:
        machines = api.nodes(cluster.node_selector)
    except ApiError as e:
        if e.status != 403:
            raise
        _warn_unreadable(api.where)
        return {}
    labels = {
        machine["metadata"]["name"]: {k: v for k, v in machine["metadata"].get("labels", {}).items() if k in _LABELS}
        for machine in machines
        if int(machine["status"].get("allocatable", {}).get(cluster.gpu_resource, 0)) >= gpus
    }
    return labels if any(labels.values()) else {}


@cache
def _warn_unreadable(where: str) -> None:
    """Say once per process and cluster why a plan knows no switches."""
    logger.warning(
        "%s: you may not list the cluster's nodes, so the plan takes them as under one switch "
        "(deploy/kubernetes/nodes.yaml allows it; cluster.topology=FILE names the switches)",
        where,
    )
