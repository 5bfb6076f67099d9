"""Read a job's state, its verdict and why it waits from its objects. For `status` on the submitting side."""

from __future__ import annotations

import json
from contextlib import suppress

from fsdp_jobs.launchers.base import at_once
from fsdp_jobs.launchers.kubernetes.api import Api, ApiError
from fsdp_jobs.launchers.kubernetes.labels import NODE, QUEUE, RUN, node_of, role_of
from fsdp_jobs.launchers.kubernetes.skeletons import Object
from fsdp_jobs.run.protocol import CONNECTION, LOG_AGAIN_S
from fsdp_jobs.run.state import State
from fsdp_jobs.run.verdict import EXIT_DONE, EXIT_REQUEUE, Verdict

_LATE_S = 30.0
_LOGGED_S = round(1.5 * LOG_AGAIN_S)  # in this time an agent without a connection has logged that
_ASKED = 8  # pods whose logs are read in one check
_POLICY = "if a NetworkPolicy keeps pods apart: deploy/kubernetes/network-policy.yaml"
_ENDS = {  # of Jobs and JobSets by condition, of Volcano's jobs by phase
    "Complete": State.DONE,
    "Completed": State.DONE,
    "Failed": State.FAILED,
    "Terminated": State.FAILED,
    "Aborted": State.STOPPED,
}
_BLOCKING = ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox")  # warnings about a pod that has a machine
_UNBLOCKED = ("Pulling", "Pulled", "Created", "Started")  # events after all of these
_STARTING = ("ContainerCreating", "PodInitializing")


def phase_of(pod: Object) -> str:
    return str(pod["status"].get("phase", "Pending"))


def own_state(pod: Object) -> Object:
    """Return the state of the container that runs the pod's role: admission may add others, which do not count."""
    containers = pod["status"].get("containerStatuses", [])
    return next((c.get("state", {}) for c in containers if c["name"] == role_of(pod)), {})


def state_of(root: Object, pods: list[Object]) -> State:
    """Derive the job's state from the last verdict, the object that owns the others, and the pods."""
    verdict = verdict_of(pods)
    if verdict is not None and verdict.decision == "stop":  # before the Job's own status shows it
        return State.from_verdict(verdict)
    if (end := end_of(root)) is not None:
        return end[0]
    return State.RUNNING if any(phase_of(p) == "Running" for p in pods) else State.QUEUED


def end_of(body: Object) -> tuple[State, str] | None:
    """Return how a Job, JobSet or Volcano job has ended, and its controller's words; None while it has not."""
    status = body.get("status", {})
    ends = {c["type"]: c.get("message", "") for c in status.get("conditions", []) if c["status"] == "True"}
    if phase := (volcanos := status.get("state", {})).get("phase"):
        ends[phase] = volcanos.get("message") or phase
    return next(((_ENDS[word], told) for word, told in ends.items() if word in _ENDS), None)


def why_ended(root: Object, pods: list[Object]) -> str:
    """Return how a job ended, in the words of its controller, when no pod has a verdict."""
    _, told = end_of(root) or (State.UNKNOWN, "")
    if any(role_of(pod) == "coordinator" for pod in pods):
        return told
    gone = "its pods were deleted before this machine read their logs; its run directory on the claim has the rest"
    return f"{told}; {gone}" if told else gone


def is_leaving(api: Api, pods: list[Object]) -> bool:
    """Return whether a job has just ended and its nodes' pods end by themselves.

    They do if its coordinator has judged an attempt, and each of them runs or has succeeded. A container that
    admission added may keep a pod running: the end of the coordinator's own container counts.
    """
    ended, words = _last_words(pods)
    if not words or words["attempt"] < 0:
        return False
    phases = {phase_of(p) for p in pods if role_of(p) == "trainer"}
    is_recent = api.seconds_since(ended["finishedAt"]) < _LATE_S
    return is_recent and "Running" in phases and phases <= {"Running", "Succeeded"}


def _last_words(pods: list[Object]) -> tuple[Object, Object]:
    """Return the end of the newest coordinator's pod that left a verdict, and that verdict; both empty if none did.

    A pod without a verdict has the end of its log as its message, which may be any text.
    """
    for pod in reversed([p for p in pods if role_of(p) == "coordinator"]):
        ended = own_state(pod).get("terminated", {})
        with suppress(ValueError):
            words = json.loads(ended.get("message", ""))
            if isinstance(words, dict) and words.keys() == {"verdict", "decision", "reason", "attempt"}:
                return ended, words
    return {}, {}


def verdict_of(pods: list[Object]) -> Verdict | None:
    """Return the verdict from the status of the newest coordinator's pod; None if it has none."""
    _, words = _last_words(pods)
    words.pop("attempt", None)
    return Verdict(**words) if words else None


def why_waiting(api: Api, root: Object, jobs: list[Object], pods: list[Object]) -> str:
    """Return why pods that should run do not; empty if nothing blocks them."""
    for body in (root, *jobs):
        if body["spec"].get("suspend"):
            return _why_queued(api, body)
    live = [pod for pod in pods if phase_of(pod) not in ("Succeeded", "Failed")]
    if why := next(filter(None, (_why_pod(api, pod, root) for pod in live)), ""):
        return why
    pending = [pod["metadata"]["name"] for pod in live if phase_of(pod) == "Pending"]
    warnings = api.events("Pod") if pending else {}
    for name in pending:
        if any(w.startswith(_BLOCKING) for w in warnings.get(name, ())):
            events = reversed(api.events("Pod", f"involvedObject.name={name}")[name])
            newest = next((e for e in events if e.startswith((*_BLOCKING, *_UNBLOCKED))), "")
            if newest.startswith(_BLOCKING):
                return f"pod {name} cannot start: {newest}"
    for job in jobs:
        spec, status = job["spec"], job.get("status", {})
        if status.get("active", 0) + status.get("succeeded", 0) < spec["parallelism"]:
            name = job["metadata"]["name"]
            if refusals := [w for w in api.events("Job").get(name, ()) if w.startswith("FailedCreate")]:
                return f"pods of {name} are refused: {refusals[-1].partition(': ')[2]}"
            if why := why_failed(pods):
                return why
    warnings = {} if pods or jobs else api.events(root["kind"])
    return next(reversed(warnings.get(root["metadata"]["name"], [])), "")  # e.g. Volcano's: no room for the gang


def why_cut_off(api: Api, pods: list[Object]) -> str:
    """Return which node has no connection to the coordinator, and since when, by the newest lines of its pod's log.

    A NetworkPolicy separates all nodes alike, so asking a few is enough.
    """

    def last_line(pod: Object) -> str:
        try:
            lines = [line.strip() for line in api.log(pod["metadata"]["name"], "trainer", since_s=_LOGGED_S)]
        except ApiError:  # the pod was just deleted, or its machine does not answer
            return ""
        return next((line for line in reversed(lines) if CONNECTION in line), "")

    asked = [p for p in pods if role_of(p) == "trainer" and phase_of(p) == "Running"][:_ASKED]
    for pod, line in zip(asked, at_once(last_line, asked), strict=True):
        _, no, told = line.partition(f"no {CONNECTION}")
        if no:
            cure = "" if "refused" in told else f" ({_POLICY})"
            return f"pod {pod['metadata']['name']}: {no}{told}{cure}"
    return ""


def is_lost(api: Api, pod: Object) -> bool:
    """Return whether a deleted pod still exists long after its grace period: its machine is lost."""
    deleted = pod["metadata"].get("deletionTimestamp")  # when its grace period ends
    if deleted is None or phase_of(pod) in ("Succeeded", "Failed"):
        return False
    return api.seconds_since(deleted) > _LATE_S


def is_stuck(api: Api, pod: Object) -> bool:
    """Return whether a lost pod gets no successor: the coordinator's, and any of Volcano's, which reuses names."""
    return is_lost(api, pod) and (role_of(pod) == "coordinator" or NODE in pod["metadata"]["labels"])


def _why_queued(api: Api, body: Object) -> str:
    queue = body["metadata"].get("labels", {}).get(QUEUE)
    if queue is None:
        name = body["metadata"]["name"]
        return f"suspended, but in no queue: set cluster.queue if Kueue did it; kubectl describe of {name} shows more"
    version = api.groups().get("kueue.x-k8s.io", "v1beta1")
    for workload in api.select_visible(f"kueue.x-k8s.io/{version}", "Workload") or ():
        owners = [o["uid"] for o in workload["metadata"].get("ownerReferences", [])]
        if body["metadata"]["uid"] in owners and (why := _why_not_admitted(workload.get("status", {}))):
            return f"waits in queue {queue}: {why}"
    return f"waits in queue {queue}"


def _why_not_admitted(workload: Object) -> str:
    """Return what Kueue's workload waits for: quota or, after that, an admission check, e.g. for new machines."""
    for condition in workload.get("conditions", []):
        if condition["type"] == "QuotaReserved" and condition["status"] == "False":
            return str(condition["message"])
    waiting = (check for check in workload.get("admissionChecks", []) if check["state"] != "Ready")
    return next((f"check {check['name']} is {check['state']}: {check['message']}" for check in waiting), "")


def _why_pod(api: Api, pod: Object, root: Object) -> str:
    name, status = pod["metadata"]["name"], pod["status"]
    conditions = {c["type"]: c for c in status.get("conditions", [])}
    is_coordinator = role_of(pod) == "coordinator"
    whose = ", the coordinator's," if is_coordinator else ""
    silent = f"machine {pod['spec'].get('nodeName', '?')} of pod {name}{whose} does not answer"
    if is_stuck(api, pod):
        run = root["metadata"].get("annotations", {}).get(RUN, "NAME")
        return f"{silent}; if it is down for good: fsdp-jobs resume {run}"
    if "deletionTimestamp" in pod["metadata"]:
        return ""
    own, ready = own_state(pod), conditions.get("Ready", {})
    is_silent = ready.get("status") == "False" and not ready.get("reason")  # a kubelet gives the reason
    if is_coordinator and "running" in own and is_silent:
        return f"{silent}; without it training stops after elastic.lease_s"
    scheduled = conditions.get("PodScheduled", {"status": "True"})
    if scheduled["status"] == "False":
        return f"pod {name} cannot be scheduled: {scheduled.get('message', scheduled.get('reason', ''))}"
    others = [c["name"] for c in status.get("containerStatuses", []) if "running" in c.get("state", {})]
    if others and own.get("terminated", {}).get("exitCode"):
        ended = f"ended with {own['terminated']['exitCode']}, but its container {others[0]}, which admission added"
        return f"pod {name} {ended}, keeps it from being replaced: kubectl delete pod {name}"
    containers = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    for container in containers if "waiting" in own or not own else ():
        waiting = container.get("state", {}).get("waiting", {})
        reason = waiting.get("reason", "")
        if reason and reason not in _STARTING:
            image = f" of image {container['image']}" if "Image" in reason else ""
            return f"pod {name} cannot start: {reason}{image}: {waiting.get('message', '')}"
    return ""


def why_failed(pods: list[Object]) -> str:
    """Return how a failed pod without a successor ended, the coordinator's first; empty if there is none."""
    for _, pod in sorted({(role_of(pod), node_of(pod)): pod for pod in pods}.items()):  # the newest of each
        name, status = pod["metadata"]["name"], pod["status"]
        if phase_of(pod) == "Failed" and status.get("reason"):  # the kubelet's: Evicted, UnexpectedAdmissionError
            return f"pod {name} has failed: {status['reason']}: {status.get('message', '')}"
        own = own_state(pod)  # a sidecar among the init containers ends with it, so then only its own end counts
        for state in [own] if "terminated" in own else [c["state"] for c in status.get("initContainerStatuses", [])]:
            ended = state.get("terminated", {})
            if ended.get("exitCode", 0) not in (EXIT_DONE, EXIT_REQUEUE):
                lines = ended.get("message", "").strip().splitlines()
                last = f": {lines[-1]}" if lines else ""
                return f"pod {name} ended with {ended['exitCode']} ({ended.get('reason')}){last}"
    return ""
