"""Names that the submitting side and the pods share: objects, labels, mounts, the coordinator's port."""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import look_again

APP = "app.kubernetes.io/instance"
ALL_APPS = "app.kubernetes.io/name=fsdp-jobs"  # selects the objects of all apps
ROLE = "fsdp-jobs/role"  # coordinator | trainer
INDEX = "batch.kubernetes.io/job-completion-index"  # the node's number, on pods of an Indexed Job
NODE = "fsdp-jobs/node"  # the node's number, on other pods
RUN = "fsdp-jobs/run"  # annotation: the run's name
STOP = "fsdp-jobs/stop"  # annotation of the coordinator's pod: save and stop, with the reason
QUEUE = "kueue.x-k8s.io/queue-name"

COORDINATOR_PORT = 29400
# Mounted by pod.yaml and pod_coordinator.yaml.
JOB_FILES = "/run/fsdp-jobs/job"  # job_files
TOKEN_FILES = "/run/fsdp-jobs/token"
POD_INFO = "/run/fsdp-jobs/pod"  # annotations
TERMINATION_LOG = "/run/fsdp-jobs/termination-log"  # the verdict, for the pod's status

_LONGEST = 40  # JobSet's pods are named <app>-coordinator-0-0-xxxxx, in 63 characters


def job_files(run: RunDir) -> list[Path]:
    """Return the files that submission writes and the job reads. Names are unique; some runs lack some files."""
    return [run.config, run.plan, run.job, run.identity, run.topology, run.node_labels, run.shape]


def pods_write_here(run: RunDir, app: str) -> bool:
    """Return whether this is the directory in which the coordinator's pod of a submission works, not a mirror of it."""
    look_again(run.written_by)
    with suppress(FileNotFoundError):
        return run.written_by.read_text() == app
    return False


def ended_early(run: RunDir, app: str) -> Path:
    """Return the mark of a submission that ended early. It is outside the run directory, which may be another run's."""
    return run.path.parent / f".{app}.ended"


@dataclass(frozen=True)
class Names:
    """Names of a job's objects. The one that owns the others is named `app`."""

    app: str

    @property
    def nodes(self) -> str:
        return f"{self.app}-node"

    @property
    def files(self) -> str:
        """The ConfigMap with the job's files, and the Secret with its token."""
        return f"{self.app}-files"

    @property
    def labels(self) -> dict[str, str]:
        return {"app.kubernetes.io/name": "fsdp-jobs", APP: self.app}

    @property
    def selector(self) -> str:
        return f"{APP}={self.app}"


def role_of(pod: dict[str, Any]) -> str:
    """Return a pod's role; empty if it is not a job's pod."""
    return str(pod["metadata"]["labels"].get(ROLE, ""))


def node_of(pod: dict[str, Any]) -> int:
    """Return the number of a pod among those of its role."""
    labels = pod["metadata"]["labels"]
    return int(labels.get(INDEX, labels.get(NODE, 0)))


def app_of(run_name: str, submission: str) -> str:
    """Return a DNS label for a run of a submission: the run's name, and the six random digits of the submission's id.

    If a name does not fit or has other characters, six digits of its hash follow: the runs of a sweep are submitted
    together, and their numbers are at the end of their names.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"run-{plain}"
    if plain != run_name or len(plain) > _LONGEST - 7:
        plain = f"{plain[: _LONGEST - 14].rstrip('-')}-{hashlib.sha256(run_name.encode()).hexdigest()[:6]}"
    return f"{plain}-{submission[-6:]}"
