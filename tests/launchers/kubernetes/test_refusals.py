"""What a user is told when the cluster, simulated by its API alone, would not take a job or does not run its pods."""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from torchx.specs import AppState

from fsdp_jobs import Job as NotebookJob
from fsdp_jobs.cli.main import main
from fsdp_jobs.config.errors import BadInput, JobFailed
from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.control.placement import ConnectedAgent, RoundPlanner, known_places
from fsdp_jobs.launchers.kubernetes import scheduler
from fsdp_jobs.launchers.kubernetes.scheduler import KubernetesLauncher
from fsdp_jobs.plan.plan import Plan
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import try_lock, write_atomic
from fsdp_jobs.run.processes import free_port
from fsdp_jobs.run.state import State
from fsdp_jobs.run.status import RunStatus
from fsdp_jobs.run.verdict import Verdict
from fsdp_jobs.submit import submit as submission
from fsdp_jobs.submit.submitted import describe
from tests.jobs import cli
from tests.launchers.kubernetes.simulated_api import TOKEN, Object, Refused, SimulatedApi, now

JOB = ("cluster=kubernetes", "cluster.image=registry.example/fsdp-jobs:1", "cluster.claim=runs", "name=x")
JOB_NAME = "batch.kubernetes.io/job-name"


def refused(*overrides: str) -> str:
    with pytest.raises(BadInput) as raised:
        submission.prepare([compose_job([*JOB, *overrides])])
    return str(raised.value)


def said_by(*args: str) -> str:
    done = cli(Path.cwd(), *args, XDG_STATE_HOME=os.environ["XDG_STATE_HOME"])
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def _deny(*pairs: tuple[str, str]) -> Callable[[SimulatedApi], Any]:
    return lambda api: api.denied.update(pairs)


def _refuse(kind: str, message: str) -> Callable[[SimulatedApi], Any]:
    def set_up(api: SimulatedApi) -> None:
        api.refuse = lambda body: Refused(403, message) if body["kind"] == kind else None

    return set_up


def _read_only_claim(api: SimulatedApi) -> None:
    api.objects["/persistentvolumeclaims", "runs"]["spec"]["accessModes"] = ["ReadOnlyMany"]


def _claim_of_one_pod(api: SimulatedApi) -> None:
    api.objects["/persistentvolumeclaims", "runs"]["spec"]["accessModes"] = ["ReadWriteOncePod"]


def _kueue(api: SimulatedApi) -> None:
    api.groups["kueue.x-k8s.io"] = "v1beta2"
    api.put("kueue.x-k8s.io", "localqueues", {"kind": "LocalQueue", "metadata": {"name": "research"}})


def _volcano(api: SimulatedApi) -> None:
    api.groups["batch.volcano.sh"] = "v1alpha1"
    _refuse("Pod", 'pods "x" is forbidden: violates PodSecurity "restricted:latest": hostNetwork')(api)


CASES: dict[str, tuple[Callable[[SimulatedApi], Any], list[str], list[str]]] = {
    "no image": (lambda _: None, ["cluster.image=null"], ["cluster.image", "build deploy/Dockerfile"]),
    "no claim given": (lambda _: None, ["cluster.claim=null"], ["cluster.claim", "deploy/kubernetes/base/claim.yaml"]),
    "workload": (lambda _: None, ["cluster.workload=jobsets"], ["did you mean jobset?"]),
    "secret by value": (lambda _: None, ["cluster.secret_env.A=hunter2"], ["not the key of a secret"]),
    "tolerations": (
        lambda _: None,
        ["cluster.tolerations=[nvidia.com/gpu]", "cluster.pod_patch={tolerations: null, containers: [{image: x}]}"],
        ["cluster.tolerations=['nvidia.com/gpu']: is not", "pod_patch.tolerations=None", "[{name: trainer, ...}]"],
    ),
    "kueue's label": (
        lambda _: None,
        ["cluster.labels={kueue.x-k8s.io/queue-name: q}"],
        ["Kueue would not admit the job as a whole", "cluster.queue=q"],
    ),
    "context": (lambda _: None, ["cluster.context=prod"], ["the kubeconfig has only test"]),
    "namespace": (lambda _: None, ["cluster.namespace=nowhere"], ["cluster.namespace=nowhere: there is no such"]),
    "token": (lambda api: setattr(api, "token", "another"), [], ["the token is wrong or has expired", "log in again"]),
    "permissions": (
        _deny(("create", "jobs"), ("get", "pods/log")),
        [],
        ["you may not create jobs.batch", "you may not get pods/log", "rbac.yaml"],
    ),
    "claim": (lambda _: None, ["cluster.claim=nope"], ["cluster.claim=nope: there is no such claim in namespace team"]),
    "claim's mode": (_read_only_claim, [], ["ReadOnlyMany only", "ReadWriteMany"]),
    "claim of one pod": (_claim_of_one_pod, ["nodes=1"], ["ReadWriteOncePod only", "ReadWriteMany"]),
    "jobset": (lambda _: None, ["cluster.workload=jobset"], ["no JobSet.jobset.x-k8s.io", "cluster.workload=job"]),
    "volcano": (lambda _: None, ["cluster.workload=volcano"], ["no Job.batch.volcano.sh", "cluster.workload=job"]),
    "kueue": (lambda _: None, ["cluster.queue=research"], ["Kueue is not installed", "leave cluster.queue out"]),
    "pods of volcano": (
        _volcano,
        ["cluster.workload=volcano", "nodes=20"],
        ['violates PodSecurity "restricted:latest": hostNetwork', "cluster.pod_patch"],
    ),
    "queue": (_kueue, ["cluster.queue=reserch"], ["team has the queues research", "did you mean research?"]),
    "quota": (
        _refuse("Pod", 'pods "x" is forbidden: exceeded quota: gpus, requested: cpu=64, used: cpu=0, limited: cpu=8'),
        [],
        ["exceeded quota: gpus", "fewer nodes"],
    ),
    "quota of what nothing asks for": (
        _refuse("Pod", 'pods "x" is forbidden: failed quota: disk: must specify limits.ephemeral-storage for: trainer'),
        [],
        ["must specify limits.ephemeral-storage for: trainer", "cluster.pod_patch sets it for both containers"],
    ),
    "limit range": (
        _refuse("Pod", 'pods "x" is forbidden: maximum cpu usage per Container is 2, but limit is 8'),
        [],
        ["maximum cpu usage per Container is 2", "cluster.cpus", "cluster.pod_patch"],
    ),
    "quota that is too small": (
        _refuse(
            "Pod",
            'pods "x" is forbidden: exceeded quota: g, requested: requests.memory=64Gi,requests.nvidia.com/gpu=8, '
            "used: requests.memory=1Gi,requests.nvidia.com/gpu=0, "
            "limited: requests.memory=1Ti,requests.nvidia.com/gpu=4",
        ),
        [],
        ["exceeded quota: g", "fewer nodes"],
    ),
    "a login plugin that has failed": (
        _refuse(
            "Job", 'jobs.batch is forbidden: User "system:anonymous" cannot create resource "jobs" in API group "batch"'
        ),
        [],
        ["not authenticated", "log in again"],
    ),
    "pod security": (
        _refuse("Pod", 'pods "x" is forbidden: violates PodSecurity "restricted:latest": hostNetwork'),
        ["cluster.pod_patch={hostNetwork: true}"],
        ['violates PodSecurity "restricted:latest": hostNetwork', "cluster.pod_patch"],
    ),
    "OpenShift": (
        _refuse("Pod", 'pods "x" is forbidden: unable to validate against any security context constraint: [fsGroup]'),
        [],
        ["any security context constraint: [fsGroup]", "cluster.run_as_user=null cluster.fs_group=null"],
    ),
    "quantities": (
        lambda _: None,
        ["cluster.shm=2GB", "cluster.cpus=many", "cluster.memory=1000G"],
        ["cluster.shm=2GB: is not a quantity", "cluster.cpus=many: is not", "-> 500m, 16Gi"],
    ),
    "bytes": (
        lambda _: None,
        ["cluster.memory=80", "cluster.shm=512m"],
        ["cluster.memory=80: is less than 1 MB", "cluster.shm=512m: is less", "-> 16Gi, 512Mi"],
    ),
    "an administrator's rule": (
        _refuse("Pod", 'admission webhook "policy.example" denied the request: images come from registry.example'),
        [],
        ['admission webhook "policy.example" denied the request: images come from registry.example'],
    ),
    "a namespace that is going": (
        _refuse("Job", 'jobs.batch "x" is forbidden: unable to create new content because it is being terminated'),
        [],
        ["because it is being terminated"],
    ),
    "unknown field": (
        lambda _: None,
        ["cluster.pod_patch={hostnetwork: true}"],
        ["Job x-", "hostnetwork", "cluster.pod_patch"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_job_that_the_simulated_cluster_would_not_take_is_not_submitted(api: SimulatedApi, case: str) -> None:
    set_up, overrides, words = CASES[case]
    set_up(api)
    said = refused(*overrides)
    for word in words:
        assert word in said
    assert len(said.splitlines()) <= 12
    assert ("rbac.yaml" in said) == (case == "permissions")
    assert said.count("denied the request") <= 1, "not once for each kind of pod"
    created = [r for r in api.requests if r.startswith("POST") and "dry run" not in r and "accessreviews" not in r]
    assert not created and not Path("runs").exists()


@pytest.mark.seen
def test_no_kubeconfig_and_no_cluster(api: SimulatedApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert f"KUBECONFIG={tmp_path / 'none'}: no usable kubeconfig" in refused()
    nobody = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("KUBECONFIG", str(api.write_kubeconfig(tmp_path / "other", server=nobody)))
    assert f"{nobody}: the cluster's API does not answer: Failed to establish" in refused()
    assert " object at 0x" not in refused()
    monkeypatch.setenv(
        "KUBECONFIG", str(api.write_kubeconfig(tmp_path / "tls", server=api.url.replace("http", "https")))
    )
    assert "the cluster's API does not answer: [SSL: WRONG_VERSION_NUMBER]" in refused()
    (tmp_path / "other").write_text("hello")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "other"))
    assert f"KUBECONFIG={tmp_path / 'other'}: no usable kubeconfig: not a mapping" in refused()


@pytest.mark.parametrize(
    ("instead", "words"),
    [
        ((200, "<html>Log in</html>", 0), "what answers is not Kubernetes: <html>Log in</html>"),
        ((200, "[]", 0), "what answers is not Kubernetes: []"),
        ((200, "{}", 0), "what answers is not Kubernetes: {}"),
        ((200, '{"kind": "APIGroupList"}', 10), "IncompleteRead(14 bytes read"),
        ((502, '"bad gateway"', 0), "502 Bad Gateway"),
    ],
)
def test_what_is_no_answer_of_kubernetes(
    api: SimulatedApi, monkeypatch: pytest.MonkeyPatch, instead: tuple[int, str, int], words: str
) -> None:
    (handle,) = submission.submit(submission.prepare([compose_job(JOB)]), [JOB])
    monkeypatch.setattr(scheduler, "_RETRIED_FOR_S", 0)
    api.instead = instead
    assert words in refused("name=y")
    described = describe([handle])[handle]
    assert described.state is State.SILENT and words in described.message


def test_a_busy_api_is_asked_again_and_takes_each_object_once(
    api: SimulatedApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned_away: set[str] = set()

    def first_time(body: Object) -> Refused | None:
        name = f"{body['kind']} {body['metadata']['name']}"
        known = name in turned_away
        turned_away.add(name)
        return None if known else Refused(429, "too many requests, please try again later")

    monkeypatch.setattr("fsdp_jobs.launchers.kubernetes.api._RETRY_S", 0.01)
    api.refuse = first_time
    jobs = submission.prepare([compose_job(JOB)])
    turned_away.clear()
    submission.submit(jobs, [JOB])
    assert len(api.all("batch", "jobs")) == sum(name.startswith("Job ") for name in turned_away) > 1
    monkeypatch.setattr("fsdp_jobs.launchers.kubernetes.api._THROTTLED_FOR_S", 0.1)
    api.refuse = lambda _: Refused(429, "too many requests, please try again later")
    assert "too many requests" in refused("name=y")


def test_a_submission_asks_little_one_after_the_other_and_logs_in_once(
    api: SimulatedApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    credential = {"kind": "ExecCredential", "apiVersion": "client.authentication.k8s.io/v1", "status": {"token": TOKEN}}
    plugin = tmp_path / "login"  # as of every cloud; it takes a second there
    plugin.write_text(f"#!/bin/sh\necho >> {tmp_path}/logins\necho '{json.dumps(credential)}'\n")
    plugin.chmod(0o755)
    kubeconfig = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
    called = {"apiVersion": credential["apiVersion"], "command": str(plugin), "interactiveMode": "Never"}
    kubeconfig["users"] = [{"name": "test", "user": {"exec": called}}]
    Path(os.environ["KUBECONFIG"]).write_text(yaml.safe_dump(kubeconfig))
    api.latency_s = 0.05
    submission.submit(submission.prepare([compose_job(JOB)]), [JOB])
    assert len((tmp_path / "logins").read_text().splitlines()) == 1
    assert len(api.requests) == 27 and api.in_sequence() <= 14, api.requests  # 10 on a machine that does nothing else


@pytest.mark.parametrize(
    "more", [[], ["cluster.queue=research"], ["cluster.namespace=team", "nodes=2:4"], ["cluster.workload=jobset"]]
)
def test_manifests_on_stdout_are_what_the_simulated_api_gets(
    api: SimulatedApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    """With the cluster at hand, and without; but for owners, which have ids in a cluster only."""
    monkeypatch.setattr(submission, "new_submission", lambda: "261122210000-0a1b2c")
    monkeypatch.setattr("secrets.token_hex", lambda size: "0f" * size)
    _kueue(api)
    api.groups["jobset.x-k8s.io"] = "v1alpha2"
    if has_labels := "nodes=2:4" in more:
        for name in ("m1", "m2", "m3", "m4"):
            labels = {"network.topology.nvidia.com/leaf": "leaf1"}
            machine = api.put("", "nodes", {"metadata": {"name": name, "labels": labels}})
            machine["status"] = {"allocatable": {"nvidia.com/gpu": "8"}}
    before, job = set(api.objects), [*JOB, *more, "attach=false"]

    def printed() -> dict[str, Object]:
        assert main([*job, "dry_run=true", "--output", "yaml"]) == 0
        said = capsys.readouterr()
        assert "dry run: nothing was submitted" in said.err and "FITS" in said.err
        assert ("not checked: permissions" in said.err) == (os.environ["KUBECONFIG"] == "/nowhere")
        return {f"{body['kind']} {body['metadata']['name']}": body for body in yaml.safe_load_all(said.out)}

    shown = printed()
    with monkeypatch.context() as away:
        away.setenv("KUBECONFIG", "/nowhere")
        rendered = printed()
    assert not Path("runs").exists() and set(api.objects) == before
    assert main(job) == 0
    created = {}
    for key in set(api.objects) - before:
        body = copy.deepcopy(api.objects[key])
        created[f"{body['kind']} {body['metadata']['name']}"] = body
        for of_the_server in ("uid", "creationTimestamp", "ownerReferences", *(() if has_labels else ("namespace",))):
            body["metadata"].pop(of_the_server, None)
        del body["status"]
    assert shown == created
    carried = shown["ConfigMap x-0a1b2c-files"]["data"]
    assert rendered == shown if not has_labels else json.loads(carried["node-labels.json"])["m4"] == labels
    root = next(body for body in shown.values() if body["metadata"]["name"] == "x-0a1b2c")
    assert root["spec"]["suspend"] is ("cluster.queue=research" in more)
    assert [*shown][:2] == ["ConfigMap x-0a1b2c-files", "Secret x-0a1b2c-files"], "in this order kubectl creates them"


def test_what_was_created_is_deleted_when_a_part_is_refused_after_all(api: SimulatedApi) -> None:
    (job,) = submission.prepare([compose_job(JOB)])
    api.refuse = lambda body: (
        Refused(403, "x is forbidden: exceeded quota: count") if body["kind"] == "Secret" else None
    )
    with pytest.raises(BadInput, match="exceeded quota: count"):
        submission.submit([job], [JOB])
    assert {kind for kind, _ in api.objects} == {"/persistentvolumeclaims"}
    assert not job.run.job.exists()


def test_a_job_waits_for_a_quota_that_others_use_now(api: SimulatedApi, caplog: pytest.LogCaptureFixture) -> None:
    """A Job's controller tries to create pods again; one that would fit into the empty quota starts later."""
    said = "requested: limits.cpu=64,requests.nvidia.com/gpu=8, used: limits.cpu=1,requests.nvidia.com/gpu=8, "
    said += "limited: limits.cpu=1k,requests.nvidia.com/gpu=8"
    _refuse("Pod", f'pods "x" is forbidden: exceeded quota: gpus, {said}')(api)
    submission.submit(submission.prepare([compose_job(JOB)]), [JOB])
    assert len(api.all("batch", "jobs")) == 2
    assert "pods wait until others of the namespace have ended: exceeded quota: gpus, requested" in caplog.text


def test_a_webhook_that_takes_no_dry_runs_keeps_no_job_out(api: SimulatedApi) -> None:
    api.refuse = lambda _: Refused(400, 'admission webhook "inject.example" does not support dry run')
    assert submission.prepare([compose_job(JOB)])[0].request.objects


def test_a_cluster_that_drops_what_elastic_jobs_need_is_said_to_be_too_old(
    api: SimulatedApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes 1.30 knows the field, and drops it without a word."""
    create = api._create

    def drops(group: str, plural: str, query: dict[str, str], body: Object) -> tuple[int, Object]:
        body.get("spec", {}).pop("successPolicy", None)
        return create(group, plural, query, body)

    monkeypatch.setattr(api, "_create", drops)
    said = refused("nodes=2:4")
    assert "Job x-" in said and "drops its successPolicy" in said and "1.31 or newer" in said
    assert submission.prepare([compose_job([*JOB, "nodes=2"])])


def test_a_user_who_may_not_list_events_submits_and_asks_all_the_same(api: SimulatedApi) -> None:
    api.denied.add(("list", "events"))
    (handle,) = submission.submit(submission.prepare([compose_job(JOB)]), [JOB])
    name = handle.rpartition(":")[2]
    labels = {"app.kubernetes.io/instance": name, "fsdp-jobs/role": "trainer", JOB_NAME: f"{name}-node"}
    api.put("", "pods", {"metadata": {"name": "p", "labels": labels}, "spec": {}})["status"] = {"phase": "Pending"}
    assert describe([handle])[handle].state is State.QUEUED


def test_a_quota_that_counts_objects_and_was_updated_meanwhile_is_asked_again(
    api: SimulatedApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quotas count what is created at the same time; the server turns away what it could not count."""
    turned_away: set[str] = set()

    def first_time(body: Object) -> Refused | None:
        if body["kind"] not in ("Service", "ConfigMap", "Secret") or body["kind"] in turned_away:
            return None
        turned_away.add(body["kind"])
        words = 'Operation cannot be fulfilled on resourcequotas "count": the object has been modified; '
        return Refused(409, f"{words}please apply your changes to the latest version and try again")

    monkeypatch.setattr("fsdp_jobs.launchers.kubernetes.api._RETRY_S", 0.01)
    jobs = submission.prepare([compose_job(JOB)])
    api.refuse = first_time
    submission.submit(jobs, [JOB])
    assert len(turned_away) == 3 and len(api.all("", "secrets")) == 1


def test_a_queue_that_the_user_may_not_list_is_taken_as_given(api: SimulatedApi) -> None:
    _kueue(api)
    api.denied |= {("list", "localqueues"), ("list", "workloads")}
    submission.submit(submission.prepare([compose_job([*JOB, "cluster.queue=research"])]), [JOB])
    assert all(job["spec"]["suspend"] for job in api.all("batch", "jobs"))


def test_a_job_in_the_default_queue_of_its_namespace_is_started_by_the_queue(
    api: SimulatedApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kueue's webhook puts Jobs that name no queue into the LocalQueue `default`, if the namespace has one."""

    def put_into_queue(body: Object) -> None:
        if body["kind"] == "Job":
            body["metadata"].setdefault("labels", {})["kueue.x-k8s.io/queue-name"] = "default"
            body["spec"]["suspend"] = True

    api.refuse = put_into_queue  # type: ignore[assignment]
    (job,) = submission.prepare([compose_job(JOB)])
    (handle,) = submission.submit([job], [JOB])
    assert all(body["spec"]["suspend"] is True for body in api.all("batch", "jobs"))
    described = describe([handle])[handle]
    assert (described.state, described.message) == (State.QUEUED, "waits in queue default")
    assert KubernetesLauncher().find([job.run]) == [handle.rpartition("/")[2]]
    assert len(api.all("batch", "jobs")) == 2, "a job that waits is complete"


def test_clusters_behind_one_server_are_told_apart(api: SimulatedApi) -> None:
    """As Rancher's, which serves each cluster under a path."""
    (handle,) = submission.submit(submission.prepare([compose_job(JOB)]), [JOB])
    file = Path(os.environ["KUBECONFIG"])
    api.write_kubeconfig(file, server=f"{api.url}/k8s/clusters/c-2")
    assert describe([handle])[handle].state is State.SILENT


def test_without_permission_to_create_pods_the_job_is_checked_all_the_same(api: SimulatedApi) -> None:
    api.denied.add(("create", "pods"))
    assert submission.prepare([compose_job(JOB)])[0].request.objects


@pytest.mark.seen
def test_a_jobset_is_started_when_all_of_it_is_there(api: SimulatedApi) -> None:
    api.groups["jobset.x-k8s.io"] = "v1alpha2"
    overrides = [*JOB, "cluster.workload=jobset"]
    submission.submit(submission.prepare([compose_job(overrides)]), [overrides])
    (root,) = api.all("jobset.x-k8s.io", "jobsets")
    assert root["spec"]["suspend"] is False
    assert len([r for r in api.requests if r.startswith("PATCH")]) == 1


@pytest.mark.parametrize("missing", ["", "configmaps", "secrets"])
@pytest.mark.parametrize("workload", ["jobset", "volcano"])
def test_a_submission_that_is_killed_before_its_files_are_there_leaves_no_job(
    api: SimulatedApi, workload: str, missing: str
) -> None:
    """Its pods would wait for their volumes for ever. A queued JobSet is suspended anyway, a Volcano job never."""
    _kueue(api)
    api.groups |= {"jobset.x-k8s.io": "v1alpha2", "batch.volcano.sh": "v1alpha1"}
    overrides = [*JOB, f"cluster.workload={workload}", "cluster.queue=research"]
    (job,) = submission.prepare([compose_job(overrides)])
    (handle,) = submission.submit([job], [overrides])
    for body in api.all("", missing):
        api.remove(body)
    assert KubernetesLauncher().find([job.run]) == [None if missing else handle.rpartition("/")[2]]
    roots = [*api.all("jobset.x-k8s.io", "jobsets"), *api.all("batch.volcano.sh", "jobs")]
    assert len(roots) == (0 if missing else 1)


def test_without_a_place_to_remember_it_nothing_is_submitted(
    api: SimulatedApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a home that is read-only or full: the job ran, and could be neither found nor cancelled."""
    (tmp_path / "closed").write_text("no folder can be made in it")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "closed"))
    with pytest.raises(BadInput, match="XDG_STATE_HOME=FOLDER"):
        submission.submit(submission.prepare([compose_job(JOB)]), [JOB])
    assert not api.all("batch", "jobs") and not RunDir("runs/x").job.exists()


def agent_on(node: int, host: str) -> ConnectedAgent:
    told = {"send": lambda _: None, "drop": lambda: None, "heard": 0.0}
    return ConnectedAgent(0, node, host, host, nproc=8, switches=(), copies=0, id=host, **told)  # type: ignore[arg-type]


class TestMachines:
    """The machines' labels name switches, where the user may list nodes."""

    LEAF, SPINE = "network.topology.nvidia.com/leaf", "network.topology.nvidia.com/spine"

    @pytest.fixture(autouse=True)
    def machines(self, api: SimulatedApi) -> None:
        for number in range(6):
            labels = {self.LEAF: f"leaf{number % 2}", self.SPINE: "spine", "pool": "a", "kubernetes.io/os": "linux"}
            gpus = {"nvidia.com/gpu": "8" if number < 5 else "4"}
            body = {"metadata": {"name": f"m{number}", "labels": labels}}
            api.put("", "nodes", body)["status"] = {"allocatable": gpus}
        api.put("", "nodes", {"metadata": {"name": "control", "labels": {"pool": "b"}}})

    def plan(self, *overrides: str) -> Plan:
        return submission.plan_of(compose_job([*JOB, "hardware=h100", *overrides]))[0]

    @pytest.mark.seen
    def test_the_plan_knows_the_switches(self, api: SimulatedApi) -> None:
        plan = self.plan("nodes=4")
        assert plan.nodes == ("m0", "m2", "m4", "m1") and plan.leaves == ("leaf0",) * 3 + ("leaf1",)
        assert self.plan("nodes=4", "cluster.node_selector={pool: a}").nodes == plan.nodes
        no_machine = self.plan("nodes=4", "cluster.node_selector={pool: c}")
        assert set(no_machine.leaves) == {""} and set(self.plan("nodes=6").leaves) == {""}  # the sixth is too small

    def test_a_notebook_plans_with_the_switches_of_now(self, api: SimulatedApi) -> None:
        job = NotebookJob(*JOB, "hardware=h100", "nodes=2")
        assert job.plan().leaves == ("leaf0", "leaf0")
        for number in range(5):
            labels = {self.LEAF: "moved", self.SPINE: "spine"}
            machine = api.put("", "nodes", {"metadata": {"name": f"m{number}", "labels": labels}})
            machine["status"] = {"allocatable": {"nvidia.com/gpu": "8"}}
        assert job.plan().leaves == ("moved", "moved")

    @pytest.mark.seen
    def test_the_plan_and_the_order_of_ranks_are_those_of_a_topology_file(
        self, api: SimulatedApi, tmp_path: Path
    ) -> None:
        file = tmp_path / "topology.yaml"
        file.write_text("switches: {spine: {leaf0: [m0, m2, m4], leaf1: [m1, m3, m5]}}")
        pairs = ("nodes=4", "fsdp=hybrid_shard", "fsdp.shard_group=16")
        by_labels, by_file = self.plan(*pairs), self.plan(*pairs, f"cluster.topology={file}")
        assert by_labels == by_file
        orders = []
        for source in ((), (f"cluster.topology={file}",)):
            overrides = [*JOB, f"name=x{len(source)}", "hardware=h100", *pairs, *source]
            (job,) = submission.prepare([compose_job(overrides)])
            submission.submit([job], [overrides])
            planner = RoundPlanner(job.config, job.run)
            while (plan := planner.plan([agent_on(n, f"m{n + 1}") for n in range(4)], 16)) is None:
                time.sleep(0.01)
            orders.append((plan.nodes, plan.crossing))
        assert orders == 2 * [(("m2/1", "m4/3", "m1/0", "m3/2"), 0)]

    def test_the_job_takes_them_along(self, api: SimulatedApi) -> None:
        overrides = [*JOB, "hardware=h100", "nodes=2"]
        (job,) = submission.prepare([compose_job(overrides)])
        submission.submit([job], [overrides])
        (carried,) = api.all("", "configmaps")
        assert json.loads(carried["data"]["node-labels.json"])["m0"] == {self.LEAF: "leaf0", self.SPINE: "spine"}
        places = known_places(job.run)
        assert len([r for r in api.requests if r.startswith("GET /api/v1/nodes")]) == 1
        assert places["m3"].switch_path == ("spine", "leaf1") and set(places) == {"m0", "m1", "m2", "m3", "m4"}

    def test_who_may_not_list_nodes_submits_all_the_same(
        self, api: SimulatedApi, caplog: pytest.LogCaptureFixture
    ) -> None:
        api.denied.add(("list", "nodes"))
        assert set(self.plan("nodes=4").leaves) == {""}
        self.plan("nodes=4")
        (warning,) = caplog.messages
        assert "you may not list the cluster's nodes" in warning and "deploy/kubernetes/nodes.yaml" in warning
        overrides = [*JOB, "nodes=2"]
        (job,) = submission.prepare([compose_job(overrides)])
        submission.submit([job], [overrides])
        assert not job.run.node_labels.exists() and known_places(job.run) == {}

    def test_doctor_says_what_a_job_needs(self, api: SimulatedApi) -> None:
        def examined(*overrides: str) -> dict[str, str]:
            return {f.what: f.state for f in KubernetesLauncher().examine(compose_job([*JOB, *overrides]))}

        areas = ("configuration", "API", "permissions", "operators", "claim, queue", "switches")
        assert examined() == dict.fromkeys(areas, "ok")
        api.put("networking.k8s.io", "networkpolicies", {"metadata": {"name": "deny-all"}})
        assert examined()["network"] == "warning"
        api.put("networking.k8s.io", "networkpolicies", {"metadata": {"name": "fsdp-jobs"}})
        assert examined() == dict.fromkeys(areas, "ok")
        api.denied |= {("list", "nodes"), ("create", "jobs")}
        worse = examined("cluster.image=null", "cluster.queue=research")
        bad = {"configuration": "bad", "API": "ok", "permissions": "bad", "operators": "bad", "switches": "warning"}
        assert worse == bad
        api.token = "another"
        assert examined() == {"configuration": "ok", "API": "bad"}


class TestWaiting:
    """`status` says why a submitted job does not run; pods are set by hand, no process runs."""

    @pytest.fixture
    def app(self, api: SimulatedApi) -> str:
        (handle,) = submission.submit(submission.prepare([compose_job(JOB)]), [JOB])
        return handle.rpartition("/")[2]

    def put_pod(self, api: SimulatedApi, app: str, status: Object, role: str = "trainer", **metadata: Any) -> None:
        name = app.partition(":")[2]
        job = name if role == "coordinator" else f"{name}-node"
        labels = {"app.kubernetes.io/instance": name, "app.kubernetes.io/name": "fsdp-jobs"}
        labels |= {"fsdp-jobs/role": role, JOB_NAME: job}
        body = {"metadata": {"name": f"{job}-0-abcde", "labels": labels, "annotations": {}, **metadata}}
        stored = api.put("", "pods", {**body, "spec": {"nodeName": "m1"}})
        stored["status"] = status

    def said(self, app: str) -> tuple[State, str]:
        (described,) = KubernetesLauncher().describe([app])
        assert described is not None
        return described.state, described.message

    def test_how_pods_end_that_leave_no_verdict(self, api: SimulatedApi, app: str) -> None:
        """The kubelet has words of its own; of a coordinator that dies without one, it has the end of the log."""
        evicted = {"reason": "Evicted", "message": "The node was low on resource: ephemeral-storage."}
        self.put_pod(api, app, {"phase": "Failed", **evicted})
        state, why = self.said(app)
        assert state is State.QUEUED and "has failed: Evicted: The node was low on resource: ephemeral-storage" in why
        for words in ('{"event": "round_started"}', '{"event": "round_st', "{}", "[1]"):
            ended = {"name": "coordinator", "state": {"terminated": {"exitCode": 137, "message": words}}}
            self.put_pod(api, app, {"phase": "Failed", "containerStatuses": [ended]}, "coordinator")
            assert self.said(app)[0] is State.QUEUED

    @pytest.mark.parametrize(
        ("status", "words"),
        [
            (
                {
                    "conditions": [
                        {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: 3 Insufficient gpu"}
                    ]
                },
                "cannot be scheduled: 0/3 nodes: 3 Insufficient gpu",
            ),
            (
                {
                    "containerStatuses": [
                        {
                            "name": "trainer",
                            "image": "i:1",
                            "state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}},
                        }
                    ]
                },
                "cannot start: ImagePullBackOff of image i:1: not found",
            ),
            (
                {
                    "containerStatuses": [
                        {
                            "name": "trainer",
                            "image": "i:1",
                            "state": {
                                "waiting": {"reason": "CreateContainerConfigError", "message": 'secret "hub" not found'}
                            },
                        }
                    ]
                },
                'CreateContainerConfigError: secret "hub" not found',
            ),
        ],
    )
    def test_pods_that_cannot_start(self, api: SimulatedApi, app: str, status: Object, words: str) -> None:
        self.put_pod(api, app, {"phase": "Pending", **status})
        state, why = self.said(app)
        assert state is State.QUEUED and words in why
        assert self.said(app)[1] == why
        waiting = [line for line in Path("runs/x/events.jsonl").read_text().splitlines() if '"waiting"' in line]
        assert len(waiting) == 1  # said once, though asked twice

    @pytest.mark.seen
    def test_pods_that_admission_refuses(self, api: SimulatedApi, app: str) -> None:
        api.warn("Job", f"{app.partition(':')[2]}-node", "FailedCreate", "Error creating: exceeded quota: gpus")
        assert "are refused: Error creating: exceeded quota: gpus" in self.said(app)[1]

    @pytest.mark.parametrize(
        "warning", [("FailedMount", "no such host: nfs"), ("FailedCreatePodSandBox", "failed to assign an IP address")]
    )
    def test_a_claim_that_cannot_be_mounted_and_a_network_that_has_no_address(
        self, api: SimulatedApi, app: str, warning: tuple[str, str]
    ) -> None:
        self.put_pod(api, app, {"phase": "Pending", "containerStatuses": []})
        pod = f"{app.partition(':')[2]}-node-0-abcde"
        api.warn("Pod", pod, *warning)
        assert ": ".join(warning) in self.said(app)[1]
        api.warn("Pod", pod, "SandboxChanged", "Pod sandbox changed", "Normal")  # it is tried again
        assert ": ".join(warning) in self.said(app)[1]
        api.warn("Pod", pod, "Pulling", 'Pulling image "i:1"', "Normal")
        assert self.said(app)[1] == "", "it has gone: the image is on its way"

    @pytest.mark.seen
    def test_a_coordinator_on_a_lost_machine(self, api: SimulatedApi, app: str) -> None:
        """What the cluster says of it until it gives the pod up was seen on Kubernetes 1.36."""
        assert KubernetesLauncher().replace_lost(app) == ""
        running = {"containerStatuses": [{"name": "coordinator", "state": {"running": {}}}]}
        silent = {"phase": "Running", **running, "conditions": [{"type": "Ready", "status": "False"}]}
        self.put_pod(api, app, silent, "coordinator")
        state, why = self.said(app)
        assert (
            state is State.RUNNING and "machine m1 of pod" in why and "does not answer" in why and "resume" not in why
        )
        assert KubernetesLauncher().replace_lost(app) == "", "it may come back"
        held = {"deletionTimestamp": now(-90), "finalizers": ["batch.kubernetes.io/job-tracking"]}
        self.put_pod(api, app, silent, "coordinator", **held)
        assert "if it is down for good: fsdp-jobs resume x" in self.said(app)[1]
        resumed = said_by("resume", "x")
        assert "machine m1 is given up: new pods take over" in resumed
        assert not api.all("", "pods"), "the finalizer held it"

    @pytest.mark.seen
    def test_what_a_pod_waits_for_is_said_again_when_the_next_attempt_waits_for_it(
        self, api: SimulatedApi, app: str
    ) -> None:
        unscheduled = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: 3 Insufficient gpu"}
        self.put_pod(api, app, {"phase": "Pending", "conditions": [unscheduled]})
        self.put_pod(api, app, {"phase": "Running"}, "coordinator")
        run = RunDir("runs/x")
        for _ in range(2):
            assert self.said(app)[0] is State.RUNNING
            status = RunStatus(run)
            status.update()
            assert "3 Insufficient gpu" in status.reason
            events.record(run, 0, events.AttemptStarted(2))  # mirrored from the coordinator's pod

    def test_whom_the_nodes_cannot_reach_and_that_they_do_again(self, api: SimulatedApi, app: str) -> None:
        """A policy that drops packets leaves pods that run and nothing in the cluster that says why."""
        run = RunDir("runs/x")

        def reason() -> str:
            self.said(app)
            status = RunStatus(run)
            status.update()
            return status.reason

        running = {"phase": "Running", "containerStatuses": [{"name": "trainer", "state": {"running": {}}}]}
        self.put_pod(api, app, running)
        events.record(run, 0, events.AttemptStarted(2))
        assert reason() == ""
        at = "connection to the coordinator at x-0.x:29400"
        logged = [f"2026-11-23 10:01:00,000 WARNING link: no {at} since 10:00:50 UTC: timed out\n"]
        api.log_of = lambda _pod, _follow: iter([(time.time(), line.encode()) for line in logged])
        why = reason()
        assert f"-node-0-abcde: no {at} since 10:00:50 UTC: timed out" in why
        assert "deploy/kubernetes/network-policy.yaml" in why and why == reason()
        logged.append(f"2026-11-23 10:02:00,000 INFO link: again a {at}\n")
        assert reason() == ""
        reason()
        assert run.events.read_text().count('"waiting"') == 2
        events.record(run, 0, events.RoundStarted([0], ["m1"], "full_shard", 1, 1))
        del logged[1]
        assert reason() == "", "what was logged before the round"

    def end(self, api: SimulatedApi, app: str, message: str, *more: Object, ago_s: float = 0) -> None:
        """The coordinator's container ends with 1, and so its Job fails; `more` are other containers of its pod."""
        ended = {"exitCode": 1, "reason": "Error", "message": message, "finishedAt": now(-ago_s)}
        statuses = [*more, {"name": "coordinator", "state": {"terminated": ended}}]
        phase = "Running" if more else "Failed"
        self.put_pod(api, app, {"phase": phase, "containerStatuses": statuses}, "coordinator")
        root = api.objects["batch/jobs", app.partition(":")[2]]
        failed = {"type": "Failed", "status": "True", "reason": "PodFailurePolicy", "lastTransitionTime": now()}
        root["status"]["conditions"] = [failed]

    @pytest.mark.seen
    def test_the_reason_why_an_image_cannot_work_is_the_jobs(self, api: SimulatedApi, app: str) -> None:
        self.end(api, app, "Traceback (most recent call last):\nModuleNotFoundError: No module named 'fsdp_jobs'\n")
        state, why = self.said(app)
        assert state is State.FAILED and "ended with 1 (Error): ModuleNotFoundError: No module named" in why
        status = RunStatus(RunDir("runs/x"))
        status.update()
        assert status.state == "failed" and "ModuleNotFoundError" in status.reason

    @pytest.mark.seen
    def test_the_end_of_a_job_ends_pods_that_wait(self, api: SimulatedApi, app: str) -> None:
        """A Job that has failed deletes nothing that it owns, as seen on Kubernetes 1.36."""
        self.put_pod(api, app, {"phase": "Pending"})
        verdict = {"verdict": "preempted", "decision": "stop", "reason": "cancelled", "attempt": 0}
        self.end(api, app, json.dumps(verdict))
        assert self.said(app)[0] is State.STOPPED
        assert [j["metadata"]["name"] for j in api.all("batch", "jobs")] == [app.partition(":")[2]]

    def test_a_look_at_a_run_that_has_ended_ends_what_is_left_and_asks_no_more(
        self, api: SimulatedApi, app: str
    ) -> None:
        """Its record came from the pods' logs before its Jobs had ended."""
        self.put_pod(api, app, {"phase": "Pending"})
        run = RunDir("runs/x")
        run.attempt(0).mkdir(parents=True)
        Verdict("preempted", "stop", "cancelled").close(run, 0)
        verdict = {"verdict": "preempted", "decision": "stop", "reason": "cancelled", "attempt": 0}
        self.end(api, app, json.dumps(verdict))
        assert "stopped" in said_by("status", "x")
        assert [j["metadata"]["name"] for j in api.all("batch", "jobs")] == [app.partition(":")[2]]
        asked = len(api.requests)
        assert "stopped" in said_by("status", "x") and len(api.requests) == asked

    def test_nodes_that_end_by_themselves_are_left_alone_but_not_for_ever(self, api: SimulatedApi, app: str) -> None:
        self.put_pod(api, app, {"phase": "Running"})
        self.end(api, app, json.dumps({"verdict": "user_error", "decision": "stop", "reason": "no", "attempt": 0}))
        self.said(app)
        assert len(api.all("batch", "jobs")) == 2
        KubernetesLauncher().cancel([app])  # once more
        assert len(api.all("batch", "jobs")) == 1

    SIDECAR: ClassVar[Object] = {"name": "istio-proxy", "ready": True, "state": {"running": {}}}

    def test_machines_are_given_back_although_what_admission_added_to_the_pods_runs_on(
        self, api: SimulatedApi, app: str
    ) -> None:
        verdict = json.dumps({"verdict": "done", "decision": "stop", "reason": "all steps are done", "attempt": 0})
        self.put_pod(api, app, {"phase": "Running", "containerStatuses": [self.SIDECAR]})
        self.end(api, app, verdict, self.SIDECAR)
        api.objects["batch/jobs", app.partition(":")[2]]["status"]["conditions"] = []  # its pod runs on
        assert self.said(app) == (State.DONE, "all steps are done")
        assert len(api.all("batch", "jobs")) == 2, "nodes end by themselves"
        self.end(api, app, verdict, self.SIDECAR, ago_s=60)
        api.objects["batch/jobs", app.partition(":")[2]]["status"]["conditions"] = []
        assert self.said(app) == (State.DONE, "all steps are done")
        assert [j["metadata"]["name"] for j in api.all("batch", "jobs")] == [app.partition(":")[2]]

    def test_containers_that_admission_added_say_nothing_of_the_job(self, api: SimulatedApi, app: str) -> None:
        ended = {"exitCode": 137, "reason": "Error", "message": '{"level": "error"}', "finishedAt": now()}
        own = {"name": "coordinator", "ready": True, "state": {"running": {}}}
        sidecar = {"name": "log-shipper", "ready": False, "state": {"terminated": ended}}
        unready = {"type": "Ready", "status": "False", "reason": "ContainersNotReady"}
        status = {"phase": "Running", "conditions": [unready]}
        self.put_pod(api, app, {**status, "containerStatuses": [sidecar, own]}, "coordinator")
        assert self.said(app) == (State.RUNNING, "")

    def test_a_sidecar_that_ends_or_crashes_after_the_container_began_says_nothing(
        self, api: SimulatedApi, app: str
    ) -> None:
        """Service meshes add it as an init container that runs on, and that its kubelet restarts."""
        crashed = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting"}}
        sidecar = {"name": "istio-proxy", "image": "i:1", "state": crashed}
        own = {"name": "trainer", "state": {"running": {}}}
        self.put_pod(api, app, {"phase": "Running", "initContainerStatuses": [sidecar], "containerStatuses": [own]})
        assert self.said(app) == (State.RUNNING, "")
        killed = {"name": "istio-proxy", "state": {"terminated": {"exitCode": 143, "reason": "Error"}}}
        own = {"name": "trainer", "state": {"terminated": {"exitCode": 1, "reason": "Error", "message": "no CUDA"}}}
        self.put_pod(api, app, {"phase": "Failed", "initContainerStatuses": [killed], "containerStatuses": [own]})
        assert "ended with 1 (Error): no CUDA" in self.said(app)[1]
        own["state"] = {"terminated": {"exitCode": 0, "reason": "Completed"}}
        self.put_pod(api, app, {"phase": "Succeeded", "initContainerStatuses": [killed], "containerStatuses": [own]})
        assert self.said(app)[1] == ""

    def test_a_container_that_keeps_a_failed_pod_from_being_replaced_is_named(
        self, api: SimulatedApi, app: str
    ) -> None:
        """One that is no init container: the pod runs on, and its Job makes no other one."""
        for job in api.all("batch", "jobs"):
            job["status"]["active"] = job["spec"]["parallelism"]
        killed = {"name": "trainer", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
        self.put_pod(api, app, {"phase": "Running", "containerStatuses": [killed, self.SIDECAR]})
        state, why = self.said(app)
        assert state is State.RUNNING and "ended with 137, but its container istio-proxy, which admission added" in why
        killed["state"]["terminated"]["exitCode"] = 0  # type: ignore[index]
        assert self.said(app)[1] == "", "the job has ended"

    def test_a_readiness_gate_that_is_closed_is_no_silent_machine(self, api: SimulatedApi, app: str) -> None:
        """A kubelet that answers gives the reason why a pod is not ready; who notices its silence gives none."""
        own = {"name": "coordinator", "ready": True, "state": {"running": {}}}
        gate = {"type": "Ready", "status": "False", "reason": "ReadinessGatesNotReady"}
        self.put_pod(api, app, {"phase": "Running", "conditions": [gate], "containerStatuses": [own]}, "coordinator")
        assert self.said(app) == (State.RUNNING, "")

    def test_an_init_container_that_admission_added_and_that_cannot_start(self, api: SimulatedApi, app: str) -> None:
        waiting = {"waiting": {"reason": "CreateContainerConfigError", "message": "runAsNonRoot and image has root"}}
        init = {"initContainerStatuses": [{"name": "istio-init", "image": "i:1", "state": waiting}]}
        self.put_pod(api, app, {"phase": "Pending", **init})
        assert "cannot start: CreateContainerConfigError: runAsNonRoot" in self.said(app)[1]
        ended = {"exitCode": 1, "reason": "Error", "message": "iptables: no permission\n"}
        init = {"initContainerStatuses": [{"name": "istio-init", "state": {"terminated": ended}}]}
        self.put_pod(api, app, {"phase": "Failed", **init})
        assert "ended with 1 (Error): iptables: no permission" in self.said(app)[1]

    def test_times_are_those_of_the_clusters_clock(self, api: SimulatedApi, app: str) -> None:
        """This machine's clock is ten minutes ahead."""
        api.ahead_s = -600
        running = {"containerStatuses": [{"name": "coordinator", "ready": True, "state": {"running": {}}}]}
        ends_soon = {"deletionTimestamp": now(-600), "finalizers": ["batch.kubernetes.io/job-tracking"]}
        self.put_pod(api, app, {"phase": "Running", **running}, "coordinator", **ends_soon)
        assert self.said(app) == (State.RUNNING, "")
        assert KubernetesLauncher().replace_lost(app) == "" and len(api.all("", "pods")) == 1

    def test_no_line_is_lost_when_this_machines_clock_is_set_back(
        self, api: SimulatedApi, app: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        running = {"containerStatuses": [{"name": "coordinator", "ready": True, "state": {"running": {}}}]}
        self.put_pod(api, app, {"phase": "Running", **running}, "coordinator")
        here, line = time.time(), b'@metrics.jsonl:12 {"step": 1}\n'
        lines: list[tuple[float, bytes]] = []
        api.log_of = lambda _pod, _follow: iter(lines)
        self.said(app)
        lines.append((here + 30, line))
        monkeypatch.setattr(time, "time", lambda: here - 500)
        api.ahead_s = 600
        self.said(app)
        assert RunDir("runs/x").metrics.read_text() == '{"step": 1}\n'

    def test_pods_of_others_with_the_same_label_are_left_alone(self, api: SimulatedApi, app: str) -> None:
        body = {"metadata": {"name": "reader", "labels": {"app.kubernetes.io/name": "fsdp-jobs"}}, "spec": {}}
        api.put("", "pods", body)["status"] = {"phase": "Running"}
        assert [described is None for described in KubernetesLauncher().describe([app, "team:y-1"])] == [False, True]

    def test_why_many_pods_wait_takes_no_more_requests(self, api: SimulatedApi, app: str) -> None:
        for number in range(30):
            status = {"phase": "Pending", "containerStatuses": []}
            self.put_pod(api, app, status)
            pod = api.objects["/pods", f"{app.partition(':')[2]}-node-0-abcde"]
            pod["metadata"]["name"] = f"pod-{number}"
            api.objects["/pods", f"pod-{number}"] = pod
        api.requests.clear()
        self.said(app)
        assert len(api.requests) <= 5, api.requests

    @pytest.mark.seen
    def test_a_job_that_is_cancelled_while_it_waits_is_stopped(self, api: SimulatedApi, app: str) -> None:
        assert "x stopped: cancelled while it waited" in said_by("cancel", "x")
        assert not api.all("batch", "jobs")

    def test_cancel_tells_the_end_although_another_command_copies_the_records(
        self, api: SimulatedApi, app: str
    ) -> None:
        """The one that is attached to the job, for example: of what it had not copied yet nothing was told."""
        running = {"containerStatuses": [{"name": "coordinator", "ready": True, "state": {"running": {}}}]}
        self.put_pod(api, app, {"phase": "Running", **running}, "coordinator")
        verdict = {"verdict": "preempted", "decision": "stop", "reason": "cancelled; saved at step 5", "attempt": 0}
        answer = api.answer

        def ends_when_annotated(method: str, *asked: Any) -> tuple[int, Any]:
            said = answer(method, *asked)
            if method == "PATCH":
                self.end(api, app, json.dumps(verdict))
            return said

        api.answer = ends_when_annotated  # type: ignore[method-assign]
        with (RunDir("runs/x").submit / "mirror.lock").open("a") as file:
            assert try_lock(file)
            assert "x stopped: cancelled; saved at step 5" in said_by("cancel", "x")

    @pytest.mark.seen
    def test_a_queue_that_has_no_room(self, api: SimulatedApi) -> None:
        _kueue(api)
        (job,) = submission.prepare([compose_job([*JOB, "cluster.queue=research"])])
        app = submission.submit([job], [JOB])[0].rpartition("/")[2]
        (root,) = [j for j in api.all("batch", "jobs") if j["metadata"]["name"] == app.partition(":")[2]]
        assert root["spec"]["suspend"] is True  # Kueue lets it start, nobody else
        condition = {"type": "QuotaReserved", "status": "False", "message": "insufficient quota for nvidia.com/gpu"}
        for job in (root, *(j for j in api.all("batch", "jobs") if j is not root)):  # first the coordinator's
            body = {"metadata": {"name": "w", "ownerReferences": [{"uid": job["metadata"]["uid"]}]}}
            api.put("kueue.x-k8s.io", "workloads", body)["status"] = {"conditions": [condition]}
            why = "waits in queue research: insufficient quota for nvidia.com/gpu"
            assert self.said(app) == (State.QUEUED, why)
            job["spec"]["suspend"] = False

    def test_a_queue_that_has_reserved_quota_and_waits_for_machines(self, api: SimulatedApi) -> None:
        """As with a ProvisioningRequest: a cluster's autoscaler answers after hours."""
        _kueue(api)
        (job,) = submission.prepare([compose_job([*JOB, "cluster.queue=research"])])
        app = submission.submit([job], [JOB])[0].rpartition("/")[2]
        (root,) = [j for j in api.all("batch", "jobs") if j["metadata"]["name"] == app.partition(":")[2]]
        body = {"metadata": {"name": "w", "ownerReferences": [{"uid": root["metadata"]["uid"]}]}}
        api.put("kueue.x-k8s.io", "workloads", body)["status"] = {
            "conditions": [{"type": "QuotaReserved", "status": "True", "message": "Quota reserved"}],
            "admissionChecks": [
                {"name": "budget", "state": "Ready", "message": ""},
                {"name": "dws", "state": "Pending", "message": "Waiting for resources. Currently there are not enough"},
            ],
        }
        why = "waits in queue research: check dws is Pending: Waiting for resources. Currently there are not enough"
        assert self.said(app) == (State.QUEUED, why)

    def test_an_image_that_cannot_work_is_named_in_a_volcano_job_too(self, api: SimulatedApi) -> None:
        """Its pods have another label of their job, and tasks of the same number."""
        api.groups["batch.volcano.sh"] = "v1alpha1"
        overrides = [*JOB, "cluster.workload=volcano"]
        app = submission.submit(submission.prepare([compose_job(overrides)]), [overrides])[0].rpartition("/")[2]
        (root,) = api.all("batch.volcano.sh", "jobs")
        name = root["metadata"]["name"]
        root["status"] = {"state": {"phase": "Terminated"}, "conditions": [{"status": "Terminated"}]}
        labels = {"app.kubernetes.io/instance": name, "volcano.sh/job-name": name}
        ended = {"exitCode": 1, "reason": "Error", "message": "No module named fsdp_jobs\n"}
        own = {"name": "coordinator", "state": {"terminated": ended}}
        status = {"phase": "Failed", "containerStatuses": [own]}
        self.put_pod(api, app, status, "coordinator", labels={**labels, "fsdp-jobs/role": "coordinator"})
        self.put_pod(api, app, {"phase": "Succeeded"}, labels={**labels, "fsdp-jobs/role": "trainer"})
        state, why = self.said(app)
        assert state is State.FAILED and why.endswith("ended with 1 (Error): No module named fsdp_jobs")

    def test_volcanos_pod_on_a_lost_machine_is_given_up_as_the_coordinators(self, api: SimulatedApi, app: str) -> None:
        """Volcano makes a pod of the same name, so it waits for the end of the one before; a Job does not."""
        name = app.partition(":")[2]
        labels = {"app.kubernetes.io/instance": name, "fsdp-jobs/role": "trainer"}
        running = {"phase": "Running", "containerStatuses": [{"name": "trainer", "state": {"running": {}}}]}
        self.put_pod(api, app, running, labels=labels, deletionTimestamp=now(-90))
        assert self.said(app) == (State.RUNNING, "") and KubernetesLauncher().replace_lost(app) == ""
        self.put_pod(api, app, running, labels={**labels, "fsdp-jobs/node": "0"}, deletionTimestamp=now(-90))
        assert "does not answer; if it is down for good: fsdp-jobs resume x" in self.said(app)[1]
        assert KubernetesLauncher().replace_lost(app) == "machine m1 is given up: new pods take over"
        assert not api.all("", "pods")

    def test_a_volcano_job_tells_why_it_waits_and_how_it_ended(self, api: SimulatedApi) -> None:
        """Its conditions have no type, and before there is room for its gang it has no pods."""
        api.groups["batch.volcano.sh"] = "v1alpha1"
        overrides = [*JOB, "cluster.workload=volcano"]
        app = submission.submit(submission.prepare([compose_job(overrides)]), [overrides])[0].rpartition("/")[2]
        (root,) = api.all("batch.volcano.sh", "jobs")
        why = "PodGroup team:x unschedule,reason: 3/0 tasks in gang unschedulable: pod group is not ready"
        api.warn("Job", root["metadata"]["name"], "PodGroupPending", why)
        root["status"] = {"state": {"phase": "Pending"}, "conditions": [{"status": "Pending"}]}
        assert self.said(app) == (State.QUEUED, f"PodGroupPending: {why}")
        aborted = {"phase": "Aborted", "message": "by an administrator"}
        root["status"] = {"state": aborted, "conditions": [{"status": "Pending"}, {"status": "Aborted"}]}
        state, why = self.said(app)
        assert state is State.STOPPED and why.startswith("by an administrator; its pods were deleted")

    def test_a_token_that_expires_later(self, api: SimulatedApi, app: str) -> None:
        api.token = "another"
        with pytest.raises(JobFailed, match="has expired"):
            self.said(app)

    def test_what_is_known_here_is_told_while_the_cluster_does_not_answer(
        self, api: SimulatedApi, app: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(scheduler, "_RETRIED_FOR_S", 0)
        run = RunDir("runs/x")  # as mirrored before
        events.record(run, 0, events.AttemptStarted(2))
        events.record(run, 0, events.RoundStarted([0], ["m1"], "full_shard", 1, 1))
        events.append_lines(run.metrics, {"time": time.time(), "step": 7, "loss": 2.5})
        write_atomic(run.rank_log(0, 0, 0), "a line of rank 0\n")
        api.instead = (503, "", 0)
        assert main(["status", "x"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "running" in said and "7/" in said and "2.5000" in said and "its launcher does not answer" in said
        assert main(["logs", "x"]) == 0
        assert "a line of rank 0" in capsys.readouterr().out
        Verdict("done", "stop", "all steps are done").write(run, 0)
        events.record(run, 0, events.AttemptEnded("done", "stop", "all steps are done"))
        assert main(["status"]) == 0
        said = capsys.readouterr().out
        assert "done" in said and "does not answer" not in said

    def test_logs_that_are_fetched_now_are_not_said_to_be_missing(
        self, api: SimulatedApi, app: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        running = {"containerStatuses": [{"name": "trainer", "state": {"running": {}}}]}
        self.put_pod(api, app, {"phase": "Running", **running}, "trainer")
        line = b"@attempts/0/node-0/rank-0.log:18 a line of rank 0\n"
        api.log_of = lambda _pod, _follow: iter([(time.time(), line)])
        assert main(["logs", "x"]) == 0
        said = capsys.readouterr()
        assert "a line of rank 0" in said.out and not said.err

    def test_logs_that_cannot_be_read_are_the_reason_why_nothing_is_known(
        self, api: SimulatedApi, app: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A role that was changed; an API server that its kubelets do not let in has 403 or 500, too."""
        running = {"containerStatuses": [{"name": "trainer", "state": {"running": {}}}]}
        self.put_pod(api, app, {"phase": "Running", **running})
        api.denied.add(("get", "pods/log"))
        assert main(["status", "x"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert '-node-0-abcde cannot be read: pods/log is forbidden: User "me" cannot get' in said
        api.denied.clear()
        assert self.said(app) == (State.RUNNING, "")

    def test_many_jobs_take_one_list_of_pods_and_one_of_jobs(self, api: SimulatedApi) -> None:
        handles = []
        for name in ("a", "b", "c"):
            job = [*JOB[:-1], f"name={name}"]
            handles += submission.submit(submission.prepare([compose_job(job)]), [job])
        self.put_pod(api, handles[0].rpartition("/")[2], {"phase": "Running"})
        KubernetesLauncher().cancel([handles[2].rpartition("/")[2]])
        api.requests.clear()
        described = describe(handles)
        assert [described[h].state for h in handles] == [State.RUNNING, State.QUEUED, State.UNKNOWN]
        lists = [r for r in api.requests if r.endswith(("/pods", "/jobs"))]
        assert len(lists) == 2, api.requests
        assert [describe([h])[h] for h in handles] == [described[h] for h in handles]

    def test_export_says_where_the_checkpoints_are(self, api: SimulatedApi, app: str) -> None:
        done = cli(Path.cwd(), "export", "x")
        assert done.returncode == 2 and "copy them to runs/x/checkpoints with the pod of" in done.stderr, done.stderr

    def test_a_job_whose_objects_went_before_its_end_was_seen(self, api: SimulatedApi, app: str) -> None:
        for key in [key for key in api.objects if key[0] != "/persistentvolumeclaims"]:
            del api.objects[key]
        state, why = self.said(app)
        assert state is State.UNKNOWN and "before this machine saw its end" in why
        listed = {job.app_id: job.state for job in KubernetesLauncher.scheduler("torchx").list()}
        assert listed[app] is AppState.UNKNOWN

    @pytest.mark.parametrize(("end", "state"), [("Failed", State.FAILED), ("Complete", State.DONE)])
    def test_a_job_whose_pods_went_before_its_end_was_seen(
        self, api: SimulatedApi, app: str, end: str, state: State
    ) -> None:
        """The cluster's garbage collector, or somebody's `kubectl delete pods`."""
        told = "Container coordinator for pod team/x-0-abcde failed with exit code 1 matching FailJob rule at index 1"
        conditions = [{"type": end, "status": "True", "message": told}]
        api.objects["batch/jobs", app.partition(":")[2]]["status"]["conditions"] = conditions
        described, why = self.said(app)
        assert described is state and told in why and "its pods were deleted before this machine read" in why

    def test_a_job_that_is_gone(self, api: SimulatedApi, app: str) -> None:
        KubernetesLauncher().cancel([app])
        assert KubernetesLauncher().describe([app]) == [None]
        assert {kind for kind, _ in api.objects} == {"/persistentvolumeclaims"}  # the root owned everything
