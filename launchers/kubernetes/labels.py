"""What the submit side and the pods both name: objects, labels, mounts, the coordinator's port."""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_jobs.run.directory import RunDir, write_atomic

APP = "app.kubernetes.io/instance"
ALL_APPS = "app.kubernetes.io/name=fsdp-jobs"  # selects what belongs to any app
ROLE = "fsdp-jobs/role"  # coordinator | trainer
NODE = "fsdp-jobs/node"  # where pods are no members of an Indexed Job: number of the node
INDEX = "batch.kubernetes.io/job-completion-index"  # where they are
RUN = "fsdp-jobs/run"  # annotation: the run's name
STOP = "fsdp-jobs/stop"  # annotation of the coordinator's pod: save and leave, and why
QUEUE = "kueue.x-k8s.io/queue-name"

COORDINATOR_PORT = 29400
JOB_FILES = "/run/fsdp-jobs/job"  # config.yaml, plan.json and what else submission wrote
TOKEN_FILES = "/run/fsdp-jobs/token"
POD_INFO = "/run/fsdp-jobs/pod"  # annotations
TERMINATION_LOG = "/run/fsdp-jobs/termination-log"  # the verdict, for the pod's status

_LONGEST = 40  # JobSet's pods are named <app>-coordinator-0-0-xxxxx, in 63 characters


def job_files(run: RunDir) -> list[Path]:
    """What submission writes and the job reads, by names that differ; some runs have not all of them."""
    return [run.config, run.plan, run.topology, run.shape]


def first_attempt(run: RunDir, app: str) -> int | None:
    """The first attempt of a submission, once its coordinator has come to work in this very directory."""
    file = _seeded(run)
    known = json.loads(file.read_text()) if file.exists() else {}
    return int(known["first_attempt"]) if known.get("app") == app else None


def begin(run: RunDir, app: str) -> None:
    """Note that from here on attempts belong to this submission."""
    write_atomic(_seeded(run), json.dumps({"app": app, "first_attempt": run.last_attempt() + 1}))


def _seeded(run: RunDir) -> Path:
    return run.submit / "kubernetes.json"


@dataclass(frozen=True)
class Names:
    """Names of a job's objects. All of them belong to the object that is named `app`."""

    app: str

    @property
    def nodes(self) -> str:
        return f"{self.app}-node"

    @property
    def files(self) -> str:
        """Of the ConfigMap with the job's files, and of the Secret with its token."""
        return f"{self.app}-files"

    @property
    def labels(self) -> dict[str, str]:
        return {"app.kubernetes.io/name": "fsdp-jobs", APP: self.app}

    @property
    def selector(self) -> str:
        return f"{APP}={self.app}"


def node_of(pod: dict[str, Any]) -> int:
    """Number of a pod among those of its role."""
    labels = pod["metadata"]["labels"]
    return int(labels.get(INDEX, labels.get(NODE, 0)))


def new_app(run_name: str) -> str:
    """A name that no other submission has, and that is a DNS label: the run's as far as it fits, and six digits."""
    plain = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"run-{plain}"
    return f"{plain[: _LONGEST - 7].rstrip('-')}-{secrets.token_hex(3)}"
