"""The run directory of a machine that cannot mount the claim: filled from the pods' logs, as pod.py tells them."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass, field

from fsdp_jobs.launchers.kubernetes.api import REFUSALS, Api
from fsdp_jobs.launchers.kubernetes.labels import ROLE, STOP
from fsdp_jobs.launchers.kubernetes.observe import is_lost
from fsdp_jobs.launchers.kubernetes.skeletons import Object
from fsdp_jobs.run.directory import RunDir, write_atomic
from fsdp_jobs.run.events import Submitted

_TOLD = re.compile(
    r"@((?:events|metrics)\.jsonl|excluded\.json|"
    r"attempts/\d+/(?:verdict\.json|node-\d+/(?:rank-\d+\.log|log-times\.jsonl))):(\d+) (.*)"
)
_OVERLAP_S = 5  # asked for again, so that no line falls between two requests


@dataclass
class Progress:
    """How far the logs have been read."""

    offsets: dict[str, int] = field(default_factory=dict)  # file -> end of the last line taken
    read_at: dict[str, float] = field(default_factory=dict)  # pod's uid -> seconds since 1970, on this machine
    finished: list[str] = field(default_factory=list)  # uids of pods that have ended and were read to the end


class Mirror:
    """Copies lines from pods' logs to the same places here. Pods may repeat themselves: each line is taken once."""

    def __init__(self, run: RunDir):
        self.run = run
        self.file = run.submit / "mirror.json"
        stored = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.progress = Progress(**stored)

    def pull(self, api: Api, pods: list[Object]) -> None:
        """Take what the pods have said since the last time."""
        before = json.dumps(asdict(self.progress))
        for pod in pods:
            uid, statuses = pod["metadata"]["uid"], pod["status"].get("containerStatuses", [])
            states = [s.get("state", {}) for s in statuses if s["name"] == pod["metadata"]["labels"][ROLE]]
            if (
                uid in self.progress.finished
                or is_lost(pod)
                or not any(s.keys() & {"running", "terminated"} for s in states)
            ):
                continue
            now = time.time()
            since = self.progress.read_at.get(uid)
            window = {} if since is None else {"since_seconds": max(1, int(now - since) + _OVERLAP_S)}
            try:
                for line in api.log(pod["metadata"]["name"], pod["metadata"]["labels"][ROLE], **window):
                    self._take(line)
            except REFUSALS:
                continue  # it has just gone, or its machine does not answer: what it said is asked for the next time
            self.progress.read_at[uid] = now
            if any("terminated" in s for s in states):
                self.progress.finished.append(uid)
        if json.dumps(asdict(self.progress)) != before:
            write_atomic(self.file, json.dumps(asdict(self.progress)))

    def _take(self, said: str) -> None:
        told = _TOLD.fullmatch(said)
        if told is None:
            return
        name, end, line = told[1], int(told[2]), told[3]
        if end <= self.progress.offsets.get(name, 0):
            return
        self.progress.offsets[name] = end
        file = self.run.path / name
        if file.suffix == ".json":
            write_atomic(file, line)
        elif not (name == "events.jsonl" and json.loads(line)["event"] == Submitted.kind):  # it is there already
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as f:
                f.write(line + "\n")


def hand_on_stop(run: RunDir, api: Api, pods: list[Object]) -> None:
    """Tell the coordinator's pod of a request to stop that was made here."""
    if not run.stop_request.exists():
        return
    for pod in pods:
        live = pod["status"].get("phase") in ("Pending", "Running")
        told = STOP in pod["metadata"].get("annotations", {})
        if live and not told and pod["metadata"]["labels"][ROLE] == "coordinator":
            api.annotate_pod(pod["metadata"]["name"], STOP, run.stop_request.read_text() or "cancelled")
