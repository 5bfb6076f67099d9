"""What is submitted: golden files, the official schemas of three minor versions, the schemas of JobSet and Volcano.

`python -m tests.launchers.kubernetes.test_manifests` writes golden files; review the difference before committing it.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.launchers.base import Job
from fsdp_jobs.launchers.kubernetes import labels
from fsdp_jobs.launchers.kubernetes.labels import app_of
from fsdp_jobs.launchers.kubernetes.manifests import WORKLOADS, files_objects, owned_by
from fsdp_jobs.launchers.kubernetes.scheduler import KubernetesRequest
from fsdp_jobs.launchers.kubernetes.skeletons import fill, merge
from fsdp_jobs.plan.plan import make_plan
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import ADDRESS_ENV, HOST_ENV
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.verdict import EXIT_FAILED, EXIT_REQUEUE

HERE = Path(__file__).parent
MINORS = sorted(
    {tuple(map(int, p.name[1:].split(".")[:2])) for p in Path(kubernetes_validate.__file__).parent.glob("*/v1.*")}
)
NEWEST = [f"{major}.{minor}" for major, minor in MINORS[-3:]]

COMMON = ("cluster=kubernetes", "cluster.image=registry.example/fsdp-jobs:1", "cluster.claim=runs")
CASES: dict[str, tuple[str, ...]] = {
    "job_cpu": ("cluster.accelerator=cpu", "hardware=cpu", "nodes=2", "nproc_per_node=2"),
    "job_elastic_kueue": ("nodes=2:8", "cluster.queue=team", "cluster.leaf_label=topology.example/leaf"),
    "job_tpu": ("cluster=kubernetes_tpu", "nodes=2", "script=/app/train.py"),
    "job_everything": (
        "cluster=kubernetes_efa",
        "nodes=4",
        "cluster.env.NCCL_DEBUG=WARN",
        "cluster.secret_env.HF_TOKEN=hub/token",
        "cluster.node_selector={node.kubernetes.io/instance-type: p5.48xlarge}",
        "cluster.tolerations=[{key: nvidia.com/gpu, operator: Exists}]",
        "cluster.priority_class=research",
        "cluster.service_account=trainer",
        "cluster.image_pull_secrets=[registry]",
        "cluster.labels={team: llm}",
        "cluster.annotations={example.com/cost-centre: '42'}",
        "cluster.pod_patch={schedulerName: custom, tolerations: [{key: node.kubernetes.io/unreachable, "
        "operator: Exists, effect: NoExecute, tolerationSeconds: 5}], containers: [{name: trainer, lifecycle: "
        "{preStop: {sleep: {seconds: 1}}}}]}",
        "cluster.run_as_user=null",
        "cluster.cpus=90",
        "cluster.memory=1000Gi",
        "cluster.shm=64Gi",
    ),
    "jobset_kueue": ("cluster.workload=jobset", "nodes=2:4", "cluster.queue=team", "cluster.leaf_label=leaf"),
    "volcano": ("cluster.workload=volcano", "nodes=2:3", "cluster.queue=team"),
}


def objects_of(case: str, run: RunDir) -> list[dict[str, Any]]:
    config = compose_job([*COMMON, *CASES[case], "name=pretrain"])
    job = Job(config, run, make_plan(config), submission="250101120000-abc123")
    return WORKLOADS[config.cluster.workload].objects(job)  # type: ignore[attr-defined]


@cache
def render(case: str) -> str:
    run = RunDir("/home/me/runs/pretrain")
    return str(KubernetesRequest(objects_of(case, run), None))  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES)
def test_what_is_submitted_is_as_it_was_reviewed(case: str) -> None:
    assert render(case) == (HERE / "golden" / f"{case}.yaml").read_text()


def test_without_a_group_nothing_is_said_of_one() -> None:
    config = compose_job([*COMMON, "cluster.fs_group=null", "name=pretrain"])
    job = Job(config, RunDir("/home/me/runs/pretrain"), make_plan(config))
    assert "fsGroup" not in str(WORKLOADS["job"].objects(job))


@pytest.mark.parametrize("minor", NEWEST)
@pytest.mark.parametrize("case", [c for c in CASES if c.startswith("job_")])
def test_official_schemas_take_every_object(case: str, minor: str) -> None:
    for body in yaml.safe_load_all(render(case)):
        kubernetes_validate.validate(body, minor, strict=True)


@pytest.mark.parametrize("minor", NEWEST)
def test_official_schemas_take_what_carries_the_files(tmp_path: Path, minor: str) -> None:
    config = compose_job([*COMMON, "name=pretrain"])
    run = RunDir(tmp_path / "pretrain")
    for file in (run.config, run.plan, run.token):
        write_atomic(file, "x")
    root = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "pretrain-abc123", "uid": "u"}}
    job = Job(config, run, make_plan(config))
    for body in files_objects(job):
        kubernetes_validate.validate(owned_by(root, body), minor, strict=True)


@pytest.mark.parametrize(
    ("case", "schema"),
    [("jobset_kueue", "jobset.x-k8s.io_jobset.json"), ("volcano", "batch.volcano.sh_job.json")],
)
def test_custom_kinds_schemas_take_every_object(case: str, schema: str) -> None:
    for body in yaml.safe_load_all(render(case)):
        jsonschema.validate(body, json.loads((HERE / "schemas" / schema).read_text()))


@pytest.mark.parametrize("minor", NEWEST)
@pytest.mark.parametrize("case", ["jobset_kueue", "volcano"])
def test_official_schemas_take_the_jobs_and_pods_inside_custom_kinds(case: str, minor: str) -> None:
    (body,) = yaml.safe_load_all(render(case))
    for replicated in body["spec"].get("replicatedJobs", []):
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "x"},
            "spec": replicated["template"]["spec"],
        }
        kubernetes_validate.validate(job, minor, strict=True)
    for task in body["spec"].get("tasks", []):
        kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **task["template"]}, minor, strict=True)


@pytest.mark.parametrize("case", CASES)
def test_pods_are_what_the_restricted_standard_wants(case: str) -> None:
    """The rules of the Pod Security Standard `restricted`, read on every pod."""
    pods = list(_pod_specs(list(yaml.safe_load_all(render(case)))))
    assert len(pods) >= 2
    for spec in pods:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        assert spec["automountServiceAccountToken"] is False
        assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        for volume in spec["volumes"]:
            assert volume.keys() & {"configMap", "secret", "emptyDir", "persistentVolumeClaim", "downwardAPI"}
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False and security["capabilities"] == {"drop": ["ALL"]}
            assert not any("hostPort" in port for port in container.get("ports", []))


def test_pods_in_their_machines_network_find_the_coordinator_by_its_name() -> None:
    """Kubernetes' own default for such pods is the machine's resolver, which knows no Services."""
    config = compose_job([*COMMON, "cluster.pod_patch={hostNetwork: true}", "name=pretrain"])
    job = Job(config, RunDir("/home/me/runs/pretrain"), make_plan(config))
    pods = list(_pod_specs(WORKLOADS["job"].objects(job)))
    assert [(pod["hostNetwork"], pod["dnsPolicy"]) for pod in pods] == [(True, "ClusterFirstWithHostNet")] * 2


def _pod_specs(found: Any) -> Any:
    if isinstance(found, dict) and "containers" in found:
        yield found
    elif isinstance(found, dict | list):
        for inner in found.values() if isinstance(found, dict) else found:
            yield from _pod_specs(inner)


def test_no_secret_is_in_what_is_shown(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "pretrain")
    write_atomic(run.token, "the-token-itself")
    assert "the-token-itself" not in json.dumps(objects_of("job_everything", run))


def test_grace_is_twice_the_slowest_save_there_was(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "pretrain")
    run.path.mkdir()
    run.events.write_text(
        json.dumps({"time": 0, "event": "checkpoint", "attempt": 0, "step": 1, "seconds": 100.2}) + "\n"
    )
    for spec in _pod_specs(objects_of("job_cpu", run)):
        assert spec["terminationGracePeriodSeconds"] == 216  # 2 x 100.2, and 15 to leave


def test_no_number_of_evictions_ends_a_job_of_volcano(tmp_path: Path) -> None:
    """Each pod that Volcano replaces counts as a retry of the whole job; for 0 its webhook puts 3."""
    (body,) = objects_of("volcano", RunDir(tmp_path / "pretrain"))
    assert body["spec"]["maxRetry"] == fill("job_nodes")["spec"]["backoffLimitPerIndex"]


def test_machines_that_failed_too_often_are_left_out(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "pretrain")
    write_atomic(run.excluded, json.dumps({"bad-7": {"until": 1e12, "why": "3 failures"}}))
    _, _, nodes = objects_of("job_cpu", run)
    (term,) = nodes["spec"]["template"]["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    assert term == {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["bad-7"]}]}
    kubernetes_validate.validate(nodes, NEWEST[-1], strict=True)


def test_machines_are_left_out_of_those_that_a_patch_asks_for(tmp_path: Path) -> None:
    """A pod may go to a machine that fulfils one of several terms; null removes what the pod has."""
    run = RunDir(tmp_path / "pretrain")
    write_atomic(run.excluded, json.dumps({"bad-7": {"until": 1e12, "why": "3 failures"}}))
    no_bad, no_old = ({"key": "metadata.name", "operator": "NotIn", "values": [host]} for host in ("bad-7", "old-1"))
    a, b = ({"matchExpressions": [{"key": "pool", "operator": "In", "values": [pool]}]} for pool in ("a", "b"))
    asked = [a, {**b, "matchFields": [no_old]}]
    both = [{**a, "matchFields": [no_bad]}, {**b, "matchFields": [no_old, no_bad]}]
    place = "requiredDuringSchedulingIgnoredDuringExecution"
    for affinity, terms in (
        ({"nodeAffinity": {place: {"nodeSelectorTerms": asked}}}, both),
        ({"nodeAffinity": None}, [{"matchFields": [no_bad]}]),
        (None, [{"matchFields": [no_bad]}]),
    ):
        patch = json.dumps({"affinity": affinity}).replace('"', "")
        more = ("name=pretrain", "nodes=3", "cluster.workload=volcano", f"cluster.pod_patch={patch}")
        config = compose_job([*COMMON, *more])
        (body,) = WORKLOADS["volcano"].objects(Job(config, run, make_plan(config)))
        first, *nodes = [task["template"]["spec"].get("affinity") for task in body["spec"]["tasks"]]
        assert not first or "bad-7" not in str(first), "the coordinator may go there"
        assert nodes == [{"nodeAffinity": {place: {"nodeSelectorTerms": terms}}}] * 3


def test_all_jobs_of_a_jobset_have_the_users_labels() -> None:
    """A rule of the cluster may want an owner on every Job, those that JobSet's controller makes included."""
    config = compose_job([*COMMON, "name=pretrain", "cluster.workload=jobset", "cluster.labels={team: nlp}"])
    (body,) = WORKLOADS["jobset"].objects(Job(config, RunDir("/home/me/runs/pretrain"), make_plan(config)))
    inner = [replicated["template"]["metadata"] for replicated in body["spec"]["replicatedJobs"]]
    assert [metadata["labels"]["team"] for metadata in (body["metadata"], *inner)] == ["nlp"] * 3


@pytest.mark.parametrize("name", ["Llama 3!", "7b", "x" * 100, "a.b_c", "---"])
def test_names_of_objects_are_labels_that_leave_room_for_pods(name: str) -> None:
    app = app_of(name, "250101000000-0a1b2c")
    assert app[0].isalpha() and app.replace("-", "a").isalnum() and app.islower() and not app.endswith("-")
    assert len(f"{app}-coordinator-0-0-xxxxx") <= 63


def test_jobs_of_a_submission_have_different_objects() -> None:
    """The names of a sweep's runs are made of its keys, and end with a number."""
    names = [f"lr-weight_decay-micro_batch-aab02f31c-{number:03}" for number in range(3)]
    apps = [app_of(name, "250101000000-0a1b2c") for name in (*names, "my-run", "My_run", "my_run")]
    assert len({*apps}) == len(apps) and apps[3] == "my-run-0a1b2c"


def test_a_second_mount_of_a_volume_joins_the_first() -> None:
    runs = {"name": "runs", "mountPath": "/runs"}
    data = {"name": "runs", "mountPath": "/data", "subPath": "data"}
    assert merge([runs], [data, {**runs, "readOnly": False}]) == [{**runs, "readOnly": False}, data]


def test_patches_are_merged_by_name() -> None:
    base = {"a": 1, "containers": [{"name": "x", "env": [{"name": "A", "value": "1"}], "ports": [1]}]}
    patch = {"containers": [{"name": "x", "env": [{"name": "B", "value": "2"}], "ports": [2]}, {"name": "y"}]}
    assert merge(base, patch) == {
        "a": 1,
        "containers": [
            {"name": "x", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}], "ports": [2]},
            {"name": "y"},
        ],
    }
    mounts = [{"name": "data", "mountPath": "/a"}, {"name": "data", "mountPath": "/b"}]
    assert merge([{"name": "tmp"}], mounts) == [{"name": "tmp"}, *mounts]  # one volume in two places


def test_skeletons_say_what_the_pods_program_says() -> None:
    pod, coordinator = (fill(name)["spec"]["containers"][0] for name in ("pod", "pod_coordinator"))
    assert pod["terminationMessagePath"] == labels.TERMINATION_LOG
    assert [e["name"] for e in fill("pod_trainer")["spec"]["containers"][0]["env"]] == [ADDRESS_ENV, HOST_ENV]
    mounts = {m["name"]: m["mountPath"] for m in coordinator["volumeMounts"]}
    assert mounts == {"job": labels.JOB_FILES, "token": labels.TOKEN_FILES, "pod": labels.POD_INFO}
    assert [p["containerPort"] for p in coordinator["ports"]] == [labels.COORDINATOR_PORT]
    assert [p["port"] for p in fill("service")["spec"]["ports"]] == [labels.COORDINATOR_PORT]
    _, fails, requeues = fill("job_coordinator")["spec"]["podFailurePolicy"]["rules"]
    assert (fails["action"], fails["onExitCodes"]["values"]) == ("FailJob", [EXIT_FAILED])
    assert (requeues["action"], requeues["onExitCodes"]["values"]) == ("Ignore", [EXIT_REQUEUE])
    policies = fill("volcano_coordinator")["policies"]
    assert [p["exitCode"] for p in policies if p["action"] == "TerminateJob"] == [EXIT_FAILED]


@pytest.mark.parametrize("case", CASES)
def test_nothing_of_a_skeleton_stays_empty(case: str) -> None:
    assert "null" not in render(case)


if __name__ == "__main__":
    (HERE / "golden").mkdir(exist_ok=True)
    for name in CASES:
        (HERE / "golden" / f"{name}.yaml").write_text(render(name))
