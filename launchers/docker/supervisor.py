"""What a cluster's controller does, for a job in containers: starts dead ones again and cleans up. No torch.

    python -m fsdp_jobs.launchers.docker.supervisor RUN_DIR

A restart policy of Docker's does neither after `docker kill`. The job does not need this process: while it is
away, containers train on, through as many attempts as it takes.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import docker
from docker.errors import APIError
from requests.exceptions import RequestException

from fsdp_jobs.config.clusters import DockerClusterConfig
from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.schema import load_config
from fsdp_jobs.launchers.detached import judge
from fsdp_jobs.launchers.docker.containers import connect, containers_of, remove
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.verdict import EXIT_FAILED, EXIT_REQUEUE, Verdict

_POLL_S = 0.5
_LEAVE_S = 40.0  # containers that still run so long after the job's end are removed running
_NO_DAEMON_S = 600.0  # a daemon that has been away for so long does not come back


class Supervisor:
    """One job's controller."""

    def __init__(self, run: RunDir):
        self.run, self.first = run, run.first_attempt()
        self._over_at: float | None = None

    def tend(self, api: docker.APIClient) -> bool:
        """Start what died again. True when the job is over and its containers have stopped, or had time to."""
        containers = containers_of(api, str(self.run.path))
        stopped = [c for c in containers if not c["State"]["Running"]]
        if self._over_at is None and self._is_over(api, containers):
            self._over_at = time.monotonic()
        if self._over_at is not None:
            return len(stopped) == len(containers) or time.monotonic() - self._over_at > _LEAVE_S
        for container in stopped:
            exit_code = container["State"]["ExitCode"]
            if exit_code not in (EXIT_FAILED, EXIT_REQUEUE):  # it gave up, or left as it was asked to
                name, attempt = container["Config"]["Hostname"], max(self.first, self.run.last_attempt())
                events.record(self.run, attempt, events.ProcessRestarted(name, exit_code))
                api.start(container["Id"])
        return False

    def _is_over(self, api: docker.APIClient, containers: list[dict[str, Any]]) -> bool:
        """Whether there will be no other attempt."""
        attempt = self.run.last_attempt()
        verdict = Verdict.read(self.run, attempt) if attempt >= self.first else None
        if verdict is not None and verdict.decision == "stop":
            return True
        coordinator = next((c for c in containers if c["Config"]["Hostname"] == "coordinator"), None)
        if coordinator is None:
            judge(self.run, Verdict("infrastructure", "stop", "the coordinator's container was removed"))
            return True
        if coordinator["State"]["Running"] or coordinator["State"]["ExitCode"] not in (EXIT_FAILED, EXIT_REQUEUE):
            return False
        if coordinator["State"]["ExitCode"] == EXIT_FAILED:
            said = api.logs(coordinator["Id"], tail=15).decode(errors="replace")
            why = "the coordinator's container could not go on"
            judge(self.run, Verdict("infrastructure", "stop", why, last_lines=said))
        else:
            saved = verdict.reason if verdict is not None else "before anything was saved"
            why = f"the coordinator's container was stopped: {saved}"
            judge(self.run, Verdict("preempted", "stop", why))
        return True


def supervise(run: RunDir) -> None:
    """Tend a job to its end, then remove its containers and its network."""
    cluster = load_config(run.config).cluster
    assert isinstance(cluster, DockerClusterConfig)
    supervisor = Supervisor(run)
    answered = time.monotonic()
    while True:
        try:
            api = connect()
            while not supervisor.tend(api):
                answered = time.monotonic()
                time.sleep(_POLL_S)
            if not cluster.keep:
                remove(api, str(run.path))
            return
        except (APIError, RequestException, BadInput) as e:  # a container that has just gone; a daemon being restarted
            print(e, file=sys.stderr, flush=True)
            if time.monotonic() - answered > _NO_DAEMON_S:
                raise
            time.sleep(2)


if __name__ == "__main__":
    supervise(RunDir(sys.argv[1]))
