"""Mirror the run directory to a machine that cannot mount the claim, from the pods' logs (pod.py)."""

from __future__ import annotations

import json
import re
from itertools import repeat

from fsdp_jobs.launchers.base import at_once
from fsdp_jobs.launchers.kubernetes.api import Api, ApiError
from fsdp_jobs.launchers.kubernetes.conditions import is_lost, own_state, phase_of
from fsdp_jobs.launchers.kubernetes.labels import STOP, role_of
from fsdp_jobs.launchers.kubernetes.skeletons import Object
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.events import Submitted
from fsdp_jobs.run.files import read_json, try_lock, write_atomic, write_json
from fsdp_jobs.run.tail import read_json_lines

_PUBLISHED = re.compile(
    r"@((?:events|metrics)\.jsonl|excluded\.json|"
    r"attempts/\d+/(?:verdict\.json|node-\d+/(?:rank-\d+\.log|log-times\.jsonl))):(\d+) (.*\n)"
)
_OVERLAP_S = 5  # read again, so that no line falls between two requests
_AT_ONCE = 16  # pods whose logs, of up to 10 MB each, are read at the same time


def pull(run: RunDir, api: Api, pods: list[Object]) -> str:
    """Copy what the pods have published since the last time; not while another command copies.

    Returns:
        Why a pod's log cannot be read; empty if all can.
    """
    with (run.submit / "mirror.lock").open("a") as file:
        return _Mirror(run, api).pull(pods) if try_lock(file) else ""


class _Mirror:
    """Copies lines from pods' logs into the same files here, each once: pods may repeat themselves."""

    def __init__(self, run: RunDir, api: Api):
        self.run, self.api, self.refusal = run, api, ""
        self._offsets: dict[str, int] = {}  # file -> end of the last line copied
        self._read_at: dict[str, float | None] = {}  # pod's uid -> seconds since 1970, cluster's clock; None: all read
        # A line per pod read, with what has changed: rewriting the offsets of thousands of ranks takes megabytes.
        self._journal = run.mirrored.with_suffix(".jsonl")
        for part in (read_json(run.mirrored), *read_json_lines(self._journal)):
            self._offsets |= part.get("offsets", {})
            self._read_at |= part.get("read_at", {})

    def pull(self, pods: list[Object]) -> str:
        self._save()  # a killed command may have left half a line
        new = [pod for pod in pods if self._may_have_more(pod)]
        for first in range(0, len(new), _AT_ONCE):
            now, some = self.api.time(), new[first : first + _AT_ONCE]
            for pod, lines in zip(some, at_once(self._read, some, repeat(now)), strict=True):
                if lines is not None:
                    self._take(pod, lines, now)
        self._save()
        return self.refusal

    def _save(self) -> None:
        write_json(self.run.mirrored, {"offsets": self._offsets, "read_at": self._read_at})
        self._journal.unlink(missing_ok=True)

    def _may_have_more(self, pod: Object) -> bool:
        is_read = self._read_at.get(pod["metadata"]["uid"], 0.0) is None
        has_begun = own_state(pod).keys() & {"running", "terminated"}
        return bool(has_begun) and not is_read and not is_lost(self.api, pod)

    def _read(self, pod: Object, now: float) -> list[str] | None:
        """Return a pod's newest lines; None if they cannot be read."""
        read_at = self._read_at.get(pod["metadata"]["uid"])
        since_s = int(now - read_at) + _OVERLAP_S if read_at is not None and read_at <= now else None
        try:
            return list(self.api.log(pod["metadata"]["name"], role_of(pod), since_s))
        except ApiError as e:
            if e.status not in (400, 404):  # with these, the pod was just deleted
                self.refusal = f"the log of pod {pod['metadata']['name']} cannot be read: {e}"
            return None

    def _take(self, pod: Object, lines: list[str], now: float) -> None:
        """Copy a pod's lines, and record at once how far: a command may be killed at any time."""
        copied: dict[str, int] = {}
        for line in lines:
            self._copy(line, copied)
        read_at = {pod["metadata"]["uid"]: None if "terminated" in own_state(pod) else now}
        self._read_at |= read_at
        if copied:
            with self._journal.open("a") as file:
                file.write(json.dumps({"offsets": copied, "read_at": read_at}) + "\n")

    def _copy(self, logged: str, copied: dict[str, int]) -> None:
        """Copy what a whole line publishes, if it is new, and put its end into `copied`."""
        published = _PUBLISHED.fullmatch(logged)
        if published is None:
            return
        name, end, line = published.groups()
        if int(end) <= self._offsets.get(name, 0):
            return
        self._offsets[name] = copied[name] = int(end)
        file = self.run.path / name
        if file.suffix == ".json":
            write_atomic(file, line)
        elif name != "events.jsonl" or f'"event": "{Submitted.kind}"' not in line:  # submission has written it
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as f:
                f.write(line)


def pass_on_stop(run: RunDir, api: Api, pods: list[Object]) -> None:
    """Annotate the coordinator's pod with a request to stop that was made here."""
    for pod in pods if run.stop_request.exists() else ():
        live = phase_of(pod) in ("Pending", "Running")
        is_new = STOP not in pod["metadata"].get("annotations", {})
        if live and is_new and role_of(pod) == "coordinator":
            api.patch(pod, {"metadata": {"annotations": {STOP: run.stop_request.read_text() or "cancelled"}}})
