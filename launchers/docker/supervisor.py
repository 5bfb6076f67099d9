"""The supervisor of a job in containers: restarts dead ones and removes them at the end. No torch.

    python -m fsdp_jobs.launchers.docker.supervisor RUN_DIR

Docker's restart policies do neither after `docker kill`. Containers do not depend on this process: without it they
continue to train, over any number of attempts.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import docker

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.resolve import most_nodes
from fsdp_jobs.config.schema import load_config
from fsdp_jobs.launchers.docker.containers import cluster_of, connected, containers_of, is_running, remove
from fsdp_jobs.launchers.supervisor import StorageErrors, main
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.threads import wait_until
from fsdp_jobs.run.verdict import EXIT_FAILED, EXIT_REQUEUE, Verdict, judge

_POLL_S = 0.5
_RETRY_S = 2.0
_LEAVE_S = 40.0  # containers that still run so long after the job's end are killed and removed
_MISSED_S = 5.0  # before a missing container is recorded; the loss of its node is recorded first
_NO_DAEMON_S = 600.0  # after which a daemon that does not answer is given up
_LEFT = (EXIT_FAILED, EXIT_REQUEUE)  # exit codes of containers that are not restarted: gave up, or asked to stop

logger = logging.getLogger(__name__)


class Supervisor:
    """Restarts one job's containers, and notices when it is over."""

    def __init__(self, run: RunDir):
        self.run, self.config = run, load_config(run.config)
        self._missed: dict[str, float] = {}  # node without a container that can run -> since when; inf: recorded

    @property
    def _attempt(self) -> int:
        """The newest attempt of this submission, or the first that is to come."""
        return max(self.run.first_attempt(), self.run.last_attempt())

    def poll(self, api: docker.APIClient) -> bool:
        """Restart dead containers; True when the job is over."""
        containers = containers_of(api, self.run)
        if self._is_over(api, containers):
            return True
        absent = {f"node-{i}" for i in range(most_nodes(self.config))} - containers.keys()
        cure = f"fsdp-jobs cancel and resume {self.run.name} make a new one"
        troubles = {name: f"the container of {name} was removed; {cure}" for name in absent}
        for name, container in containers.items():
            exit_code = container["State"]["ExitCode"]
            if is_running(container) or exit_code in _LEFT:
                continue
            try:
                api.start(container["Id"])
            except docker.errors.APIError as e:  # its disk may be full; it is tried again
                troubles[name] = f"Docker cannot restart the container of {name}: {e.explanation}"
                continue
            events.record(self.run, self._attempt, events.ProcessRestarted(name, exit_code))
            if self._missed.pop(name, 0.0) == math.inf:
                events.record(self.run, self._attempt, events.Waiting(""))
        for name, why in troubles.items():
            if time.monotonic() - self._missed.setdefault(name, time.monotonic()) > _MISSED_S:
                self._missed[name] = math.inf
                events.record(self.run, self._attempt, events.Waiting(why))
        return False

    def _is_over(self, api: docker.APIClient, containers: dict[str, dict[str, Any]]) -> bool:
        """Whether no further attempt follows."""
        if Verdict.final(self.run) is not None:
            return True
        coordinator = containers.get("coordinator")
        if coordinator is None:
            judge(self.run, Verdict("infrastructure", "stop", "the coordinator's container was removed"))
            return True
        state = coordinator["State"]
        if is_running(coordinator) or state["ExitCode"] not in _LEFT:
            return False
        verdict = Verdict.read(self.run, self._attempt) if state["ExitCode"] == EXIT_REQUEUE else None
        if verdict is not None:
            judge(self.run, Verdict("preempted", "stop", f"the coordinator's container was stopped: {verdict.reason}"))
        else:
            output = api.logs(coordinator["Id"], tail=15).decode(errors="replace")
            reason = ": ".join(["the coordinator's container failed", *output.splitlines()[-1:]])
            judge(self.run, Verdict("infrastructure", "stop", reason, last_lines=output))
        return True


def supervise(run: RunDir) -> None:
    """Supervise a job to its end, then remove its containers and its network."""
    supervisor, storage_errors = Supervisor(run), StorageErrors()
    answered = time.monotonic()
    while True:
        try:
            with storage_errors, connected() as api:
                while not supervisor.poll(api):
                    answered = time.monotonic()
                    time.sleep(_POLL_S)
                wait_until(lambda: not any(map(is_running, containers_of(api, run).values())), _LEAVE_S, _POLL_S)
                if not cluster_of(supervisor.config).keep:
                    remove(api, run)
                return
        except BadInput as e:  # a container was just removed, or the daemon is being restarted
            logger.warning("%s", e)
            if time.monotonic() - answered > _NO_DAEMON_S:
                raise
        time.sleep(_RETRY_S)


if __name__ == "__main__":
    main(supervise)
