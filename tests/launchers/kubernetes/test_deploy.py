"""deploy/kubernetes: what an administrator applies is valid, complete, and gives no right that is not used."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from fsdp_jobs.config.clusters import ClusterConfig, KubernetesClusterConfig
from fsdp_jobs.launchers.kubernetes.validate import needed_permissions
from tests.jobs import ROOT
from tests.launchers.kubernetes.simulated_api import ROLE, role_of
from tests.launchers.kubernetes.test_manifests import NEWEST

DEPLOY = ROOT / "deploy" / "kubernetes"
SCHEMAS = Path(__file__).parent / "schemas"

# Used where the cluster allows it.
OPTIONAL = {
    ("create", "", "pods"),
    ("get", "", "pods"),  # kubectl logs
    ("list", "", "events"),  # why pods wait
    ("list", "kueue.x-k8s.io", "localqueues"),
    ("list", "kueue.x-k8s.io", "workloads"),
    ("list", "networking.k8s.io", "networkpolicies"),
    *(("delete", "", rendered) for rendered in ("services", "configmaps", "secrets")),  # kubectl delete -f
}


def documents(file: Path) -> Iterator[dict[str, Any]]:
    yield from yaml.safe_load_all(file.read_text())


@pytest.mark.parametrize("file", sorted(f.relative_to(DEPLOY) for f in DEPLOY.rglob("*.yaml")), ids=str)
def test_every_manifest_is_valid(file: Path) -> None:
    for body in documents(DEPLOY / file):
        group = body["apiVersion"].rpartition("/")[0]
        if body["kind"] == "Kustomization":
            for resource in body["resources"]:
                assert (DEPLOY / file.parent / resource).exists(), resource
        elif group == "kueue.x-k8s.io":
            schema = json.loads((SCHEMAS / f"{group}_{body['kind'].lower()}.json").read_text())
            jsonschema.validate(body, schema)
        else:
            for minor in NEWEST:
                kubernetes_validate.validate(body, minor, strict=True)


def test_every_key_is_on_its_page_with_its_default() -> None:
    page = (ROOT / "docs" / "launchers/kubernetes.md").read_text()
    shown = {
        key: default
        for keys, default in re.findall(r"^\| (`cluster\..*?`) \| (\S+) \| ", page, re.MULTILINE)
        for key in re.findall(r"`cluster\.([\w.]+)`", keys)
    }
    common = {f.name for f in fields(ClusterConfig)}
    values = {f.name: getattr(KubernetesClusterConfig(), f.name) for f in fields(KubernetesClusterConfig)}
    own = {k: "null" if v is None else str(v).removesuffix(".0") for k, v in values.items() if k not in common}
    assert shown == own


def test_the_role_is_what_submitting_takes_and_no_more() -> None:
    given = role_of(ROLE)
    needed = {p for workload in ("job", "jobset", "volcano") for p in needed_permissions(workload)}
    assert given == needed | OPTIONAL
