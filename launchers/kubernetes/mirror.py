"""The run directory on a machine that cannot mount the claim: copied from the pods' logs (pod.py)."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass, field

from fsdp_jobs.launchers.kubernetes.api import Api, ApiError
from fsdp_jobs.launchers.kubernetes.conditions import is_lost
from fsdp_jobs.launchers.kubernetes.labels import ROLE, STOP
from fsdp_jobs.launchers.kubernetes.skeletons import Object
from fsdp_jobs.run.directory import RunDir, write_atomic
from fsdp_jobs.run.events import Submitted

_PUBLISHED = re.compile(
    r"@((?:events|metrics)\.jsonl|excluded\.json|"
    r"attempts/\d+/(?:verdict\.json|node-\d+/(?:rank-\d+\.log|log-times\.jsonl))):(\d+) (.*)"
)
_OVERLAP_S = 5  # read again, so that no line falls between two requests


@dataclass
class Position:
    """How far the logs have been read."""

    offsets: dict[str, int] = field(default_factory=dict)  # file -> end of the last line copied
    read_at: dict[str, float] = field(default_factory=dict)  # pod's uid -> seconds since 1970, on this machine
    finished: list[str] = field(default_factory=list)  # uids of pods that have ended and were read to the end


class Mirror:
    """Copies lines from pods' logs into the same files here, each once: pods may repeat themselves."""

    def __init__(self, run: RunDir):
        self.run = run
        self.position = Position(**json.loads(run.mirrored.read_text())) if run.mirrored.exists() else Position()

    def pull(self, api: Api, pods: list[Object]) -> None:
        """Copy what the pods have published since the last time."""
        before = json.dumps(asdict(self.position))
        for pod in pods:
            self._read(api, pod)
        if json.dumps(asdict(self.position)) != before:
            write_atomic(self.run.mirrored, json.dumps(asdict(self.position)))

    def _read(self, api: Api, pod: Object) -> None:
        metadata, position = pod["metadata"], self.position
        uid, container = metadata["uid"], metadata["labels"][ROLE]
        statuses = pod["status"].get("containerStatuses", [])
        states = {state for s in statuses if s["name"] == container for state in s.get("state", {})}
        if uid in position.finished or is_lost(pod) or not states & {"running", "terminated"}:
            return
        now = time.time()
        since_s = max(1, int(now - position.read_at[uid]) + _OVERLAP_S) if uid in position.read_at else None
        try:
            for line in api.log(metadata["name"], container, since_s):
                self._copy(line)
        except ApiError:
            return  # it has just gone, or its machine does not answer: read again the next time
        position.read_at[uid] = now
        if "terminated" in states:
            position.finished.append(uid)

    def _copy(self, logged: str) -> None:
        published = _PUBLISHED.fullmatch(logged)
        if published is None:
            return
        name, end, line = published[1], int(published[2]), published[3]
        if end <= self.position.offsets.get(name, 0):
            return
        self.position.offsets[name] = end
        file = self.run.path / name
        if file.suffix == ".json":
            write_atomic(file, line)
        elif not (name == "events.jsonl" and json.loads(line)["event"] == Submitted.kind):  # submission has written it
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as f:
                f.write(line + "\n")


def pass_on_stop(run: RunDir, api: Api, pods: list[Object]) -> None:
    """Annotate the coordinator's pod with a request to stop that was made here."""
    if not run.stop_request.exists():
        return
    for pod in pods:
        live = pod["status"].get("phase") in ("Pending", "Running")
        annotated = STOP in pod["metadata"].get("annotations", {})
        if live and not annotated and pod["metadata"]["labels"][ROLE] == "coordinator":
            reason = run.stop_request.read_text() or "cancelled"
            api.patch(pod, {"metadata": {"annotations": {STOP: reason}}})
