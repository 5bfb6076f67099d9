"""docs/start/kubernetes.md, run command by command on a simulated cluster."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launchers.kubernetes.simulated_cluster import SimulatedCluster, why_not
from tests.pages import QUICK, run_page

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


def in_simulated_pods(line: str) -> str:
    """As the page says for nodes without GPUs; there are no images, and the claim's place is another one."""
    if line.startswith(("pip ", "docker ", "kubectl ")):
        return ""
    line = line.replace("name=first", f"name=first {QUICK}")
    here = "cluster=kubernetes cluster.accelerator=cpu hardware=cpu nproc_per_node=1 cluster.mount_path=/run/claim"
    return re.sub(r"cluster=kubernetes", here, line).replace("cluster.namespace=fsdp-jobs", "")


def test_the_page_for_kubernetes_runs_as_it_says_on_a_simulated_cluster(
    cluster: SimulatedCluster, tmp_path: Path
) -> None:
    run_page("kubernetes.md", tmp_path, in_simulated_pods)
