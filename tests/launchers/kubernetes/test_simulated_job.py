"""Whole jobs through the command line and the real client library, on a simulated cluster with real processes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.verdict import Verdict
from tests import programs
from tests.jobs import ROOT, Watched, called, cli
from tests.launchers.kubernetes.simulated_api import Refused
from tests.launchers.kubernetes.simulated_cluster import Machine, SimulatedCluster, why_not
from tests.launchers.kubernetes.submitted import Submitted
from tests.world import PACED, TINY, TINY_TASK

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

IN_PODS = (
    "cluster=kubernetes",
    "cluster.image=registry.example/fsdp-jobs:1",
    "cluster.claim=runs",
    "cluster.mount_path=/run/claim",
    "cluster.accelerator=cpu",
    "hardware=cpu",
    "nproc_per_node=1",
)
JOB = (*IN_PODS, *TINY)


@pytest.mark.seen
def test_a_job_lives_through_what_happens_to_pods_on_a_simulated_cluster(
    cluster: SimulatedCluster, tmp_path: Path
) -> None:
    for machine, leaf in (("machine-a", "leaf2"), ("machine-b", "leaf1")):
        labels = {"network.topology.nvidia.com/leaf": leaf, "network.topology.nvidia.com/spine": "spine"}
        cluster.api.put("", "nodes", {"metadata": {"name": machine, "labels": labels}})
    endless = (*IN_PODS, *PACED, *TINY_TASK, "nodes=2", "steps=100000", "checkpoint.every_steps=50")
    done = called(tmp_path, "name=life", *endless, "attach=false")
    assert done.returncode == 0, done.stdout + done.stderr
    job = Submitted(tmp_path, "life")
    job.until_advanced(1)
    assert job.events("round_started")[0]["hosts"] == ["machine-b", "machine-a"]  # in topology order, by the labels

    rounds, step = job.rounds(), job.step()
    (node,) = cluster.running("trainer", 0)
    silent = node["spec"]["nodeName"]
    cluster.lose(silent, has_power=True)  # the node is replaced, and works all the same
    job.until_true(lambda: bool(cluster.running("trainer", 0)), "a replacement")
    job.until_true(lambda: job.step() > step + 20, "training goes on")
    assert job.rounds() == rounds
    cluster.find(silent)  # the node that was given up long ago is told to end: that ends its part alone
    job.until_advanced(rounds + 1)
    assert silent not in job.events("round_started")[-1]["hosts"] and not job.run.verdict(0).exists()

    rounds = job.rounds()
    (node,) = cluster.running("trainer", 0)
    cluster.api.delete(node, 0)  # by force: the job goes on in the same attempt
    job.until_advanced(rounds + 1)
    assert not job.run.verdict(0).exists()

    rounds = job.rounds()
    (coordinator,) = cluster.running("coordinator")
    (lost,) = set(cluster.machines) - {coordinator["spec"]["nodeName"]}
    cluster.lose(lost)  # nobody says that its pod has ended, and yet there is another one
    job.until_advanced(rounds + 1)
    assert lost not in job.events("round_started")[-1]["hosts"]
    assert {p["status"]["phase"] for p in cluster.pods() if p["spec"]["nodeName"] == lost} == {"Running"}
    cluster.find(lost)

    rounds = job.rounds()
    (coordinator,) = cluster.running("coordinator")
    cluster.kill(coordinator)  # nobody notices but the next one
    job.until_true(lambda: bool(job.events("adopted")), "the round is adopted")
    assert job.rounds() == rounds

    (coordinator,) = cluster.running("coordinator")
    machine = coordinator["spec"]["nodeName"]
    cluster.lose(machine, ago_s=60)  # nothing replaces its pod: a finalizer holds it, however hard it is deleted
    cluster.api.delete(coordinator, 0)
    job.until_true(lambda: bool(job.events("waiting")), "the reason")
    assert "if it is down for good: fsdp-jobs resume life" in called(tmp_path, "status", "life").stdout
    replaced = called(tmp_path, "resume", "life")
    assert replaced.returncode == 0 and f"machine {machine} is given up" in replaced.stdout, replaced.stderr
    again = lambda: len(job.events("adopted")) == 2 or job.rounds() > rounds  # noqa: E731 (by then leases may be over)
    job.until_true(again, "a new coordinator has the nodes")
    since = max(e["time"] for name in ("adopted", "round_started") for e in job.events(name))
    job.until_true(lambda: job.metrics()[-1]["time"] > since, "training goes on")
    cluster.find(machine)

    (coordinator,) = cluster.running("coordinator")
    drained = coordinator["spec"]["nodeName"]
    cluster.drain(drained)  # the coordinator and a node are told to go: the job saves, and goes on elsewhere
    job.until_true(lambda: job.run.verdict(0).exists(), "the verdict")
    verdict = Verdict.read(job.run, 0)
    assert verdict is not None and (verdict.verdict, verdict.decision) == ("preempted", "requeue"), verdict
    job.until_true(lambda: any(e["attempt"] == 1 for e in job.events("resumed")), "the next attempt")
    job.until_advanced(job.rounds())
    assert drained not in job.events("round_started")[-1]["hosts"]
    resumed = next(e for e in job.events("resumed") if e["attempt"] == 1)
    assert f"saved at step {resumed['step']}" in verdict.reason

    (coordinator,) = cluster.running("coordinator")
    rounds, step, since = job.rounds(), job.step(), time.time()
    cluster.api.delete(coordinator, 0)  # by force, while it lives: SIGTERM, and 2 s
    lives = lambda: bool(cluster.running("coordinator")) and job.metrics()[-1]["time"] > since + 5  # noqa: E731
    job.until_true(lambda: (job.rounds() > rounds or len(job.events("adopted")) > 2) and lives(), "training goes on")
    again = [e["step"] for e in job.events("resumed") if e["time"] > since]
    assert all(at >= step for at in again), f"steps are done again: {again} of {step}"

    stopped = called(tmp_path, "cancel", "life")
    assert stopped.returncode == 0 and "life stopped: cancelled; saved at step" in stopped.stdout, stopped.stdout
    (root,) = [j for j in cluster.api.all("batch", "jobs") if j["spec"]["completions"] == 1]
    assert cluster.finished(root) == "Failed"
    job.until(lambda: not cluster.running("trainer"), "the nodes are let go")
    saved = job.events("checkpoint")[-1]["step"]

    steps = f"steps={saved + 5}"
    again = cli(tmp_path, "resume", "life", steps, "attach=true", timeout=400)
    assert again.returncode == 0 and f"resumed from the checkpoint of step {saved}" in again.stdout, again.stdout
    assert "life: done" in again.stdout
    (new,) = [j for j in cluster.api.all("batch", "jobs") if j["spec"]["completions"] == 1 and j is not root]
    assert cluster.finished(new) == "Complete"
    losses = job.losses()
    assert sorted(losses) == list(range(1, saved + 6))  # nothing is missing of what the pods recorded


@pytest.mark.seen
def test_users_error_fails_an_elastic_job_on_a_simulated_cluster(cluster: SimulatedCluster, tmp_path: Path) -> None:
    """The submit machine mounts the claim here: what the pods write is there, and is not written twice."""
    cluster.machines["machine-b"].cordoned = True
    cluster.machines["machine-a"].slots = 2  # the coordinator and one node: the second never finds a place
    data = ("data=tokens", "data.vocab_size=256", "data.path=/run/claim/none.bin")
    mounted = f"runs_dir={cluster.claim}"
    more = ("nodes=1:2", "elastic.join_window_s=1", *data, mounted)
    ended = cli(tmp_path, "name=bad", *JOB, *more, timeout=180)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "none.bin" in ended.stdout and "bad: failed" in ended.stdout
    assert "cannot be scheduled: 0/2 nodes are available" in ended.stdout
    job = Watched(RunDir(cluster.claim / "bad"))
    jobs = {j["spec"]["completions"]: j for j in cluster.api.all("batch", "jobs")}
    states = {1: "Failed", 2: "Complete"}
    job.until(lambda: {n: cluster.finished(j) for n, j in jobs.items()} == states, "both Jobs have ended")
    assert jobs[1]["status"]["conditions"][0]["reason"] == "PodFailurePolicy"
    for once in ("submitted", "attempt_started", "attempt_ended"):
        assert len(job.events(once)) == 1


@pytest.mark.seen
def test_shard_groups_stay_under_one_switch_by_the_labels_of_a_simulated_cluster(
    cluster: SimulatedCluster, tmp_path: Path
) -> None:
    """Kubernetes numbers the pods b, c, d, a: pairs of these cross the leaves."""
    for number, machine in enumerate(("machine-a", "machine-b", "machine-c", "machine-d")):
        cluster.machines[machine] = Machine(machine, 4)
        labels = {"network.topology.nvidia.com/leaf": f"leaf{number % 2}", "network.topology.nvidia.com/spine": "s"}
        cluster.api.put("", "nodes", {"metadata": {"name": machine, "labels": labels}})
    (tmp_path / "quick.py").write_text("print('done')")
    pairs = ("nodes=4", "fsdp=hybrid_shard", "fsdp.shard_group=2", f"script={tmp_path}/quick.py")
    done = cli(tmp_path, "name=pairs", *IN_PODS, *pairs, timeout=400)
    assert done.returncode == 0 and "pairs: done" in done.stdout, done.stdout + done.stderr
    (begun,) = Submitted(tmp_path, "pairs").events("round_started")
    by_number = dict(zip(begun["nodes"], begun["hosts"], strict=True))
    assert [by_number[n][-1] for n in range(4)] == ["b", "c", "d", "a"]
    assert begun["shard_group"] == 2 and [host[-1] for host in begun["hosts"]] == ["a", "c", "b", "d"]


@pytest.mark.seen
def test_two_users_of_a_name_on_a_simulated_cluster_and_nodes_that_find_no_machine(
    cluster: SimulatedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "ada" / ".state"))  # ada is who asks in this process
    (tmp_path / "ada").mkdir()
    (tmp_path / "bob").mkdir()
    waits = (*JOB, "name=same", "nodes=2", "cluster.node_selector={gpu: h100}", "attach=false")
    first = cli(tmp_path / "ada", *waits, LOGNAME="ada")
    assert first.returncode == 0, first.stdout + first.stderr
    job = Submitted(tmp_path / "ada", "same")
    job.until_true(lambda: bool(job.events("waiting") and cluster.running("coordinator")), "the coordinator alone runs")
    shown = called(tmp_path / "ada", "status", "same").stdout
    assert "cannot be scheduled: 0/2 nodes are available" in shown, shown

    second = cli(tmp_path / "bob", *JOB, "name=same", "nodes=2", "attach=false", LOGNAME="bob")
    assert second.returncode == 0, second.stdout + second.stderr  # his nodes find machines, and wait for his files
    job.until(lambda: len(cluster.pods("coordinator")) == 2, "bob's coordinator")
    job.until(lambda: not cluster.running("trainer") and len(cluster.pods("trainer")) == 4, "they end by themselves")
    assert "belongs to a run of ada" in called(tmp_path / "bob", "status", "same").stdout
    assert "is not running" in called(tmp_path / "bob", "cancel", "same").stdout
    assert len(cluster.running("coordinator")) == 1
    assert not (cluster.claim / "same" / "stop").exists()

    stopped = called(tmp_path / "ada", "cancel", "same")
    assert stopped.returncode == 0 and "same stopped: cancelled" in stopped.stdout, stopped.stdout + stopped.stderr
    waiting = [p for p in cluster.pods("trainer") if p["status"]["phase"] == "Pending"]
    assert not waiting, "they ask for machines for ever"
    assert "stopped" in called(tmp_path / "ada", "status", "same").stdout


def test_a_policy_drops_packets_until_the_shipped_one_lets_the_pods_of_a_simulated_cluster_talk(
    cluster: SimulatedCluster, tmp_path: Path
) -> None:
    deny = {"spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}}
    cluster.enforce(deny)
    done = called(tmp_path, "name=cut", *IN_PODS, *PACED, *TINY_TASK, "nodes=2", "steps=100000", "attach=false")
    assert done.returncode == 0, done.stdout + done.stderr
    job = Submitted(tmp_path, "cut")
    job.until_true(lambda: bool(job.events("waiting")), "the reason")
    shown = called(tmp_path, "status", "cut").stdout
    assert "no connection to the coordinator at cut-" in shown and "timed out" in shown, shown
    assert "deploy/kubernetes/network-policy.yaml" in shown, shown
    assert not job.rounds()

    cluster.enforce(deny, yaml.safe_load((ROOT / "deploy/kubernetes/network-policy.yaml").read_text()))
    job.until_advanced(1)
    shown = called(tmp_path, "status", "cut").stdout
    assert "no connection" not in shown and "running" in shown, shown
    stopped = called(tmp_path, "cancel", "cut")
    assert stopped.returncode == 0 and "cut stopped: cancelled" in stopped.stdout, stopped.stdout + stopped.stderr


def test_a_job_is_suspended_and_finds_the_quota_full_at_its_restart_on_a_simulated_cluster(
    cluster: SimulatedCluster, tmp_path: Path
) -> None:
    """As Kueue preempts one."""
    endless = (*IN_PODS, *PACED, *TINY_TASK, "nodes=2", "steps=100000")
    done = called(tmp_path, "name=held", *endless, "attach=false")
    assert done.returncode == 0, done.stdout + done.stderr
    job = Submitted(tmp_path, "held")
    job.until_advanced(1)
    for suspended in (True, False):
        with cluster.api.lock:
            for body in cluster.api.all("batch", "jobs"):
                body["spec"]["suspend"] = suspended
        if suspended:
            job.until_true(lambda: job.run.verdict(0).exists() and not cluster.running("trainer"), "no pod")
            assert "suspended, but in no queue" in called(tmp_path, "status", "held").stdout
    job.until_true(lambda: any(e["attempt"] == 1 for e in job.events("resumed")), "the next attempt")
    job.until_advanced(job.rounds())

    full = Refused(403, 'pods "held" is forbidden: exceeded quota: q, requested: pods=1, used: pods=9, limited: pods=9')
    cluster.api.refuse = lambda body: full if body["kind"] == "Pod" else None
    (coordinator,) = cluster.running("coordinator")
    cluster.disrupt(coordinator, "EvictionByEvictionAPI")
    job.until_true(lambda: "exceeded quota: q" in job.events("waiting")[-1]["why"], "the reason")
    assert "exceeded quota: q" in called(tmp_path, "status", "held").stdout
    cluster.api.refuse = lambda _: None
    job.until_true(lambda: any(e["attempt"] == 2 for e in job.events("resumed")), "the next attempt")
    job.until_advanced(job.rounds())
    assert "exceeded" not in called(tmp_path, "status", "held").stdout
    verdicts = [Verdict.read(job.run, attempt) for attempt in (0, 1)]
    for verdict, resumed in zip(verdicts, job.events("resumed"), strict=True):
        assert verdict is not None and verdict.reason.endswith(f"saved at step {resumed['step']}"), job.story()


@pytest.mark.seen
def test_an_image_that_cannot_work_ends_the_job_on_a_simulated_cluster(
    cluster: SimulatedCluster, tmp_path: Path
) -> None:
    broken = "{name: %s, command: [python, -c, import no_such_module]}"
    patch = f"cluster.pod_patch={{containers: [{broken % 'coordinator'}, {broken % 'trainer'}]}}"
    ended = cli(tmp_path, "name=broken", *JOB, "nodes=2", patch)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "ended with 1 (Error): ModuleNotFoundError: No module named 'no_such_module'" in ended.stdout, ended.stdout
    assert not cluster.pods("trainer"), "each would be replaced a hundred times"


STEPS = 100
PROGRAMS = {"plain": programs.PLAIN, "library": programs.LIBRARY, **programs.MORE}


@pytest.mark.parametrize(
    "name", ["plain", *(pytest.param(n, marks=pytest.mark.soak) for n in ("library", *programs.MORE))]
)
def test_a_program_loses_a_pod_on_a_simulated_cluster(cluster: SimulatedCluster, tmp_path: Path, name: str) -> None:
    program, image = PROGRAMS[name], f"{programs.EXAMPLES}/"  # this machine's files, where real pods have their image's
    overrides = program.overrides(STEPS, "/run/claim/own", image)
    done = called(tmp_path, f"name={name}", *IN_PODS, *overrides, "nodes=2", "attach=false")
    assert done.returncode == 0, done.stdout + done.stderr
    job = Submitted(tmp_path, name)
    job.until_true(lambda: program.has_saved(job), "a step after the first save")
    (node,) = cluster.running("trainer", 1)
    cluster.api.delete(node, 0)
    job.until_true(lambda: job.run.verdict(0).exists(), "the end")
    verdict = Verdict.read(job.run, 0)
    assert verdict is not None and verdict.verdict == "done", job.story()
    program.check_went_on(job, STEPS)
