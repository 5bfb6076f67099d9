"""From the command to the last object in the cluster: a submission against a plain creation of the same objects.

    python benchmarks/kubernetes_submit.py [--pairs 12]

Both sides are processes that use the `kubernetes` client, in alternation, and both create what `dry_run=true --output
yaml` shows, with strict validation. The cluster is the tests' simulated API on this machine: it answers at once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # for the simulated API

from tests.launchers.kubernetes.simulated_api import NAMESPACE, SimulatedApi

JOB = ["cluster=kubernetes", "cluster.image=registry.example/fsdp-jobs:1", "cluster.claim=runs", "nodes=3"]
PLAIN = f"""
import json, sys, yaml
from kubernetes import client, config

configuration = client.Configuration()
config.load_kube_config(sys.argv[1], client_configuration=configuration)
api = client.ApiClient(configuration)
for body in yaml.safe_load_all(sys.stdin):
    group, kind = body["apiVersion"], body["kind"].lower() + "s"
    url = f"{{configuration.host}}/{{'apis' if '/' in group else 'api'}}/{{group}}/namespaces/{NAMESPACE}/{{kind}}"
    headers = {{**api.default_headers, "Content-Type": "application/json"}}
    api.update_params_for_auth(headers, [], ["BearerToken"])
    pools = api.rest_client.pool_manager
    answer = pools.request("POST", f"{{url}}?fieldValidation=Strict", headers=headers, body=json.dumps(body))
    assert answer.status < 300, answer.data
"""


class TimedApi(SimulatedApi):
    """Notes when it has created something last."""

    created_at = 0.0

    def _create(self, group: str, plural: str, query: dict[str, str], body: dict[str, Any]) -> Any:
        answer = super()._create(group, plural, query, body)
        if "dryRun" not in query:
            self.created_at = time.perf_counter()
        return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12)
    args = parser.parse_args()
    api = TimedApi()
    claim = {"spec": {"accessModes": ["ReadWriteMany"]}, "metadata": {"name": "runs"}}
    api.put("", "persistentvolumeclaims", {"kind": "PersistentVolumeClaim", **claim})
    ours, plain = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        kubeconfig = str(api.write_kubeconfig(Path(folder) / "kubeconfig"))
        root = str(Path(__file__).parent.parent)
        env = {**os.environ, "PYTHONPATH": root, "KUBECONFIG": kubeconfig, "XDG_STATE_HOME": folder}

        def seconds(command: list[str], text: str = "") -> tuple[float, str]:
            began = time.perf_counter()
            done = subprocess.run(command, cwd=folder, env=env, input=text, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            return api.created_at - began, done.stdout

        submit = [sys.executable, "-m", "fsdp_jobs", *JOB]
        _, objects = seconds([*submit, "name=shown", "dry_run=true", "--output", "yaml"])
        for pair in range(args.pairs):
            ours.append(seconds([*submit, f"name=run-{pair}", "attach=false"])[0])
            copies = objects.replace("shown", f"plain-{pair}")
            plain.append(seconds([sys.executable, "-c", PLAIN, kubeconfig], copies)[0])
    api.close()
    a, b = statistics.median(ours), statistics.median(plain)
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {args.pairs} pairs, until the last object is created")
    print(f"submitted {a:.2f} s, plainly created {b:.2f} s: {a - b:+.2f} s, {a / b:.1f} times (goal: +0.7 s)")


if __name__ == "__main__":
    main()
