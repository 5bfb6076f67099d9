"""Jobs on a real cluster, named by the variables in conftest.py. Each test makes its own job; all share a namespace."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config
from kubernetes.stream import stream

from fsdp_jobs.run.verdict import Verdict
from tests.jobs import cli
from tests.launchers.kubernetes.submitted import Submitted
from tests.world import TINY

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

KUBECONFIG = os.environ["FSDP_JOBS_TEST_KUBECONFIG"]
IMAGE = os.environ["FSDP_JOBS_TEST_IMAGE"]
STORAGE_CLASS = os.environ.get("FSDP_JOBS_TEST_STORAGE_CLASS")
HOST_PATH = os.environ.get("FSDP_JOBS_TEST_HOST_PATH", "/tmp/fsdp-jobs-test")
SPECS = Path(__file__).parent.parent.parent.parent / "deploy" / "kubernetes"
COORDINATOR, TRAINER = "fsdp-jobs/role=coordinator", "fsdp-jobs/role=trainer"


class Cluster:
    """A namespace of the cluster, and what an administrator does to it."""

    def __init__(self) -> None:
        config.load_kube_config(KUBECONFIG)
        self.core, self.batch = client.CoreV1Api(), client.BatchV1Api()
        self.namespace = f"fsdp-jobs-test-{uuid.uuid4().hex[:6]}"

    def __enter__(self) -> Cluster:
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        self.core.create_namespace({"metadata": {"name": self.namespace, "labels": labels}})
        accounts = self.core.list_namespaced_service_account
        _until(lambda: bool(accounts(self.namespace).items), "the namespace's service account")
        spec: dict[str, Any] = {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Gi"}},
            "storageClassName": STORAGE_CLASS or "",
        }
        if STORAGE_CLASS is None:
            volume = {
                "capacity": {"storage": "1Gi"},
                "accessModes": ["ReadWriteMany"],
                "storageClassName": "",
                "hostPath": {"path": f"{HOST_PATH}/{self.namespace}", "type": "DirectoryOrCreate"},
                "claimRef": {"namespace": self.namespace, "name": "runs"},
            }
            self.core.create_persistent_volume({"metadata": {"name": self.namespace}, "spec": volume})
            spec["volumeName"] = self.namespace
        self.core.create_namespaced_persistent_volume_claim(
            self.namespace, {"metadata": {"name": "runs"}, "spec": spec}
        )
        if STORAGE_CLASS is None:
            self.open_to_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.core.delete_namespace(self.namespace)
        if STORAGE_CLASS is None:
            self.core.delete_persistent_volume(self.namespace)

    def open_to_all(self) -> None:
        """A fresh folder on a machine belongs to root: let the jobs' user write there."""
        relaxed = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "privileged"}}}
        self.core.patch_namespace(self.namespace, relaxed)
        container = {
            "name": "open",
            "image": IMAGE,
            "command": ["python", "-c", "import os; os.chmod('/runs', 0o777)"],
            "securityContext": {"runAsUser": 0},
            "volumeMounts": [{"name": "runs", "mountPath": "/runs"}],
        }
        volume = {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}
        spec = {"restartPolicy": "Never", "containers": [container], "volumes": [volume]}

        def is_admitted() -> bool:  # admission sees the relaxed label a moment late
            with suppress(client.ApiException):
                self.core.create_namespaced_pod(self.namespace, {"metadata": {"name": "open"}, "spec": spec})
                return True
            return False

        _until(is_admitted, "the pod that opens the folder", 30)
        _until(lambda: self.core.read_namespaced_pod("open", self.namespace).status.phase == "Succeeded", "the folder")
        self.core.delete_namespaced_pod("open", self.namespace)
        strict = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
        self.core.patch_namespace(self.namespace, strict)

    def pods(self, job: Submitted, selector: str) -> list[Any]:
        app = job.run.read_job()["handle"].rpartition(":")[2]
        selector = f"app.kubernetes.io/instance={app},{selector}"
        found = self.core.list_namespaced_pod(self.namespace, label_selector=selector).items
        return [p for p in found if p.status.phase == "Running" and p.metadata.deletion_timestamp is None]

    def node(self, job: Submitted, index: int) -> Any:
        (pod,) = self.pods(job, f"{TRAINER},batch.kubernetes.io/job-completion-index={index}")
        return pod

    def kill(self, pod: Any) -> None:
        self.core.delete_namespaced_pod(pod.metadata.name, self.namespace, grace_period_seconds=0)

    def delete(self, pod: Any) -> None:
        self.core.delete_namespaced_pod(pod.metadata.name, self.namespace)

    @contextmanager
    def drained(self, machine: str) -> Iterator[None]:
        """Cordon a machine and evict our pods from it, as `kubectl drain` does; put it back afterwards."""
        self.core.patch_node(machine, {"spec": {"unschedulable": True}})
        try:
            for pod in self.core.list_namespaced_pod(self.namespace).items:
                if pod.spec.node_name == machine and pod.status.phase == "Running":
                    eviction = {"apiVersion": "policy/v1", "kind": "Eviction"}
                    eviction |= {"metadata": {"name": pod.metadata.name, "namespace": self.namespace}}
                    self.core.create_namespaced_pod_eviction(pod.metadata.name, self.namespace, eviction)
            yield
        finally:
            self.core.patch_node(machine, {"spec": {"unschedulable": False}})

    def knows(self, group: str) -> bool:
        return group in {g.name for g in client.ApisApi().get_api_versions().groups}


def _until(true: Callable[[], bool], what: str, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as made:
        yield made


@pytest.fixture
def folder(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KUBECONFIG", KUBECONFIG)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ".state"))
    return tmp_path


def overrides(cluster: Cluster, *more: str) -> list[str]:
    return [
        "cluster=kubernetes",
        f"cluster.image={IMAGE}",
        f"cluster.namespace={cluster.namespace}",
        "cluster.claim=runs",
        "cluster.accelerator=cpu",
        "cluster.cpus=250m",
        "cluster.memory=1536Mi",
        "cluster.shm=64Mi",
        "cluster.lost_after_s=20",
        "hardware=cpu",
        "nproc_per_node=1",
        "nodes=2",
        *TINY,
        "checkpoint.every_steps=20",
        *more,
    ]


@contextmanager
def running(cluster: Cluster, folder: Path, name: str, *more: str) -> Iterator[Submitted]:
    """A detached job that would train for hours; it is gone at the end."""
    done = cli(folder, f"name={name}", *overrides(cluster, "steps=1000000", *more), "attach=false")
    assert done.returncode == 0, done.stdout + done.stderr
    try:
        job = Submitted(folder, name)
        job.until_advanced(1)
        job.until_true(lambda: bool(job.events("checkpoint")), "a checkpoint")
        yield job
    finally:
        cli(folder, "cancel", name, "--now")


def test_train_on_two_pods_status_logs_and_dry_run(cluster: Cluster, folder: Path) -> None:
    before = len(cluster.batch.list_namespaced_job(cluster.namespace).items)
    shown = cli(folder, "name=first", *overrides(cluster, "steps=40"), "dry_run=true")
    assert shown.returncode == 0 and "kind: Job" in shown.stdout, shown.stdout + shown.stderr
    assert len(cluster.batch.list_namespaced_job(cluster.namespace).items) == before
    done = cli(folder, "name=first", *overrides(cluster, "steps=40"), timeout=600)
    assert done.returncode == 0 and "first: done" in done.stdout, done.stdout + done.stderr
    assert "40/40" in cli(folder, "status", "first").stdout
    assert cli(folder, "logs", "-f", "first").returncode == 0
    assert sorted(Submitted(folder, "first").losses()) == list(range(1, 41))
    again = cli(folder, "resume", "first", "steps=60", "attach=true", timeout=600)
    assert "resumed from the checkpoint of step 40" in again.stdout, again.stdout + again.stderr


@pytest.mark.parametrize("index", [0, 1])
def test_a_killed_pod_is_replaced(cluster: Cluster, folder: Path, index: int) -> None:
    with running(cluster, folder, f"kill-{index}") as job:
        killed = cluster.node(job, index)
        cluster.kill(killed)
        job.until_advanced(job.rounds() + 1)
        assert cluster.node(job, index).metadata.uid != killed.metadata.uid
        assert job.run.last_attempt() <= 0  # the attempt goes on


def test_a_crashed_coordinator_adopts_the_round(cluster: Cluster, folder: Path) -> None:
    """Memory that runs out kills all processes of a container at once (cgroup v2), as kill -9 on its machine does."""
    with running(cluster, folder, "coordinator") as job:
        (coordinator,) = cluster.pods(job, COORDINATOR)
        fill = ["python", "-c", "held = []\nwhile True: held.append(b'x' * 10**7)"]
        with suppress(client.ApiException, OSError):
            api = client.CoreV1Api().connect_get_namespaced_pod_exec
            stream(api, coordinator.metadata.name, cluster.namespace, command=fill, stdout=True, _request_timeout=60)
        job.until_true(lambda: bool(job.events("adopted")), "the round is adopted")
        assert job.rounds() == 1


def test_a_coordinator_that_is_deleted_by_force_costs_no_step(cluster: Cluster, folder: Path) -> None:
    """A real kubelet sends SIGTERM all the same, and kills after 2 s: the round restarts from what was saved."""
    with running(cluster, folder, "forced") as job:
        (coordinator,) = cluster.pods(job, COORDINATOR)
        cluster.kill(coordinator)
        job.until_advanced(2)
        steps = [m["step"] for m in job.metrics()]
        assert len(steps) == len(set(steps)), "a step was done twice"


def test_a_deleted_coordinator_saves_and_the_next_attempt_resumes(cluster: Cluster, folder: Path) -> None:
    with running(cluster, folder, "deleted") as job:
        (coordinator,) = cluster.pods(job, COORDINATOR)
        cluster.delete(coordinator)
        job.until_advanced(2)
        verdict = Verdict.read(job.run, 0)
        assert verdict is not None and verdict.verdict == "preempted"
        assert f"saved at step {job.events('resumed')[-1]['step']}" in verdict.reason


def test_a_drained_machine_is_a_collective_save(cluster: Cluster, folder: Path) -> None:
    with running(cluster, folder, "drain") as job:
        machine = cluster.node(job, 1).spec.node_name
        rounds = job.rounds()
        with cluster.drained(machine):
            job.until_advanced(rounds + 1)
            assert machine not in job.events("round_started")[-1]["hosts"]
        resumed = job.events("resumed")[-1]
        saved = [e["step"] for e in job.events("checkpoint") if e["time"] < resumed["time"]]
        assert resumed["step"] == saved[-1]


def test_preemption_by_priority_is_a_collective_save(cluster: Cluster, folder: Path) -> None:
    scheduling = client.SchedulingV1Api()
    low, high = f"{cluster.namespace}-low", f"{cluster.namespace}-high"
    for name, value in ((low, 10), (high, 1000)):
        scheduling.create_priority_class({"metadata": {"name": name}, "value": value})
    try:
        with running(cluster, folder, "preempt", f"cluster.priority_class={low}") as job:
            machine = cluster.node(job, 1).spec.node_name
            _crowd_out(cluster, machine, high)
            job.until_true(lambda: bool(job.events("round_broken") or job.events("stop_requested")), "the notice")
            cluster.core.delete_namespaced_pod("crowd", cluster.namespace, grace_period_seconds=0)
            job.until_advanced(2)
            resumed = job.events("resumed")[-1]
            assert resumed["step"] == [e["step"] for e in job.events("checkpoint") if e["time"] < resumed["time"]][-1]
    finally:
        for name in (low, high):
            scheduling.delete_priority_class(name)


def _free_cores(cluster: Cluster, machine: str) -> float:
    """CPUs of a machine that pods of other namespaces have left."""
    pods = cluster.core.list_pod_for_all_namespaces(field_selector=f"spec.nodeName={machine}").items
    others = [p for p in pods if p.metadata.namespace != cluster.namespace and p.status.phase == "Running"]
    asked = [c.resources.requests or {} for p in others for c in p.spec.containers if c.resources is not None]
    allocatable = _cores(cluster.core.read_node(machine).status.allocatable["cpu"])
    return allocatable - sum(_cores(requests.get("cpu", "0")) for requests in asked)


def _crowd_out(cluster: Cluster, machine: str, priority_class: str) -> None:
    """A pod that takes all of a machine's free CPUs."""
    container = {
        "name": "crowd",
        "image": IMAGE,
        "command": ["sleep", "600"],
        "resources": {"requests": {"cpu": f"{int(1000 * _free_cores(cluster, machine)) - 50}m"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    security = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {
        "priorityClassName": priority_class,
        "nodeSelector": {"kubernetes.io/hostname": machine},
        "securityContext": security,
        "containers": [container],
    }
    cluster.core.create_namespaced_pod(cluster.namespace, {"metadata": {"name": "crowd"}, "spec": spec})


def _cores(quantity: str) -> float:
    return float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)


def test_a_users_error_fails_the_job(cluster: Cluster, folder: Path) -> None:
    more = ("data=tokens", "data.vocab_size=256", "data.path=/runs/no-such-file.bin", "steps=10")
    done = cli(folder, "name=bad", *overrides(cluster, *more), timeout=600)
    assert done.returncode == 1 and "no-such-file.bin" in done.stdout, done.stdout + done.stderr
    app = Submitted(folder, "bad").run.read_job()["handle"].rpartition(":")[2]

    def failed() -> list[str]:
        root = cluster.batch.read_namespaced_job(app, cluster.namespace)
        return [c.reason for c in root.status.conditions or [] if c.type == "Failed"]

    _until(lambda: failed() == ["PodFailurePolicy"], "the Job fails")


def test_cancel_saves_first(cluster: Cluster, folder: Path) -> None:
    with running(cluster, folder, "cancel") as job:
        stopped = cli(folder, "cancel", "cancel", timeout=300)
        assert stopped.returncode == 0 and "cancelled; saved at step" in stopped.stdout, stopped.stdout + stopped.stderr
        assert "cancel stopped" in stopped.stdout
        job.until(lambda: not cluster.pods(job, TRAINER), "the nodes are let go")


def test_an_elastic_job_starts_with_what_finds_a_place_and_grows(cluster: Cluster, folder: Path) -> None:
    names = [n.metadata.name for n in cluster.core.list_node().items if not n.spec.taints]
    cores = 0.6 * min(_free_cores(cluster, name) for name in names)  # of two such pods, a machine takes one
    more = ("nodes=1:2", f"cluster.cpus={int(1000 * cores)}m", "elastic.join_window_s=5")
    for name in names[1:]:
        cluster.core.patch_node(name, {"spec": {"unschedulable": True}})
    try:
        with running(cluster, folder, "elastic", *more) as job:
            assert len(job.events("round_started")[0]["nodes"]) == 1
            for name in names[1:]:
                cluster.core.patch_node(name, {"spec": {"unschedulable": False}})
            job.until_true(lambda: len(job.events("round_started")[-1]["nodes"]) == 2, "the second node joins")
            job.until_advanced(2)
    finally:
        for name in names[1:]:
            cluster.core.patch_node(name, {"spec": {"unschedulable": False}})


def test_what_hinders_a_job_is_said(cluster: Cluster, folder: Path) -> None:
    refused = cli(folder, "name=claim", *overrides(cluster, "cluster.claim=nope"))
    assert refused.returncode == 2 and "there is no such claim" in refused.stdout + refused.stderr
    for name, override, word in (
        ("image", "cluster.image=registry.invalid/none:1", "registry.invalid/none:1"),
        ("place", "cluster.cpus=4000", "cannot be scheduled"),
    ):
        done = cli(folder, f"name={name}", *overrides(cluster, override), "attach=false")
        assert done.returncode == 0, done.stdout + done.stderr
        job = Submitted(folder, name)
        job.until_true(lambda j=job, w=word: any(w in e["why"] for e in j.events("waiting")), word)  # type: ignore[misc]
        assert cli(folder, "cancel", name).returncode == 0


@pytest.mark.parametrize(("workload", "group"), [("jobset", "jobset.x-k8s.io"), ("volcano", "batch.volcano.sh")])
def test_other_workloads_train(cluster: Cluster, folder: Path, workload: str, group: str) -> None:
    more = (f"cluster.workload={workload}", "steps=30")
    done = cli(folder, f"name=on-{workload}", *overrides(cluster, *more), timeout=600)
    if cluster.knows(group):
        assert done.returncode == 0 and f"on-{workload}: done" in done.stdout, done.stdout + done.stderr
    else:
        assert done.returncode == 2 and "cluster.workload=job" in done.stdout + done.stderr


def test_kueue_holds_the_second_job_until_the_first_has_ended(cluster: Cluster, folder: Path) -> None:
    if not cluster.knows("kueue.x-k8s.io"):
        done = cli(folder, "name=queue", *overrides(cluster, "cluster.queue=q"))
        assert done.returncode == 2 and "Kueue is not installed" in done.stdout + done.stderr
        return
    with _queue(cluster, cpus="1") as queue:
        more = (f"cluster.queue={queue}", "cluster.cpus=300m")
        with running(cluster, folder, "kueue-1", *more) as first:
            done = cli(folder, "name=kueue-2", *overrides(cluster, *more, "steps=20"), "attach=false")
            assert done.returncode == 0, done.stdout + done.stderr
            second = Submitted(folder, "kueue-2")
            second.until_true(lambda: any("waits in queue" in e["why"] for e in second.events("waiting")), "the reason")
            assert cli(folder, "cancel", first.run.name, timeout=300).returncode == 0
            second.until_true(lambda: second.run.verdict(0).exists(), "the second job's end", seconds=300)


@contextmanager
def _queue(cluster: Cluster, cpus: str) -> Iterator[str]:
    custom = client.CustomObjectsApi()
    version = next(
        g for g in client.ApisApi().get_api_versions().groups if g.name == "kueue.x-k8s.io"
    ).preferred_version
    group, name = ("kueue.x-k8s.io", version.version), cluster.namespace
    quotas = [{"name": "cpu", "nominalQuota": cpus}, {"name": "memory", "nominalQuota": "100Gi"}]
    resources = {"coveredResources": ["cpu", "memory"], "flavors": [{"name": name, "resources": quotas}]}
    kinds = {
        "resourceflavors": {"kind": "ResourceFlavor"},
        "clusterqueues": {"kind": "ClusterQueue", "spec": {"namespaceSelector": {}, "resourceGroups": [resources]}},
    }
    for plural, body in kinds.items():
        full = {"apiVersion": "/".join(group), "metadata": {"name": name}, **body}
        custom.create_cluster_custom_object(*group, plural, full)
    local = {
        "apiVersion": "/".join(group),
        "kind": "LocalQueue",
        "metadata": {"name": "q"},
        "spec": {"clusterQueue": name},
    }
    custom.create_namespaced_custom_object(*group, cluster.namespace, "localqueues", local)
    try:
        yield "q"
    finally:
        custom.delete_namespaced_custom_object(*group, cluster.namespace, "localqueues", "q")
        for plural in reversed(kinds):
            with suppress(client.ApiException):  # Kueue keeps a flavor until its queue has gone
                custom.delete_cluster_custom_object(*group, plural, name)


def test_the_submitters_role_is_enough_and_says_what_is_missing(cluster: Cluster, folder: Path) -> None:
    role = next(b for b in yaml.safe_load_all((SPECS / "base" / "rbac.yaml").read_text()) if b["kind"] == "Role")
    rbac = client.RbacAuthorizationV1Api()
    rbac.create_namespaced_role(cluster.namespace, role)
    for account in ("submitter", "nobody"):
        cluster.core.create_namespaced_service_account(cluster.namespace, {"metadata": {"name": account}})
    subject = {"kind": "ServiceAccount", "name": "submitter", "namespace": cluster.namespace}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role["metadata"]["name"]}
    rbac.create_namespaced_role_binding(
        cluster.namespace, {"metadata": {"name": "submitter"}, "roleRef": reference, "subjects": [subject]}
    )
    shown = cli(folder, "name=as", *overrides(cluster), "dry_run=true", KUBECONFIG=_as(cluster, folder, "submitter"))
    assert shown.returncode == 0, shown.stdout + shown.stderr
    refused = cli(folder, "name=as", *overrides(cluster), "dry_run=true", KUBECONFIG=_as(cluster, folder, "nobody"))
    assert refused.returncode == 2 and "you may not create jobs.batch" in refused.stdout + refused.stderr


def _as(cluster: Cluster, folder: Path, account: str) -> str:
    """A kubeconfig with a service account's token."""
    request = {"spec": {"expirationSeconds": 3600}}
    token = cluster.core.create_namespaced_service_account_token(account, cluster.namespace, request).status.token
    content = yaml.safe_load(Path(KUBECONFIG).read_text())
    content["users"] = [{"name": u["name"], "user": {"token": token}} for u in content["users"]]
    file = folder / f"{account}.kubeconfig"
    file.write_text(json.dumps(content))
    return str(file)
