"""Simulated controllers and kubelets: Jobs make pods, pods are real processes in namespaces of this machine.

What is like the real thing: Indexed Jobs with backoff limits, pod failure, replacement and success policies,
suspension, deletion with grace, owners; pods with their own mounts, host name, PID 1, /dev/shm and exit codes, on
machines with labels that can be drained, lost, or cut off from their kubelet. What is not: images, users, quantities,
time scales. Needs root.

What a docstring or a comment says to be "seen" was seen on Kubernetes 1.36.2 (API server, controllers and scheduler,
four kubelets with containerd), and a change here has to keep it. The rest follows Kubernetes' documentation.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from fsdp_jobs.run.processes import die_with_parent
from tests.jobs import ROOT, signal_all
from tests.launchers.kubernetes.simulated_api import NAMESPACE, Object, SimulatedApi, now

INDEX = "batch.kubernetes.io/job-completion-index"
JOB_NAME = "batch.kubernetes.io/job-name"
TRACKING = "batch.kubernetes.io/job-tracking"
_FORCED_S = 2.0  # seen: between SIGTERM and SIGKILL of a forced deletion
_LOG_BYTES = 10 << 20  # of a container, then the kubelet drops the oldest lines (containerLogMaxSize)
_BACKOFF_S = 0.5  # ten seconds and more on a real cluster
_TICK_S = 0.1

# A container: mounts, then the command as PID 1. Arguments: host name, hosts file, then from:to, --, command.
_CONTAINER = """
set -e
hostname "$1"; hosts=$2; shift 2
mount -t proc proc /proc
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mount --bind "$hosts" /etc/hosts
while [ "$1" != -- ]; do
  from=${1%%:*} to=${1#*:}
  if [ -d "$from" ]; then mkdir -p "$to"; else mkdir -p "$(dirname "$to")"; : > "$to"; fi
  mount --bind "$from" "$to"
  shift
done
shift
cd /
exec "$@"
"""


@cache
def why_not() -> str:
    """What is missing for pods as processes; empty when nothing is."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "iptables") if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (packages util-linux, iproute2, iptables)"
    return "" if os.geteuid() == 0 else "needs root, to give pods their own mounts"


@dataclass
class Machine:
    """A simulated machine with a kubelet."""

    name: str
    slots: int  # pods it takes
    cordoned: bool = False
    lost: bool = False


@dataclass
class Process:
    """What runs for a pod."""

    popen: subprocess.Popen[bytes]
    log: Path
    folder: Path
    killed_at: float | None = None  # when grace ends
    was_killed: bool = False  # by SIGKILL, which unshare does not pass on
    lines: list[tuple[float, int]] = field(default_factory=list)  # time and end of what was logged then


class SimulatedCluster:
    """Two machines, one claim named `runs`, and the controllers, in a thread."""

    def __init__(self, folder: Path, slots: int = 4):
        self.folder, self.api = folder, SimulatedApi()
        self.machines = {n: Machine(n, slots) for n in ("machine-a", "machine-b")}
        self.claim = folder / "claim"
        self.claim.mkdir(parents=True)
        self.hosts = folder / "hosts"
        self.hosts.write_text("127.0.0.1 localhost\n")
        self.processes: dict[str, Process] = {}  # by pod's uid
        self._judged: set[str] = set()  # uids of ended pods that their Job has counted
        self._failures: dict[str, int] = {}  # Job's uid, or uid/index -> failures that count
        self._not_before: dict[str, float] = {}
        self._addresses = 1
        self._network: subprocess.Popen[bytes] | None = None  # holds the pods' network
        self._left = threading.Event()
        self.api.on_delete = self._on_delete
        self.api.log_of = self._log_of
        modes = {"spec": {"accessModes": ["ReadWriteMany"]}, "metadata": {"name": "runs"}}
        self.api.put("", "persistentvolumeclaims", {"kind": "PersistentVolumeClaim", **modes})
        self._thread = threading.Thread(target=self._control, daemon=True)

    def __enter__(self) -> SimulatedCluster:
        self._network = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "ip link set lo up && exec sleep infinity"], preexec_fn=die_with_parent
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join()
        for process in self.processes.values():
            process.popen.kill()
            process.popen.wait()
        if self._network is not None:
            self._network.kill()
            self._network.wait()
        self.api.close()

    def pods(self, role: str | None = None) -> list[Object]:
        found = sorted(self.api.all("", "pods"), key=lambda p: p["metadata"]["sequence"])
        return [p for p in found if role is None or p["metadata"]["labels"]["fsdp-jobs/role"] == role]

    def running(self, role: str, index: int | None = None) -> list[Object]:
        return [
            p
            for p in self.pods(role)
            if p["status"].get("phase") == "Running"
            and "deletionTimestamp" not in p["metadata"]
            and (index is None or p["metadata"]["labels"][INDEX] == str(index))
        ]

    def kill(self, pod: Object) -> None:
        """SIGKILL to everything in a pod, as the kernel does when memory runs out."""
        process = self.processes[pod["metadata"]["uid"]]
        process.was_killed = True
        signal_all(psutil.Process(process.popen.pid).children())

    def drain(self, name: str) -> None:
        """Evict every pod of a machine, as `kubectl drain` does."""
        with self.api.lock:
            self.machines[name].cordoned = True
            for pod in self.pods():
                if pod["spec"].get("nodeName") == name and pod["status"]["phase"] == "Running":
                    self.disrupt(pod, "EvictionByEvictionAPI")

    def disrupt(self, pod: Object, reason: str) -> None:
        """Take a pod away: eviction, or preemption by the scheduler."""
        with self.api.lock:
            pod["status"].setdefault("conditions", []).append(
                {"type": "DisruptionTarget", "status": "True", "reason": reason}
            )
            self.api.delete(pod)

    def lose(self, name: str, ago_s: float = 0, has_power: bool = False) -> None:
        """A machine is silent: nobody says so, its pods never end, and were given up so long ago.

        Seen: where only the kubelet is silent, what its pods do goes on. A pod of a Job is replaced elsewhere at once
        when it is given up, unless the Job has a podFailurePolicy: then only when its end is known.
        """
        with self.api.lock:
            self.machines[name].lost = True
            for pod in self.pods():
                process = self.processes.get(pod["metadata"]["uid"])
                if pod["spec"].get("nodeName") == name and process is not None:
                    pod["metadata"]["deletionTimestamp"] = now(-ago_s)
                    if not has_power:
                        process.was_killed = True
                        signal_all(psutil.Process(process.popen.pid).children())

    def find(self, name: str) -> None:
        """A silent machine answers again. Seen: its kubelet ends the pods that were given up, with SIGTERM."""
        with self.api.lock:
            self.machines[name].lost = False
            for pod in self.pods():
                if pod["spec"].get("nodeName") == name and pod["metadata"].pop("deletionTimestamp", None) is not None:
                    self.api.delete(pod)

    def enforce(self, *policies: Object) -> None:
        """Drop packets to pods, as a network plugin does by these policies, and by no others from now on.

        All pods have the labels of the job's name and one network here: either all reach each other, or none.
        """
        labels = {"app.kubernetes.io/name": "fsdp-jobs"}.items()
        chosen = [p["spec"] for p in policies if labels >= p["spec"]["podSelector"].get("matchLabels", {}).items()]
        sources = [source for spec in chosen for rule in spec.get("ingress", []) for source in rule["from"]]
        reach = any(labels >= source["podSelector"]["matchLabels"].items() for source in sources)
        assert self._network is not None
        enter = ["nsenter", "-t", str(self._network.pid), "--net", "iptables", "--wait"]
        subprocess.run([*enter, "-F", "INPUT"], check=True)
        if chosen and not reach:
            pods = ["-m", "iprange", "--dst-range", "127.0.0.2-127.255.255.254"]
            subprocess.run([*enter, "-A", "INPUT", *pods, "-j", "DROP"], check=True)

    def finished(self, job: Object) -> str:
        held = [c["type"] for c in job["status"].get("conditions", []) if c["type"] in ("Complete", "Failed")]
        return held[0] if held else ""

    # What a kubelet does.

    def _on_delete(self, body: Object, grace: int | None) -> bool:
        """Whether an object goes at once. A pod with processes is told to end first, even when it is forced (seen)."""
        process = self.processes.get(body["metadata"]["uid"])
        machine = self.machines.get(body.get("spec", {}).get("nodeName", ""))
        if machine is not None and machine.lost:
            body["metadata"].setdefault("deletionTimestamp", now())
            body["metadata"]["deletionGracePeriodSeconds"] = grace
            return grace == 0
        if process is None or process.popen.poll() is not None:
            return True
        if "deletionTimestamp" not in body["metadata"] or grace == 0:
            seconds = body["spec"]["terminationGracePeriodSeconds"] if grace is None else max(grace, _FORCED_S)
            body["metadata"]["deletionTimestamp"] = now(seconds)
            process.killed_at = time.monotonic() + seconds
            signal_all(psutil.Process(process.popen.pid).children(), signal.SIGTERM)
        return False

    def _start(self, pod: Object) -> None:
        uid, spec, metadata = pod["metadata"]["uid"], pod["spec"], pod["metadata"]
        folder = self.folder / "pods" / metadata["name"]
        folder.mkdir(parents=True)
        self._addresses += 1
        pod["status"]["podIP"] = f"127.0.0.{self._addresses}"
        host = spec.get("hostname", metadata["name"])
        with self.hosts.open("r+") as f:  # in place: every pod has this file mounted
            lines = [line for line in f if host not in line.split()]
            f.seek(0)
            f.truncate()
            f.writelines([*lines, f"{pod['status']['podIP']} {host} {host}.{spec['subdomain']}\n"])
        container = spec["containers"][0]
        mounts = [f"{folder / 'termination'}:{container['terminationMessagePath']}"]
        (folder / "termination").touch()
        volumes = {v["name"]: v for v in spec["volumes"]}
        for mount in container["volumeMounts"]:
            source = self._volume(pod, volumes[mount["name"]], folder)
            if source is not None:
                mounts.append(f"{source}:{mount['mountPath']}")
        env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": ""}
        env["PYTHONPATH"] = str(ROOT)  # the image has this checkout
        for variable in container["env"]:
            value = variable.get("value")
            if value is None:
                value = _path(pod, variable["valueFrom"]["fieldRef"]["fieldPath"])
            env[variable["name"]] = value
        env["JOB_COMPLETION_INDEX"] = metadata["labels"][INDEX]
        command = [c.replace("$(JOB_COMPLETION_INDEX)", env["JOB_COMPLETION_INDEX"]) for c in container["command"]]
        assert self._network is not None
        spaces = ["--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
        with (folder / "log").open("ab") as log:
            popen = subprocess.Popen(
                [
                    "nsenter",
                    "-t",
                    str(self._network.pid),
                    "--net",
                    "unshare",
                    *spaces,
                    "bash",
                    "-c",
                    _CONTAINER,
                    "container",
                    host,
                    str(self.hosts),
                    *mounts,
                    "--",
                    *command,
                ],
                env=env,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )
        self.processes[uid] = Process(popen, folder / "log", folder)
        pod["status"] |= {
            "phase": "Running",
            "containerStatuses": [
                {"name": container["name"], "image": container["image"], "state": {"running": {"startedAt": now()}}}
            ],
        }

    def _volume(self, pod: Object, volume: Object, folder: Path) -> Path | None:
        """A folder with what the volume holds; None for an empty one, which the machine's own stands in for."""
        place = folder / volume["name"]
        if "persistentVolumeClaim" in volume:
            return self.claim
        if "configMap" in volume:
            place.mkdir()
            for name, text in self.api.objects["/configmaps", volume["configMap"]["name"]]["data"].items():
                (place / name).write_text(text)
        elif "secret" in volume:
            place.mkdir()
            secret = self.api.objects["/secrets", volume["secret"]["secretName"]]
            for name, text in secret["stringData"].items():
                (place / name).write_text(text)
        elif "downwardAPI" in volume:
            place.mkdir()
            self._write_annotations(pod, place)
        else:
            return None
        return place

    def _write_annotations(self, pod: Object, place: Path) -> None:
        lines = [f"{k}={json.dumps(v)}\n" for k, v in pod["metadata"].get("annotations", {}).items()]
        (place / "annotations").write_text("".join(lines))

    def _tend(self, pod: Object) -> None:
        """What the kubelet of the pod's machine does in a moment."""
        process = self.processes[pod["metadata"]["uid"]]
        if self.machines[pod["spec"]["nodeName"]].lost:
            return
        if (process.folder / "pod").exists():
            self._write_annotations(pod, process.folder / "pod")
        size = process.log.stat().st_size
        if not process.lines or process.lines[-1][1] < size:
            process.lines.append((time.time(), size))
        code = process.popen.poll()
        if code is None and process.killed_at is not None and time.monotonic() > process.killed_at:
            process.was_killed = True
            process.popen.kill()
        elif code is not None and pod["status"]["phase"] == "Running":
            code = 137 if process.was_killed else code
            said = (process.folder / "termination").read_text()
            if not said and code:  # FallbackToLogsOnError. Seen: a broken image's traceback is there
                said = process.log.read_text(errors="replace")[-2048:]
            reason = "Completed" if code == 0 else "Error"
            ended = {"exitCode": code, "reason": reason, "message": said, "finishedAt": now()}
            pod["status"]["containerStatuses"][0]["state"] = {"terminated": ended}
            pod["status"]["phase"] = "Failed" if code else "Succeeded"

    def _log_of(self, pod: Object, follow: bool) -> Iterator[tuple[float, bytes]]:
        process = self.processes.get(pod["metadata"]["uid"])
        place = 0
        while process is not None:
            over = not follow or process.popen.poll() is not None
            content = process.log.read_bytes()
            if len(content) > _LOG_BYTES:
                place = max(place, content.index(b"\n", len(content) - _LOG_BYTES) + 1)
            written = list(process.lines)
            for line in content[place:].splitlines(keepends=True):
                place += len(line)
                yield next((at for at, end in written if end >= place), time.time()), line
            if over:
                return
            time.sleep(_TICK_S)

    # What the controllers do.

    def _control(self) -> None:
        while not self._left.wait(_TICK_S):
            with self.api.lock:
                for job in self.api.all("batch", "jobs"):
                    if not self.finished(job):
                        self._reconcile(job)
                for pod in self.pods():
                    if pod["metadata"]["uid"] in self.processes:
                        self._tend(pod)
                    elif "deletionTimestamp" not in pod["metadata"]:
                        self._schedule(pod)
                    self._let_go(pod)

    def _let_go(self, pod: Object) -> None:
        """Take the finalizer from a pod whose end its Job has counted, or whose Job is over; forget a deleted one.

        Seen: until then the finalizer holds the pod, and a forced deletion waits for it for ever.
        """
        metadata = pod["metadata"]
        owners = [
            j for j in self.api.all("batch", "jobs") if j["metadata"]["uid"] == metadata["ownerReferences"][0]["uid"]
        ]
        has_gone = metadata["uid"] not in self.processes or pod["status"]["phase"] in ("Succeeded", "Failed")
        if "deletionTimestamp" in metadata and metadata["uid"] not in self.processes:
            self._judged.add(metadata["uid"])  # it was never started
        if metadata["uid"] in self._judged or not owners or self.finished(owners[0]):
            metadata.pop("finalizers", None)
        has_gone = has_gone or metadata.get("deletionGracePeriodSeconds") == 0
        if has_gone and "deletionTimestamp" in metadata and "finalizers" not in metadata:
            self.api.remove(pod)

    def _schedule(self, pod: Object) -> None:
        used = dict.fromkeys(self.machines, 0)
        for other in self.pods():
            if other["status"]["phase"] in ("Pending", "Running") and "nodeName" in other["spec"]:
                used[other["spec"]["nodeName"]] += 1
        usable = (n for n, m in self.machines.items() if not m.cordoned and not m.lost and used[n] < m.slots)
        free = [n for n in usable if self._labels_of(n).items() >= pod["spec"].get("nodeSelector", {}).items()]
        if not free:
            message = f"0/{len(self.machines)} nodes are available: {len(self.machines)} Insufficient cpu."
            pod["status"]["conditions"] = [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            ]
            return
        pod["spec"]["nodeName"] = min(free, key=lambda n: used[n])
        pod["status"].pop("conditions", None)
        self._start(pod)

    def _labels_of(self, machine: str) -> dict[str, str]:
        """Labels of the machine's Node object, which a test has put there."""
        node = self.api.objects.get(("/nodes", machine), {"metadata": {}})
        labels: dict[str, str] = node["metadata"].get("labels", {})
        return labels

    def _reconcile(self, job: Object) -> None:
        """Do what the Job controller does. Seen: a Job that has ended deletes its own pods, and nothing else."""
        spec, uid = job["spec"], job["metadata"]["uid"]
        pods = [p for p in self.pods() if p["metadata"]["ownerReferences"][0]["uid"] == uid]
        for pod in pods:
            if pod["status"]["phase"] == "Failed" and pod["metadata"]["uid"] not in self._judged:
                self._judge(job, pod)
            elif pod["status"]["phase"] == "Succeeded":
                self._judged.add(pod["metadata"]["uid"])
                job.setdefault("done", {})[pod["metadata"]["labels"][INDEX]] = True
        done = job.get("done", {})
        live = [p for p in pods if p["status"]["phase"] in ("Pending", "Running")]
        active = [p for p in live if "deletionTimestamp" not in p["metadata"]]
        job["status"] |= {"active": len(active), "succeeded": len(done), "terminating": len(live) - len(active)}
        enough = [r["succeededCount"] for r in spec.get("successPolicy", {}).get("rules", [])]
        if self.finished(job):
            pass
        elif len(done) == spec["completions"] or any(len(done) >= n for n in enough):
            job["status"]["conditions"] = [{"type": "Complete", "status": "True", "lastTransitionTime": now()}]
        elif spec.get("suspend"):
            for pod in active:
                self.api.delete(pod)
            return
        if self.finished(job):
            for pod in active:
                self.api.delete(pod)
            return
        waits = live if spec["podReplacementPolicy"] == "Failed" else active
        held = {p["metadata"]["labels"][INDEX] for p in waits}
        for index in map(str, range(spec["completions"])):
            place = f"{uid}/{index}"
            if index not in held and index not in done and time.monotonic() >= self._not_before.get(place, 0):
                if (refusal := self.api.refuse({"kind": "Pod", **spec["template"]})) is not None:
                    self.api.warn("Job", job["metadata"]["name"], "FailedCreate", f"Error creating: {refusal.message}")
                    continue
                self._make_pod(job, index)

    def _judge(self, job: Object, pod: Object) -> None:
        """Count a failed pod, or not, by the Job's pod failure policy."""
        self._judged.add(pod["metadata"]["uid"])
        index, uid, spec = pod["metadata"]["labels"][INDEX], job["metadata"]["uid"], job["spec"]
        self._not_before[f"{uid}/{index}"] = time.monotonic() + _BACKOFF_S
        code = pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"]
        disrupted = any(c["type"] == "DisruptionTarget" for c in pod["status"].get("conditions", []))
        for rule in spec.get("podFailurePolicy", {}).get("rules", []):
            matches = disrupted if "onPodConditions" in rule else code in rule["onExitCodes"]["values"]
            if matches and rule["action"] == "Ignore":
                return
            if matches and rule["action"] == "FailJob":
                self._fail(job, "PodFailurePolicy")
                return
        place = f"{uid}/{index}" if "backoffLimitPerIndex" in spec else uid
        self._failures[place] = self._failures.get(place, 0) + 1
        if self._failures[place] > spec.get("backoffLimitPerIndex", spec.get("backoffLimit", 6)):
            self._fail(job, "BackoffLimitExceeded")

    def _fail(self, job: Object, reason: str) -> None:
        failed = {"type": "Failed", "status": "True", "reason": reason, "lastTransitionTime": now()}
        job["status"]["conditions"] = [failed]

    _made = 0

    def _make_pod(self, job: Object, index: str) -> None:
        self._made += 1
        name = job["metadata"]["name"]
        template = json.loads(json.dumps(job["spec"]["template"]))
        metadata: dict[str, Any] = {
            "name": f"{name}-{index}-{self._made:05x}",
            "namespace": NAMESPACE,
            "labels": {**template["metadata"]["labels"], INDEX: index, JOB_NAME: name},
            "annotations": {**template["metadata"].get("annotations", {}), INDEX: index},
            "ownerReferences": [{"kind": "Job", "name": name, "uid": job["metadata"]["uid"]}],
            "finalizers": [TRACKING],
            "sequence": self._made,  # not of a real pod: creation times are whole seconds
        }
        spec = {**template["spec"], "hostname": f"{name}-{index}"}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": {"phase": "Pending"}}
        self.api.put("", "pods", body)


def _path(body: Object, path: str) -> str:
    value: Any = body
    for part in path.split("."):
        value = value[part]
    return str(value)
