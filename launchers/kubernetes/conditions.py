"""What a job's objects tell: its state, its verdict, and in a user's words why it waits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime

from fsdp_jobs.launchers.base import at_once
from fsdp_jobs.launchers.kubernetes.api import Api, ApiError
from fsdp_jobs.launchers.kubernetes.labels import QUEUE, ROLE, RUN, node_of
from fsdp_jobs.launchers.kubernetes.skeletons import Object
from fsdp_jobs.launchers.state import State
from fsdp_jobs.run.protocol import CONNECTION, TELL_AGAIN_S
from fsdp_jobs.run.verdict import EXIT_DONE, EXIT_REQUEUE, Verdict

_JOB_NAME = "batch.kubernetes.io/job-name"
_LATE_S = 30.0
_LOGGED_S = round(1.5 * TELL_AGAIN_S)  # an agent without a connection has logged it in this time
_ASKED = 8  # pods whose logs are read in a look
_POLICY = "if a NetworkPolicy keeps pods apart: deploy/kubernetes/network-policy.yaml"
_ENDS = {  # of Jobs and JobSets by condition, of Volcano's jobs by phase
    "Complete": State.DONE,
    "Completed": State.DONE,
    "Failed": State.FAILED,
    "Terminated": State.FAILED,
    "Aborted": State.STOPPED,
}
_STARTING = ("ContainerCreating", "PodInitializing")


def state_of(root: Object, pods: list[Object]) -> State:
    """Return the job's state by the last verdict, the object that owns the others, and the pods."""
    _, verdict = verdict_of(pods)
    if verdict is not None and verdict.decision == "stop":  # the Job takes a moment to know
        return State.from_verdict(verdict)
    if end := ends_of(root):
        return _ENDS[next(iter(end))]
    return State.RUNNING if any(p["status"].get("phase") == "Running" for p in pods) else State.QUEUED


def ends_of(body: Object) -> dict[str, str]:
    """Return how a Job, JobSet or Volcano job has ended, with the time of it; empty while it has not."""
    status = body.get("status", {})
    known = {c["type"]: c.get("lastTransitionTime", "") for c in status.get("conditions", []) if c["status"] == "True"}
    phase = status.get("state", {})  # Volcano's
    known |= {phase["phase"]: phase.get("lastTransitionTime", "")} if "phase" in phase else {}
    return {word: time for word, time in known.items() if word in _ENDS}


def is_leaving(root: Object, pods: list[Object]) -> bool:
    """Return whether a job has just ended and its nodes' pods end by themselves.

    They do when its coordinator has judged an attempt, and when all of them run, or have ended so.
    """
    attempt, verdict = verdict_of(pods)
    if verdict is None or attempt < 0:
        return False
    phases = {p["status"].get("phase") for p in pods if p["metadata"]["labels"].get(ROLE) == "trainer"}
    is_recent = all(_seconds_since(time) < _LATE_S for time in ends_of(root).values() if time)
    return is_recent and "Running" in phases and phases <= {"Running", "Succeeded"}


def _seconds_since(time: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds()


def verdict_of(pods: list[Object]) -> tuple[int, Verdict | None]:
    """Return attempt and verdict from the status of the newest coordinator's pod; 0 and None without."""
    for pod in reversed(pods):
        for container in pod["status"].get("containerStatuses", []):
            message = container.get("state", {}).get("terminated", {}).get("message", "")
            if pod["metadata"]["labels"].get(ROLE) == "coordinator" and message.startswith("{"):
                content = json.loads(message)
                return content.pop("attempt"), Verdict(**content)
    return 0, None


def why_waiting(api: Api, root: Object, jobs: list[Object], pods: list[Object]) -> str:
    """Return why pods that should run do not; empty when nothing is in the way."""
    for body in (root, *jobs):
        if body["spec"].get("suspend"):
            return _why_queued(api, body)
    for pod in pods:
        if pod["status"].get("phase") in ("Pending", "Running", "Unknown", None) and (why := _why_pod(api, pod, root)):
            return why
    for job in jobs:
        spec, status = job["spec"], job.get("status", {})
        if status.get("active", 0) + status.get("succeeded", 0) < spec["parallelism"]:
            name = job["metadata"]["name"]
            if warnings := [w for w in api.warnings("Job", name) if w.startswith("FailedCreate")]:
                return f"pods of {name} are refused: {warnings[-1].partition(': ')[2]}"
            if why := why_failed(job, pods):
                return why
    return ""


def why_cut_off(api: Api, pods: list[Object]) -> str:
    """Return which node has no connection to the coordinator, and since when, by the newest lines of its pod's log.

    A policy keeps all of them apart, so a few are asked.
    """

    def last_line(pod: Object) -> str:
        try:
            lines = list(api.log(pod["metadata"]["name"], "trainer", since_s=_LOGGED_S))
        except ApiError:  # it has just gone, or its machine does not answer
            return ""
        return next((line for line in reversed(lines) if CONNECTION in line), "")

    nodes = [
        p for p in pods if p["metadata"]["labels"].get(ROLE) == "trainer" and p["status"].get("phase") == "Running"
    ]
    asked = nodes[:_ASKED]
    for pod, line in zip(asked, at_once(last_line, asked), strict=True):
        _, no, told = line.partition(f"no {CONNECTION}")
        if no:
            cure = "" if "refused" in told else f" ({_POLICY})"
            return f"pod {pod['metadata']['name']}: {no}{told}{cure}"
    return ""


def is_lost(pod: Object) -> bool:
    """Return whether a deleted pod is there long after its grace period: its machine is lost."""
    deleted = pod["metadata"].get("deletionTimestamp")  # when its grace period ends
    if deleted is None or pod["status"].get("phase") in ("Succeeded", "Failed"):
        return False
    return _seconds_since(deleted) > _LATE_S


def _why_queued(api: Api, body: Object) -> str:
    queue = body["metadata"].get("labels", {}).get(QUEUE)
    if queue is None:
        return f"suspended, and not by a queue: kubectl describe of {body['metadata']['name']} shows more"
    version = api.groups().get("kueue.x-k8s.io", "v1beta1")
    try:
        workloads = api.select(f"kueue.x-k8s.io/{version}", "Workload")
    except ApiError as e:
        if e.status != 403:
            raise
        workloads = []
    for workload in workloads:
        owners = [o["uid"] for o in workload["metadata"].get("ownerReferences", [])]
        if body["metadata"]["uid"] in owners:
            for condition in workload.get("status", {}).get("conditions", []):
                if condition["type"] == "QuotaReserved" and condition["status"] == "False":
                    return f"waits in queue {queue}: {condition['message']}"
    return f"waits in queue {queue}"


def _why_pod(api: Api, pod: Object, root: Object) -> str:
    name, status = pod["metadata"]["name"], pod["status"]
    conditions = {c["type"]: c for c in status.get("conditions", [])}
    is_coordinator = pod["metadata"]["labels"].get(ROLE) == "coordinator"  # nodes are replaced by themselves
    silent = f"machine {pod['spec'].get('nodeName', '?')} of pod {name}, the coordinator's, does not answer"
    if is_coordinator and is_lost(pod):
        run = root["metadata"].get("annotations", {}).get(RUN, "NAME")
        return f"{silent}; if it is down for good: fsdp-jobs resume {run}"
    if "deletionTimestamp" in pod["metadata"]:
        return ""
    if is_coordinator and _is_silent(pod, conditions):
        return f"{silent}; without it training stops after elastic.lease_s"
    scheduled = conditions.get("PodScheduled", {"status": "True"})
    if scheduled["status"] == "False":
        return f"pod {name} cannot be scheduled: {scheduled.get('message', scheduled.get('reason', ''))}"
    for container in status.get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting", {})
        reason = waiting.get("reason", "")
        if reason and reason not in _STARTING:
            image = f" of image {container['image']}" if "Image" in reason else ""
            return f"pod {name} cannot start: {reason}{image}: {waiting.get('message', '')}"
    if status.get("phase") == "Pending":
        warnings = [w for w in api.warnings("Pod", name) if w.startswith(("FailedMount", "FailedAttachVolume"))]
        return f"pod {name} cannot start: {warnings[-1]}" if warnings else ""
    return ""


def _is_silent(pod: Object, conditions: Mapping[str, Object]) -> bool:
    """Whether the kubelet of a running pod is silent: without probes only that makes it not ready."""
    running = any("running" in c.get("state", {}) for c in pod["status"].get("containerStatuses", []))
    return running and conditions.get("Ready", {}).get("status") == "False"


def why_failed(job: Object, pods: list[Object]) -> str:
    """Return how a pod of a Job ended that has failed and has no successor yet; empty when there is none."""
    own = [p for p in pods if p["metadata"]["labels"].get(_JOB_NAME) == job["metadata"]["name"]]
    for pod in {node_of(p): p for p in own}.values():  # the newest of each
        for container in pod["status"].get("containerStatuses", []):
            ended = container.get("state", {}).get("terminated", {})
            if ended.get("exitCode", 0) not in (EXIT_DONE, EXIT_REQUEUE):
                lines = ended.get("message", "").strip().splitlines()
                last = f": {lines[-1]}" if lines else ""
                return f"pod {pod['metadata']['name']} ended with {ended['exitCode']} ({ended.get('reason')}){last}"
    return ""
